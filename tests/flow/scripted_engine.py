"""A small OpenAI-compatible server with scripted timing, to drive the command line against.

python scripted_engine.py PORT_FILE [--drafts K] [--no-metrics] [--die-after N] [--step-ms MS]
    [--wrong-every N] [--refuse STATUS] [--slots N] [--refuse-above N] [--max-model-len N]

It answers 12 tokens a request, one a step; with --drafts every step carries three (two drafts of
K accepted, and the bonus). With --slots it answers as many at once, the others wait; with
--refuse-above it refuses a request that finds as many running. Its counters are vLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path

TOKENS = 12


class Engine:
    """Serves, and counts what it served."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.requests = self.drafts = self.tokens = self.running = 0
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
        elif path == "/metrics" and not self.options.no_metrics:
            self.whole(writer, self.metrics(), "text/plain")
        elif path == "/v1/chat/completions":
            async with self.slots:
                await self.generate(json.loads(body), writer)
        else:
            self.whole(writer, '{"error": {"message": "no such path"}}', status=404)
        await writer.drain()

    def whole(
        self,
        writer: asyncio.StreamWriter,
        text: str,
        kind: str = "application/json",
        status: int = 200,
    ) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())

    def metrics(self) -> str:
        lines = [f"vllm:generation_tokens_total {self.tokens}"]
        lines += [f"vllm:request_success_total {self.requests}"]
        lines += [f"vllm:num_requests_running {self.running}", "vllm:num_requests_waiting 0"]
        if self.options.drafts:
            lines += [f"vllm:spec_decode_num_drafts_total {self.drafts}"]
            lines += [
                f"vllm:spec_decode_num_draft_tokens_total {self.drafts * self.options.drafts}"
            ]
            lines += [f"vllm:spec_decode_num_accepted_tokens_total {self.drafts * 2}"]
            for position in range(self.options.drafts):
                name = f'num_accepted_tokens_per_pos_total{{position="{position}"}}'
                lines.append(f"vllm:spec_decode_{name} {self.drafts * (position < 2)}")
        return "\n".join(lines) + "\n"

    async def generate(self, asked: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if self.options.refuse:
            self.whole(writer, '{"error": {"message": "refused"}}', status=self.options.refuse)
            return
        if self.running >= self.options.refuse_above:
            self.whole(writer, '{"error": {"message": "overloaded"}}', status=503)
            return
        self.requests += 1
        self.running += 1
        kind = "content-type: text/event-stream\r\ntransfer-encoding: chunked"
        writer.write(f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n".encode())
        wrong = self.options.wrong_every and self.requests % self.options.wrong_every == 0
        sent = 0
        while sent < TOKENS:
            if self.options.die_after and self.requests > self.options.die_after and sent:
                os._exit(1)
            await asyncio.sleep(self.options.step_ms / 1000)
            step = 3 if self.options.drafts and sent else 1
            step = min(step, TOKENS - sent)
            self.drafts += bool(self.options.drafts and sent)
            ids = list(range(sent, sent + step))
            if wrong and 5 in ids:
                ids[ids.index(5)] = 99
            sent += step
            self.event(writer, ids, sent)
        self.tokens += TOKENS
        self.running -= 1
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def event(self, writer: asyncio.StreamWriter, ids: list[int], sent: int) -> None:
        finish = "stop" if sent == TOKENS else None
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
    parser.add_argument("--refuse", type=int, default=0)
    parser.add_argument("--refuse-above", type=int, default=10_000)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--slots", type=int, default=10_000)
    options = parser.parse_args()
    server = await asyncio.start_server(Engine(options).connection, "127.0.0.1", 0)
    ready = options.port_file.with_suffix(".new")
    ready.write_text(str(server.sockets[0].getsockname()[1]))
    ready.rename(options.port_file)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
