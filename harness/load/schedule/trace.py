"""Traces: JSONL files that say when each request came, and how long it was or what it asked.

Two styles, told apart by the first line:
`{"timestamp": seconds, "prompt" or "messages": …, "input_tokens", "output_tokens"}`, where all but
the timestamp may be missing, and Mooncake's
`{"timestamp": milliseconds, "input_length", "output_length", "hash_ids"}`.
Other keys are passed over.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec

from harness.errors import UsageError, one_line, plain_words
from harness.load.prompts.prompt import Prompt

Tokens = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
MOONCAKE = ("input_length", "output_length", "hash_ids")
MOST_LINES = 1_000_000


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace. `offset_s`: seconds after the trace's first request."""

    line: int
    offset_s: float
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace's requests in the order of their time."""

    path: str
    rows: tuple[TraceRow, ...]

    @property
    def offsets_s(self) -> tuple[float, ...]:
        """When each request came: seconds after the first, ascending."""
        return tuple(row.offset_s for row in self.rows)

    def prompts(self) -> list[Prompt] | None:
        """What each request asked, in order; None where the trace holds times and lengths only."""
        if self.rows[0].prompt is None and self.rows[0].messages is None:
            return None
        stem = Path(self.path).stem
        return [
            Prompt(
                id=f"{stem}-{row.line}",
                text=row.prompt,
                messages=row.messages,
                max_tokens=row.output_tokens,
                input_tokens=row.input_tokens,
                position=place,
            )
            for place, row in enumerate(self.rows)
        ]


class _Own(msgspec.Struct, frozen=True, kw_only=True):
    timestamp: float
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class _Mooncake(msgspec.Struct, frozen=True, kw_only=True):
    timestamp: float
    input_length: Tokens
    output_length: Tokens | None = None


def looks_like_trace(path: Path) -> bool:
    """Whether the file's first line has a timestamp and a length and no prompt."""
    try:
        with path.open("rb") as file:
            first = msgspec.json.decode(next((line for line in file if line.strip()), b""))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if not isinstance(first, dict) or {"messages", "prompt"} & first.keys():
        return False
    return "timestamp" in first and bool({"input_length", "input_tokens"} & first.keys())


def read_trace(path: str | Path, key: str = "load.trace") -> Trace:
    """Read a trace. Lines out of the order of time are sorted by it.

    Raises `UsageError` naming `key` of the plan and the line that is wrong.
    """
    rows: list[TraceRow] = []
    kind: type[_Own | _Mooncake] | None = None
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{key}: {path}, line {number}"
                kind = kind or _kind(line, where)
                rows.append(_row(line, kind, number, where))
                if len(rows) > MOST_LINES:
                    raise UsageError(f"{key}: {path}: more than {MOST_LINES} requests; cut it")
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{key}: {path}: cannot be read: {one_line(str(error))}") from None
    if not rows:
        raise UsageError(f"{key}: {path}: holds no request")
    _check_alike(rows, path, key)
    rows.sort(key=lambda row: row.offset_s)
    began = rows[0].offset_s
    return Trace(
        path=str(path),
        rows=tuple(msgspec.structs.replace(row, offset_s=row.offset_s - began) for row in rows),
    )


def _kind(line: str, where: str) -> type[_Own | _Mooncake]:
    try:
        first = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    if not isinstance(first, dict):
        raise UsageError(f"{where}: an object with a 'timestamp' is wanted")
    return _Mooncake if any(key in first for key in MOONCAKE) else _Own


def _row(line: str, kind: type[_Own | _Mooncake], number: int, where: str) -> TraceRow:
    """One line; `offset_s` is its time as it stands, in seconds."""
    try:
        said = msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {one_line(plain_words(str(error)))}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    if not math.isfinite(said.timestamp) or abs(said.timestamp) > 1e15:
        raise UsageError(f"{where}: 'timestamp' is a number of seconds, or of ms (Mooncake)")
    if isinstance(said, _Mooncake):
        return TraceRow(
            line=number,
            offset_s=said.timestamp / 1e3,
            input_tokens=said.input_length,
            output_tokens=said.output_length,
        )
    _check_asked(said, where)
    return TraceRow(
        line=number,
        offset_s=said.timestamp,
        prompt=said.prompt,
        messages=said.messages,
        input_tokens=said.input_tokens,
        output_tokens=said.output_tokens,
    )


def _check_asked(said: _Own, where: str) -> None:
    if said.prompt is not None and said.messages is not None:
        raise UsageError(f"{where}: give either 'messages' or 'prompt'")
    if said.prompt == "":
        raise UsageError(f"{where}: 'prompt' is a text that is not empty")
    if said.messages is not None and not (
        said.messages and all("role" in m and "content" in m for m in said.messages)
    ):
        raise UsageError(f"{where}: 'messages' is a list of objects with 'role' and 'content'")


def _check_alike(rows: list[TraceRow], path: str | Path, key: str) -> None:
    """Raise `UsageError` where some lines say what was asked and others do not."""
    asks = [row.prompt is not None or row.messages is not None for row in rows]
    if any(asks) and not all(asks):
        row = rows[asks.index(not asks[0])]
        raise UsageError(
            f"{key}: {path}, line {row.line}: a prompt in every line or in none is wanted"
        )
