"""From the pieces of a streamed answer to its text, its chunks and its token counts. No I/O.

A chunk is an event that brings output tokens. How many comes from the token ids the server sends,
else from the usage it sends with every event, and is unknown otherwise; chunks are never counted
in place of tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from harness.errors import one_line
from harness.load.sse import SseParser

THINK_END = "</think>"
MAX_EVENT_BYTES = 8_000_000
"""Of one event; a server that never ends one is not listened to."""
MAX_COUNT = 2**31
"""Of tokens, and of token ids; what is larger is nonsense that no record could hold."""
TokenSource = Literal["token_ids", "usage"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one request was answered; see `records.RequestRecord` for the fields' meaning."""

    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...] | None
    prompt_tokens: int | None
    output_tokens: int | None
    token_source: TokenSource | None
    token_ids: tuple[int, ...] | None
    text: str
    reasoning: str | None
    finish_reason: str | None
    payloads: list[dict[str, Any]]
    http_status: int | None
    error: str | None


class Malformed(ValueError):
    """A payload that is JSON but no chunk of an answer; the message says what is wrong in it."""


def count_of(value: Any, name: str) -> int | None:
    """A count as sent by a server, or None where it says none. Raises `Malformed`."""
    if value is None or (type(value) is int and 0 <= value < MAX_COUNT):
        return value
    raise Malformed(f"{name} is {one_line(repr(value), 40)}")


def ids_of(value: Any) -> list[int] | None:
    """Token ids as sent by a server, or None where it sends none. Raises `Malformed`."""
    if value is None:
        return None
    if isinstance(value, list) and all(type(i) is int and 0 <= i < MAX_COUNT for i in value):
        return value
    raise Malformed(f"token_ids is {one_line(repr(value), 40)}")


def object_of(value: Any, name: str) -> dict[str, Any]:
    """A JSON object as sent by a server; none where it is null. Raises `Malformed`."""
    if value is None or isinstance(value, dict):
        return value or {}
    raise Malformed(f"{name} is {one_line(repr(value), 40)}")


def error_text(payload: Any) -> str | None:
    """The message of an OpenAI-style error object, or None where it is none."""
    if not isinstance(payload, dict):
        return None
    error = payload.get("error")
    if isinstance(error, dict):
        return one_line(str(error.get("message") or error))
    if error:
        return one_line(str(error))
    if payload.get("object") == "error" or set(payload) == {"detail"}:
        return one_line(str(payload.get("message") or payload.get("detail") or payload))
    return None


