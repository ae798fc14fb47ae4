"""What the scripted server is to do, and its own record of what it did.

A script fixes when each chunk of an answer is written and how many tokens it carries; the record
holds when it was written in truth. Both sides read CLOCK_MONOTONIC through `perf_counter_ns`, so
that the record can be held against a client's, in whichever process of the machine that is.
"""

from __future__ import annotations

import array
import re
from typing import Any, Literal

import msgspec

CREATED = 1_700_000_000
PROMPT_TOKENS = 8
NUMBER = re.compile(rb"#(\d{1,9})")
"""A request's number, wherever its body has one: by it the two records are matched."""
CHUNK_MARK = b'"choices":[{'
"""In every event that brings tokens, and in no other part of a scripted answer."""
END = b"0\r\n\r\n"
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
Usage = Literal["none", "final", "continuous"]


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer's course: `chunks` chunks, the first `first_ms` after its request, then one
    each `gap_ms`; chunk i carries `tokens[i % len(tokens)]` tokens.

    `service_slots`: answers under way at once, the rest wait in the order they came; 0: no limit.
    `draft_tokens`: proposed in each verify step; None: as many as the script can ever accept.
    """

    first_ms: float = 50.0
    gap_ms: float = 10.0
    chunks: int = 100
    tokens: tuple[int, ...] = (1,)
    service_slots: int = 0
    draft_tokens: int | None = None
    model: str = "scripted"

    def tokens_of(self, chunk: int) -> int:
        """How many tokens chunk number `chunk` carries."""
        return self.tokens[chunk % len(self.tokens)]

    @property
    def output_tokens(self) -> int:
        """Of one whole answer."""
        return sum(self.tokens_of(i) for i in range(self.chunks))

    @property
    def service_s(self) -> float:
        """How long one answer occupies a slot."""
        return (self.first_ms + (self.chunks - 1) * self.gap_ms) / 1e3


class Wanted(msgspec.Struct, frozen=True):
    """The part of a request's body that changes how it is answered."""

    stream: bool = False
    return_token_ids: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def usage(self) -> Usage:
        """When the answer is to tell its token counts."""
        options = self.stream_options or {}
        if not options.get("include_usage"):
            return "none"
        return "continuous" if options.get("continuous_usage_stats") else "final"


class Served(msgspec.Struct, frozen=True, array_like=True):
    """One request as the server saw it; `number` None where its body had none.

    `read_ns`: its last byte was read. `written` holds the moment before each chunk's write (see
    `write_ns`). `whole`: all of them were written.
    """

    number: int | None
    read_ns: int
    written: bytes
    whole: bool

    @property
    def write_ns(self) -> list[int]:
        """When each chunk was handed to the socket."""
        stamps = array.array("q")
        stamps.frombytes(self.written)
        return stamps.tolist()


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the server did, and the CPU time it took for it."""

    requests: list[Served]
    cpu_s: float


class Answers:
    """The bytes of every kind of answer a script gives, made once: a chunk costs no formatting."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._made: dict[tuple[bool, bool, Usage], list[bytes]] = {}
        self._encode = msgspec.json.Encoder().encode

    def stream(self, *, chat: bool, wanted: Wanted) -> list[bytes]:
        """One write a chunk; the last also ends the answer."""
        key = (chat, bool(wanted.return_token_ids), wanted.usage)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def whole(self, *, chat: bool) -> bytes:
        """The body of an answer that is not streamed."""
        script = self._script
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
        text = " token" * script.output_tokens
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if chat else "text_completion"
        return self._encode(
            {**self._base(kind, chat), "choices": [choice], "usage": usage(script.output_tokens)}
        )

    def _base(self, kind: str, chat: bool) -> dict[str, Any]:
        identity = "chatcmpl-scripted" if chat else "cmpl-scripted"
        return {"id": identity, "object": kind, "created": CREATED, "model": self._script.model}

    def _make(self, chat: bool, ids: bool, told: Usage) -> list[bytes]:
        script = self._script
        base = self._base("chat.completion.chunk" if chat else "text_completion", chat)
        writes: list[bytes] = []
        sent = 0
        for i in range(script.chunks):
            count = script.tokens_of(i)
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
            text = " token" * count
            if chat:
                choice["delta"] = {"role": "assistant"} if i == 0 else {}
                choice["delta"]["content"] = text
            else:
                choice["text"] = text
            if ids:
                choice["token_ids"] = [1000 + (sent + j) % 1000 for j in range(count)]
            if i == script.chunks - 1:
                choice["finish_reason"] = "length"
            sent += count
            payload = {**base, "choices": [choice]}
            if told == "continuous":
                payload["usage"] = usage(sent)
            writes.append(http_chunk(self._event(payload)))
        if told != "none":
            writes[-1] += http_chunk(self._event({**base, "choices": [], "usage": usage(sent)}))
        writes[-1] += http_chunk(b"data: [DONE]\n\n") + END
        return writes

    def _event(self, payload: dict[str, Any]) -> bytes:
        return b"data: " + self._encode(payload) + b"\n\n"


def usage(tokens: int) -> dict[str, int]:
    """OpenAI's usage object after `tokens` output tokens."""
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": PROMPT_TOKENS + tokens,
    }


def http_chunk(data: bytes) -> bytes:
    """One chunk of HTTP's chunked encoding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def metrics_text(script: Script, written: list[int], *, finished: int, running: int) -> str:
    """Prometheus counters under vLLM's names, after so many chunks of each of `written`'s answers.

    Every chunk after an answer's first is a verify step. A script of one token a chunk is a server
    without speculation, and has no such counters.
    """
    most = max(script.tokens) - 1
    drafted = script.draft_tokens if script.draft_tokens is not None else most
    drafts = tokens = 0
    accepted = [0] * max(drafted, most)
    for chunks in written:
        drafts += max(chunks - 1, 0)
        for i in range(chunks):
            count = script.tokens_of(i)
            tokens += count
            for position in range(count - 1 if i else 0):
                accepted[position] += 1
    label = f'{{engine="0",model_name="{script.model}"}}'
    values: dict[str, int] = {
        f"vllm:prompt_tokens_total{label}": PROMPT_TOKENS * len(written),
        f"vllm:generation_tokens_total{label}": tokens,
        f'vllm:request_success_total{label[:-1]},finished_reason="length"}}': finished,
        f"vllm:num_requests_running{label}": running,
        f"vllm:num_requests_waiting{label}": len(written) - finished - running,
    }
    if accepted:
        name = "vllm:spec_decode_num_"
        values[f"{name}drafts_total{label}"] = drafts
        values[f"{name}draft_tokens_total{label}"] = drafts * drafted
        values[f"{name}accepted_tokens_total{label}"] = sum(accepted)
        for position, count in enumerate(accepted):
            at = f'{label[:-1]},position="{position}"}}'
            values[f"{name}accepted_tokens_per_pos_total{at}"] = count
    kinds: dict[str, str] = {}
    for sample in values:
        metric = sample.partition("{")[0]
        kinds[metric] = "counter" if metric.endswith("_total") else "gauge"
    lines: list[str] = []
    for metric, kind in kinds.items():
        lines.append(f"# TYPE {metric} {kind}")
        lines += [f"{s} {v}" for s, v in values.items() if s.partition("{")[0] == metric]
    return "\n".join(lines) + "\n"
