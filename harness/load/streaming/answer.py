"""From the pieces of a streamed answer to its text, its chunks and its token counts. No I/O.

A chunk is an event that brings output tokens: of the answer, of the thinking before it, or of a
tool call. How many comes from the token ids the server sends, else from the usage it sends with
every event, and is unknown otherwise; chunks are never counted in place of tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from harness.errors import one_line
from harness.load.prompts.correct import THINK_END, answer_begins
from harness.load.streaming.chunks import (
    Chunk,
    Malformed,
    NotJson,
    Reported,
    chunk_of,
    error_text,
    read_chunk,
)
from harness.load.streaming.sse import SseParser

MAX_EVENT_BYTES = 8_000_000
"""Of one event; a server that never ends one is not listened to."""
MAX_ERROR_BYTES = 1_000_000
TAIL = 8
"""So many of the last payloads are kept as they came: engines put their own figures there."""
NO_OUTPUT = "the answer holds no output"
TokenSource = Literal["token_ids", "usage"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one request was answered; see `records.RequestRecord` for the fields' meaning.

    `tail` holds the last payloads as they came, `head` the first one (None: there was none), where
    servers put the prompt's token ids; `retry_after_s` is what the server asked to wait.
    """

    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...] | None
    prompt_tokens: int | None
    output_tokens: int | None
    token_source: TokenSource | None
    token_ids: tuple[int, ...] | None
    text: str
    reasoning: str | None
    finish_reason: str | None
    first_reasoning_ns: int | None
    first_answer_ns: int | None
    tail: tuple[bytes, ...]
    http_status: int | None
    retry_after_s: float | None
    error: str | None
    head: bytes | None = None