class AnswerReader:
    """Takes the pieces of one answer as they arrive (`http.BodySink`) and adds them up."""

    def __init__(self) -> None:
        self._sse: SseParser | None = None
        self._raw: list[bytes] = []
        self._last_ns = 0
        self._status: int | None = None
        self._error: str | None = None
        self._ended = False
        self._overlong = False
        self._payloads: list[dict[str, Any]] = []
        self._chunk_ns: list[int] = []
        self._chunk_tokens: list[int | None] = []
        self._ids: list[int] = []
        self._ids_whole = True
        self._usage_seen = 0
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._finish_reason: str | None = None

    def head(self, status: int, content_type: str) -> None:
        """The answer's status and content type have arrived."""
        self._status = status
        if status < 400 and "event-stream" in content_type:
            self._sse = SseParser()

    def piece(self, arrived_ns: int, data: bytes) -> None:
        """A piece of the body arrived at `arrived_ns`."""
        self._last_ns = arrived_ns
        if self._sse is None:
            self._raw.append(data)
            return
        if self._overlong:
            return
        for event in self._sse.feed(data):
            self._event(arrived_ns, event.data, event.kind)
        if self._sse.pending > MAX_EVENT_BYTES:
            self._overlong = True
            self._error = self._error or (
                f"the stream sent an event of more than {MAX_EVENT_BYTES:,} bytes"
            )

    def _event(self, arrived_ns: int, data: bytes, kind: bytes) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            payload = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            shown = one_line(data.decode("utf-8", "replace"), 80)
            self._error = self._error or f"the stream sent something that is not JSON: {shown}"
            return
        error = error_text(payload)
        if error is None and kind == b"error":
            error = one_line(str(payload))
        if error is not None:
            self._error = self._error or f"the stream reported an error: {error}"
        else:
            self._payload(arrived_ns, payload)

    def _payload(self, arrived_ns: int, payload: Any) -> None:
        try:
            self._read(arrived_ns, payload)
        except Malformed as error:
            self._error = self._error or f"the answer cannot be understood: {error}"

    def _read(self, arrived_ns: int, payload: Any) -> None:
        payload = object_of(payload, "a chunk")
        self._payloads.append(payload)
        usage = object_of(payload.get("usage"), "usage")
        completion = count_of(usage.get("completion_tokens"), "completion_tokens")
        prompt = count_of(usage.get("prompt_tokens"), "prompt_tokens")
        self._prompt_tokens = self._prompt_tokens if prompt is None else prompt
        if completion is not None:
            self._completion_tokens = completion
        choices = payload.get("choices")
        if not choices:
            return
        if not isinstance(choices, list):
            raise Malformed(f"choices is {one_line(repr(choices), 40)}")
        choice = object_of(choices[0], "a choice")
        if choice.get("finish_reason"):
            self._finish_reason = one_line(str(choice["finish_reason"]), 80)
        name = "delta" if choice.get("delta") else "message"
        part = object_of(choice.get(name), name) or choice
        text = part.get("content") or part.get("text") or ""
        thought = part.get("reasoning") or part.get("reasoning_content") or ""
        if isinstance(text, str) and text:
            self._text.append(text)
        if isinstance(thought, str) and thought:
            self._reasoning.append(thought)
        ids = ids_of(choice.get("token_ids"))
        if ids is None:
            ids = ids_of(part.get("token_ids"))
        shown = bool(text or thought or part.get("tool_calls"))
        self._count(arrived_ns, shown, ids, completion)

    def _count(
        self, arrived_ns: int, shown: bool, ids: list[int] | None, completion: int | None
    ) -> None:
        by_usage: int | None = None
        if completion is not None:
            if completion < self._usage_seen:
                raise Malformed(f"usage runs backwards, to {completion} tokens")
            by_usage = completion - self._usage_seen
            self._usage_seen = completion
        tokens = len(ids) if ids is not None else by_usage
        if tokens == 0 or (tokens is None and not shown):
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
                self._event(self._last_ns, event.data, event.kind)
            error = error or self._error
            if error is None and not self._ended and self._finish_reason is None:
                error = "the stream ended before the answer did"
        elif self._status is not None:
            error = error or self._whole_body()
        if error is None and not self._chunk_ns:
            error = "the answer holds no output"
        ids_known = self._ids_whole and bool(self._ids)
        tokens, source = self._total(ids_known)
        known = [t for t in self._chunk_tokens if t is not None]
        whole = bool(known) and len(known) == len(self._chunk_tokens)
        text, reasoning = split_reasoning("".join(self._text), "".join(self._reasoning) or None)
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
            payloads=self._payloads,
            http_status=self._status,
            error=error,
        )

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
            return f"HTTP {status}: {said}" if said else f"HTTP {status}"
        if not isinstance(payload, dict):
            return f"HTTP {status} with a body that is neither an event stream nor JSON"
        error = error_text(payload)
        if error is None:
            self._payload(self._last_ns, payload)
        return error or self._error


def split_reasoning(text: str, reasoning: str | None) -> tuple[str, str | None]:
    """Part an inline `…</think>answer` into (answer, reasoning); text of its own field stays.

    The template may have opened the think tag in the prompt, so that only its end is seen.
    """
    if reasoning is None and THINK_END in text:
        before, _, text = text.rpartition(THINK_END)
        reasoning = before.removeprefix("<think>")
    return text, reasoning
