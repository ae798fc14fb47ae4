"""A small OpenAI-compatible server with scripted timing, to drive the command line against.

python scripted_engine.py PORT_FILE [--drafts K] [--no-metrics] [--die-after N] [--step-ms MS]
    [--wrong-every N] [--wrong-step N] [--refuse STATUS] [--slots N] [--refuse-above N]
    [--tokens N] [--loop] [--shift NATS] [--tie] [--no-logprobs] [--lie KIND] [--lie-from N]
    [--max-model-len N] [--hold FILE] [--hold-after N]

It answers 12 tokens a request, one a step; with --drafts every step carries three (two drafts of
K accepted, and the bonus). With --slots it answers as many at once, the others wait; with
--refuse-above it refuses a request that finds as many running; while the file --hold is there,
requests behind the first --hold-after wait. Its counters are vLLM's, and right
unless it is asked to lie, from request N on: `rank-missing` (two ranks serve in turn, the second's
series vanish), `reset` (all begin at zero again, once), `other-traffic` (as if a second client
asked the same), `bonus` (the target's own token of each step counted as accepted), `scrape-fails`
(the page answers 500).

Its model says token n at place n of an answer; --wrong-every puts token 99 into every Nth answer,
--wrong-step into every Nth verification. It tells log-probabilities as vLLM does: token 99 is out
of the question, or with --tie as likely as the right one; --shift makes them another model's.
With --loop the answers are two tokens over and over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

PROMPT_IDS = [1000, 1001, 1002, 1003, 1004]


class Rank:
    """What one data-parallel rank counted."""

    def __init__(self) -> None:
        self.requests = self.drafts = self.tokens = 0


class Engine:
    """Serves, and counts what it served."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.requests = self.running = 0
        self.ranks = [Rank() for _ in range(1 + (options.lie == "rank-missing"))]
        self.slots = asyncio.Semaphore(options.slots)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length:")[2].partition("\r\n")[0].strip()
                body = await reader.readexactly(int(length or 0))
                await self.answer(head.split()[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            model = {"id": "scripted", "max_model_len": self.options.max_model_len}
            self.whole(writer, json.dumps({"data": [model]}))
        elif path == "/metrics" and self.lies("scrape-fails"):
            self.whole(writer, "internal error", "text/plain", status=500)
        elif path == "/metrics" and not self.options.no_metrics:
            self.whole(writer, self.metrics(), "text/plain")
        elif path == "/v1/chat/completions":
            asked = json.loads(body)
            if not asked.get("stream"):
                choice = {
                    "message": {"role": "assistant", "content": "0"},
                    "finish_reason": "length",
                }
                self.whole(
                    writer, json.dumps({"choices": [choice], "prompt_token_ids": PROMPT_IDS})
                )
                return
            async with self.slots:
                await self.generate(asked, writer)
        elif path == "/v1/completions" and not self.options.no_logprobs:
            self.whole(writer, json.dumps(self.scored(json.loads(body))))
        else:
            self.whole(writer, '{"error": {"message": "no such path"}}', status=404)
        await writer.drain()

    def scored(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The log-probabilities of the next token, or of a fixed text's continuation."""
        prompt, n = asked["prompt"], asked["max_tokens"]
        at = len(prompt) - len(PROMPT_IDS) if isinstance(prompt, list) else 0
        ids = [(at + i) % 2 if self.options.loop else at + i for i in range(n)]
        names = [f"token_id:{i}" if isinstance(prompt, list) else f" {i}" for i in ids]
        other = "token_id:99" if self.options.tie else "token_id:98"
        best = -0.7 - self.options.shift
        top = [{name: best, other: best - 0.001 if self.options.tie else -9.0} for name in names]
        logprobs = {"tokens": names, "token_logprobs": [best] * n, "top_logprobs": top}
        return {"choices": [{"text": " ".join(names), "logprobs": logprobs}]}

    def whole(
        self,
        writer: asyncio.StreamWriter,
        text: str,
        kind: str = "application/json",
        status: int = 200,
    ) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())

    def lies(self, kind: str) -> bool:
        return self.options.lie == kind and self.requests >= self.options.lie_from

    def metrics(self) -> str:
        shown = self.ranks[:1] if self.lies("rank-missing") else self.ranks
        lines = ["vllm:num_requests_waiting 0", f"vllm:num_requests_running {self.running}"]
        for number, rank in enumerate(shown):
            lines += self.series(f'engine="{number}"', rank)
        return "\n".join(lines) + "\n"

    def series(self, label: str, rank: Rank) -> list[str]:
        counts = {"generation_tokens": rank.tokens, "request_success": rank.requests}
        k = self.options.drafts
        if k:
            own = rank.drafts if self.lies("bonus") else 0
            counts["spec_decode_num_drafts"] = rank.drafts
            counts["spec_decode_num_draft_tokens"] = rank.drafts * k
            counts["spec_decode_num_accepted_tokens"] = rank.drafts * 2 + own
        lines = [f"vllm:{name}_total{{{label}}} {n}" for name, n in counts.items()]
        per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        for position in range(k):
            accepted = rank.drafts * (position < 2 + self.lies("bonus"))
            lines.append(f'{per_position}{{{label},position="{position}"}} {accepted}')
        return lines

    async def generate(self, asked: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if self.options.refuse:
            self.whole(writer, '{"error": {"message": "refused"}}', status=self.options.refuse)
            return
        if self.running >= self.options.refuse_above:
            self.whole(writer, '{"error": {"message": "overloaded"}}', status=503)
            return
        self.requests += 1
        if self.options.lie == "reset" and self.requests == self.options.lie_from:
            self.ranks = [Rank()]
        rank = self.ranks[self.requests % len(self.ranks)]
        self.running += 1
        kind = "content-type: text/event-stream\r\ntransfer-encoding: chunked"
        writer.write(f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n".encode())
        wrong = self.options.wrong_every and self.requests % self.options.wrong_every == 0
        sent = 0
        while self.requests > self.options.hold_after and self.options.hold.exists():
            await asyncio.sleep(0.02)
        while sent < self.options.tokens:
            if self.options.die_after and self.requests > self.options.die_after and sent:
                os._exit(1)
            await asyncio.sleep(self.options.step_ms / 1000)
            step = 3 if self.options.drafts and sent else 1
            step = min(step, self.options.tokens - sent)
            times = 2 if self.lies("other-traffic") else 1
            rank.drafts += times * bool(self.options.drafts and sent)
            ids = [i % 2 if self.options.loop else i for i in range(sent, sent + step)]
            if wrong and 5 in ids:
                ids[ids.index(5)] = 99
            if self.options.wrong_step and sent and rank.drafts % self.options.wrong_step == 0:
                ids[0] = 99
            sent += step
            self.event(writer, ids, sent)
        rank.tokens += times * self.options.tokens
        rank.requests += times
        self.running -= 1
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def event(self, writer: asyncio.StreamWriter, ids: list[int], sent: int) -> None:
        finish = "stop" if sent == self.options.tokens else None
        text = " ".join(map(str, ids)) + " "
        choice = {"delta": {"content": text}, "token_ids": ids, "finish_reason": finish}
        usage = {"prompt_tokens": 5, "completion_tokens": sent}
        data = f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\n"
        writer.write(f"{len(data):x}\r\n{data}\r\n".encode())


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port_file", type=Path)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--no-metrics", action="store_true")
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--wrong-every", type=int, default=0)
    parser.add_argument("--wrong-step", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--shift", type=float, default=0.0)
    parser.add_argument("--tie", action="store_true")
    parser.add_argument("--no-logprobs", action="store_true")
    parser.add_argument("--refuse", type=int, default=0)
    parser.add_argument("--refuse-above", type=int, default=10_000)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--slots", type=int, default=10_000)
    parser.add_argument("--hold", type=Path)
    parser.add_argument("--hold-after", type=int, default=10**9)
    parser.add_argument("--lie", default="")
    parser.add_argument("--lie-from", type=int, default=1)
    options = parser.parse_args()
    server = await asyncio.start_server(Engine(options).connection, "127.0.0.1", 0)
    ready = options.port_file.with_suffix(".new")
    ready.write_text(str(server.sockets[0].getsockname()[1]))
    ready.rename(options.port_file)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
