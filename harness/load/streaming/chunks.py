"""One payload of a streamed (or whole) OpenAI-style answer, read strictly and fast. No I/O.

Nearly every payload has the shape that `_Payload` states and is decoded straight into it. What has
not is decoded freely and looked through piece by piece, to say what is wrong with it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from harness.errors import one_line

MAX_COUNT = 2**31
"""Of tokens, and of token ids; what is larger is nonsense that no record could hold."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_COUNT)]


class Malformed(ValueError):
    """A payload that is JSON but no chunk of an answer; the message says what is wrong in it."""


class NotJson(ValueError):
    """A payload that is not JSON; the message shows its beginning."""


class Reported(ValueError):
    """A payload that reports an error; the message is the server's own."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one payload brings.

    `choice` False: it brings no output, such as the last one with usage alone. `other`: output that
    is no text, such as a tool call. `ids` None: it says
    no token ids. `completion`, `prompt`: the usage so far, None where it says none.
    """

    choice: bool = False
    text: str = ""
    thought: str = ""
    other: bool = False
    ids: list[int] | None = None
    finish: str | None = None
    completion: int | None = None
    prompt: int | None = None


class _Part(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    token_ids: list[Count] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Part | None = None
    message: _Part | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[Count] | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Payload(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    object: str | None = None
    error: Any = None
    detail: Any = None


_decode = msgspec.json.Decoder(_Payload).decode
_NO_PART = _Part()
_NO_USAGE = _Usage()


def read_chunk(data: bytes, kind: bytes = b"") -> Chunk:
    """Read one payload; `kind` is its event's type. Raises `NotJson`, `Reported`, `Malformed`."""
    try:
        payload = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _read_freely(data, kind)
    if kind == b"error" or payload.error or payload.detail or payload.object == "error":
        return _read_freely(data, kind)
    usage = payload.usage or _NO_USAGE
    if not payload.choices:
        return Chunk(completion=usage.completion_tokens, prompt=usage.prompt_tokens)
    choice = payload.choices[0]
    part = choice.delta or _NO_PART
    if choice.message is not None and part == _NO_PART:
        part = choice.message
    return Chunk(
        choice=True,
        text=part.content or choice.text or "",
        thought=part.reasoning or part.reasoning_content or "",
        other=bool(part.tool_calls),
        ids=choice.token_ids if choice.token_ids is not None else part.token_ids,
        finish=choice.finish_reason and one_line(choice.finish_reason, 80),
        completion=usage.completion_tokens,
        prompt=usage.prompt_tokens,
    )


def _read_freely(data: bytes, kind: bytes) -> Chunk:
    try:
        payload = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotJson(one_line(data.decode("utf-8", "replace"), 80)) from None
    error = error_text(payload)
    if error is None and kind == b"error":
        error = one_line(str(payload))
    if error is not None:
        raise Reported(error)
    return chunk_of(payload)


def chunk_of(payload: Any) -> Chunk:
    """The same of a payload that has been decoded already. Raises `Malformed`."""
    payload = _object(payload, "a chunk")
    usage = _object(payload.get("usage"), "usage")
    completion = _count(usage.get("completion_tokens"), "completion_tokens")
    prompt = _count(usage.get("prompt_tokens"), "prompt_tokens")
    choices = payload.get("choices")
    if not choices:
        return Chunk(completion=completion, prompt=prompt)
    if not isinstance(choices, list):
        raise Malformed(f"choices is {one_line(repr(choices), 40)}")
    choice = _object(choices[0], "a choice")
    name = "delta" if choice.get("delta") else "message"
    part = _object(choice.get(name), name)
    text = part.get("content") or choice.get("text") or ""
    thought = part.get("reasoning") or part.get("reasoning_content") or ""
    ids = _ids(choice.get("token_ids"))
    return Chunk(
        choice=True,
        text=text if isinstance(text, str) else "",
        thought=thought if isinstance(thought, str) else "",
        other=bool(part.get("tool_calls")) or not isinstance(text, str),
        ids=_ids(part.get("token_ids")) if ids is None else ids,
        finish=one_line(str(choice["finish_reason"]), 80) if choice.get("finish_reason") else None,
        completion=completion,
        prompt=prompt,
    )


def error_text(payload: Any) -> str | None:
    """The message of an OpenAI-style error object, never empty, or None where it is none."""
    said = _error_of(payload)
    return None if said is None else one_line(str(said)) or "an error without a word"


def _error_of(payload: Any) -> Any:
    if not isinstance(payload, dict):
        return None
    error = payload.get("error")
    if isinstance(error, dict):
        return error.get("message") or error
    if error:
        return error
    if payload.get("object") == "error" or set(payload) == {"detail"}:
        return payload.get("message") or payload.get("detail") or payload
    return None


def _count(value: Any, name: str) -> int | None:
    if value is None or (type(value) is int and 0 <= value < MAX_COUNT):
        return value
    raise Malformed(f"{name} is {one_line(repr(value), 40)}")


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if isinstance(value, list) and all(type(i) is int and 0 <= i < MAX_COUNT for i in value):
        return value
    raise Malformed(f"token_ids is {one_line(repr(value), 40)}")


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is None or isinstance(value, dict):
        return value or {}
    raise Malformed(f"{name} is {one_line(repr(value), 40)}")