class AnswerReader:
    """Takes the pieces of one answer as they arrive (`connection.BodySink`) and adds them up."""

    def __init__(self) -> None:
        self._sse: SseParser | None = None
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self.last_ns = 0
        """When the last piece arrived; 0: none has."""
        self._status: int | None = None
        self._retry_after_s: float | None = None
        self._error: str | None = None
        self._ended = False
        self._overlong = False
        self._head: bytes | None = None
        self._tail: deque[bytes] = deque(maxlen=TAIL)
        self._chunk_ns: list[int] = []
        self._chunk_tokens: list[int | None] = []
        self._ids: list[int] = []
        self._ids_whole = True
        self._usage_seen = 0
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._text: list[str] = []
        self._text_ns: list[int] = []
        self._reasoning: list[str] = []
        self._first_reasoning_ns: int | None = None
        self._first_other_ns: int | None = None
        self._finish_reason: str | None = None

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The answer's status and headers (names in small letters) have arrived."""
        self._status = status
        self._retry_after_s = _seconds(headers.get(b"retry-after"))
        encoding = headers.get(b"content-encoding", b"identity")
        if status < 400 and encoding.strip().lower() not in (b"identity", b""):
            said = one_line(encoding.decode("latin-1"), 40)
            self._fail(f"the answer is compressed ({said}), which was not asked for")
        if 300 <= status < 400:
            said = one_line(headers.get(b"location", b"somewhere else").decode("latin-1"), 200)
            self._fail(f"HTTP {status}: moved to {said}; give its root with --url")
        if status < 400 and b"event-stream" in headers.get(b"content-type", b""):
            self._sse = SseParser()

    def piece(self, arrived_ns: int, data: bytes) -> None:
        """A piece of the body arrived at `arrived_ns`."""
        self.last_ns = arrived_ns
        if self._sse is None:
            self._keep(data)
            return
        if self._overlong:
            return
        for event in self._sse.feed(data):
            self._event(arrived_ns, event.data, event.kind)
        if self._sse.pending > MAX_EVENT_BYTES:
            self._overlong = True
            self._fail(f"the stream sent an event of more than {MAX_EVENT_BYTES:,} bytes")

    def _keep(self, data: bytes) -> None:
        """A body that is no event stream; of an error, which may never end, the beginning."""
        if (self._status or 0) < 400 or self._raw_bytes < MAX_ERROR_BYTES:
            self._raw.append(data)
            self._raw_bytes += len(data)

    def _fail(self, error: str) -> None:
        self._error = self._error or error

    def _event(self, arrived_ns: int, data: bytes, kind: bytes) -> None:
        if self._ended:
            return  # what follows the end belongs to no answer
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            chunk = read_chunk(data, kind)
            self._add(arrived_ns, chunk)
        except NotJson as error:
            self._fail(f"the stream sent something that is not JSON: {error}")
        except Reported as error:
            self._fail(f"the stream reported an error: {error}")
        except Malformed as error:
            self._fail(f"the answer cannot be understood: {error}")
        else:
            if self._head is None:
                self._head = data
            self._tail.append(data)

    def _add(self, arrived_ns: int, chunk: Chunk) -> None:
        if chunk.prompt is not None:
            self._prompt_tokens = chunk.prompt
        if chunk.completion is not None:
            self._completion_tokens = chunk.completion
        if not chunk.choice:
            return
        if chunk.finish:
            self._finish_reason = chunk.finish
        if chunk.text:
            self._text.append(chunk.text)
            self._text_ns.append(arrived_ns)
        if chunk.thought:
            self._reasoning.append(chunk.thought)
            if self._first_reasoning_ns is None:
                self._first_reasoning_ns = arrived_ns
        if chunk.other and self._first_other_ns is None:
            self._first_other_ns = arrived_ns
        self._count(arrived_ns, chunk)

    def _count(self, arrived_ns: int, chunk: Chunk) -> None:
        tokens: int | None = None
        if chunk.completion is not None:
            tokens = chunk.completion - self._usage_seen
            if tokens < 0:
                raise Malformed(f"usage runs backwards, to {chunk.completion} tokens")
            self._usage_seen = chunk.completion
        ids = chunk.ids
        if ids is not None:
            tokens = len(ids)
        if tokens == 0 or (tokens is None and not (chunk.text or chunk.thought or chunk.other)):
            return
        self._chunk_ns.append(arrived_ns)
        self._chunk_tokens.append(tokens)
        if ids is None:
            self._ids_whole = False
        else:
            self._ids.extend(ids)

    def answer(self, transport_error: str | None = None) -> Answer:
        """The answer as far as it came; `error` set if it is not whole."""
        error = transport_error or self._error
        if self._sse is not None:
            for event in self._sse.finish():
                self._event(self.last_ns, event.data, event.kind)
            error = error or self._error
            if error is None and not self._ended and self._finish_reason is None:
                error = "the stream ended before the answer did"
        elif self._status is not None:
            error = error or self._whole_body()
        if error is None and not self._chunk_ns:
            error = NO_OUTPUT
        ids_known = self._ids_whole and bool(self._ids)
        tokens, source = self._total(ids_known)
        known = [t for t in self._chunk_tokens if t is not None]
        whole = bool(known) and len(known) == len(self._chunk_tokens)
        text, reasoning = split_reasoning("".join(self._text), "".join(self._reasoning) or None)
        first_reasoning_ns, first_answer_ns = self._firsts()
        return Answer(
            chunk_ns=tuple(self._chunk_ns),
            chunk_tokens=tuple(known) if whole else None,
            prompt_tokens=self._prompt_tokens,
            output_tokens=tokens,
            token_source=source,
            token_ids=tuple(self._ids) if ids_known else None,
            text=text,
            reasoning=reasoning,
            finish_reason=self._finish_reason,
            first_reasoning_ns=first_reasoning_ns,
            first_answer_ns=first_answer_ns,
            tail=tuple(self._tail),
            http_status=self._status,
            retry_after_s=self._retry_after_s,
            error=error,
            head=self._head,
        )

    def _firsts(self) -> tuple[int | None, int | None]:
        """When the thinking and the answer proper (or a tool call) began."""
        reasoning_ns = self._first_reasoning_ns
        answer_ns = self._text_ns[0] if self._text_ns else None
        whole = "".join(self._text)
        if reasoning_ns is None and THINK_END in whole:
            reasoning_ns = answer_ns
            end = answer_begins(whole)
            answer_ns = self._arrival_of(end + len(whole[end:]) - len(whole[end:].lstrip()))
        times = [ns for ns in (answer_ns, self._first_other_ns) if ns is not None]
        return reasoning_ns, min(times) if times else None

    def _arrival_of(self, position: int) -> int | None:
        """When the text's character at `position` arrived; None where it has no such character."""
        seen = 0
        for text, arrived_ns in zip(self._text, self._text_ns, strict=True):
            seen += len(text)
            if position < seen:
                return arrived_ns
        return None

    def _total(self, ids_known: bool) -> tuple[int | None, TokenSource | None]:
        if ids_known:
            return len(self._ids), "token_ids"
        if self._completion_tokens is not None:
            return self._completion_tokens, "usage"
        return None, None

    def _whole_body(self) -> str | None:
        """Read a body that is no event stream: an error, or an answer in one piece."""
        raw = b"".join(self._raw)
        try:
            payload = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            payload = None
        status = self._status or 0
        if status >= 400:
            said = error_text(payload) or one_line(raw.decode("utf-8", "replace"))
            wait = self._retry_after_s
            asked = "" if wait is None else f" (Retry-After: {wait:g} s)"
            return f"HTTP {status}: {said}{asked}" if said else f"HTTP {status}{asked}"
        if not isinstance(payload, dict):
            return f"HTTP {status} with a body that is neither an event stream nor JSON"
        error = error_text(payload)
        if error is not None:
            return error
        try:
            self._add(self.last_ns, chunk_of(payload))
        except Malformed as malformed:
            return f"the answer cannot be understood: {malformed}"
        self._head = raw
        self._tail.append(raw)
        return None


def payloads_of(tail: tuple[bytes, ...]) -> list[dict[str, Any]]:
    """An answer's last payloads, decoded: where an engine puts figures of its own."""
    decoded = [msgspec.json.decode(raw) for raw in tail]
    return [payload for payload in decoded if isinstance(payload, dict)]


def _seconds(value: bytes | None) -> float | None:
    """A Retry-After header's seconds; a date, or nonsense, is none."""
    try:
        seconds = float(value or b"")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def split_reasoning(text: str, reasoning: str | None) -> tuple[str, str | None]:
    """Part an inline `…</think>answer` into (answer, reasoning); text of its own field stays.

    The template may have opened the think tag in the prompt, so that only its end is seen.
    """
    if reasoning is None and THINK_END in text:
        begin = answer_begins(text)
        reasoning = text[: begin - len(THINK_END)].removeprefix("<think>")
        text = text[begin:]
    return text, reasoning
