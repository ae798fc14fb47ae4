"""A file of results as the JSON documents in it: one, a list, or one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.errors import UsageError, one_line

Document = dict[str, Any]
BEGINNING = 4096
PARQUET_MAGIC = b"PAR1"
_SPACE = " \t\r\n"


def check_beginning(path: Path) -> None:
    """Raise `UsageError` where a file begins with nothing that is ever imported.

    So no file is read whole that cannot be: beside results may lie weights of any size.
    """
    with open(path, "rb") as file:
        begin = file.read(BEGINNING)
    text = begin.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith((b"{", b"[", PARQUET_MAGIC)) or is_table(begin):
        return
    if not text:
        raise UsageError(f"{path}: the file is empty; results in JSON are wanted")
    shown = one_line(text[:40].decode("utf-8", "replace"), 40)
    raise UsageError(f"{path}: not JSON; it begins with {shown!r}")


def is_table(begin: bytes) -> bool:
    """Whether a file that begins so is the CSV that `export` writes, in any order of columns."""
    header = begin[:BEGINNING].decode("utf-8-sig", "replace").splitlines()[:1]
    return bool(header) and {"run_id", "metric", "value"} <= set(header[0].split(","))


def documents(data: bytes, path: Path) -> list[Document]:
    """Every JSON object in `data`: of one text, of a list, or of texts that follow each other.

    Lines of JSON, and objects that a tool appended with nothing between them, are such texts.
    Raises `UsageError` that names `path`, and the line where it is no JSON, or no object.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text in UTF-8; results in JSON are wanted") from None
    if not text.strip():
        raise UsageError(f"{path}: the file is empty; results in JSON are wanted")
    found: list[Document] = []
    for value, line in _values(text, path):
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                raise UsageError(
                    f"{path}: line {line}: JSON objects are wanted, not {one_line(repr(one), 60)}"
                )
            found.append(one)
    if not found:
        raise UsageError(f"{path}: an empty list; there is no result in it")
    return found


def _values(text: str, path: Path) -> list[tuple[Any, int]]:
    """Every JSON value with the line it begins in."""
    decoder = json.JSONDecoder()
    values: list[tuple[Any, int]] = []
    at, line, counted = 0, 1, 0
    while True:
        while at < len(text) and text[at] in _SPACE:
            at += 1
        if at >= len(text):
            return values
        line += text.count("\n", counted, at)
        counted = at
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise UsageError(f"{path}: line {error.lineno}: not JSON ({error.msg})") from None
        except RecursionError:
            raise UsageError(f"{path}: line {line}: nested too deeply") from None
        except ValueError as error:  # a whole number of thousands of digits
            raise UsageError(f"{path}: line {line}: {one_line(str(error), 80)}") from None
        values.append((value, line))
