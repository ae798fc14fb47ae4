"""The lengths in a trace of requests, for prompts that are made after it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.errors import UsageError

INPUT = ("input_length", "input_tokens")
OUTPUT = ("output_length", "output_tokens")


def read_lengths(path: Path) -> list[tuple[int, int | None]] | None:
    """Input and output length of each line of a trace; None where the file is none.

    A trace's first line has an `input_length` and no prompt. Raises `UsageError` naming the line.
    """
    lengths: list[tuple[int, int | None]] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                row = _row(line)
                if not lengths and not _is_trace(row):
                    return None
                lengths.append(_lengths(row, f"{path}, line {number}"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    return lengths or None


def _row(line: bytes) -> object:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _is_trace(row: object) -> bool:
    if not isinstance(row, dict) or {"messages", "prompt", "token_ids", "body"} & row.keys():
        return False
    return any(name in row for name in INPUT)


def _lengths(row: object, where: str) -> tuple[int, int | None]:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: not an object of a trace, with 'input_length'")
    given = next((row[name] for name in INPUT if name in row), None)
    answer = next((row[name] for name in OUTPUT if row.get(name) is not None), None)
    for name, value in (("input_length", given), ("output_length", answer)):
        if value is None and name == "output_length":
            continue
        if type(value) is not int or not 1 <= value <= 10_000_000:
            raise UsageError(f"{where}: '{name}' is a number of tokens from 1")
    assert isinstance(given, int)
    return given, answer
