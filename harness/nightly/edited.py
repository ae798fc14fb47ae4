"""One table of a TOML file's `[[name]]` written anew; every other line and comment stays."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from harness.errors import printable

Table = Mapping[str, str]
_COMMENT = re.compile(r"\s*#")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


def written(name: str, table: Table) -> str:
    """A table of `[[name]]`, a key a line."""
    lines = [f"[[{name}]]", *(f"{key} = {_text(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def with_table(text: str, name: str, table: Table, key: Callable[[Table], Any]) -> str | None:
    """`text` with the table among its `[[name]]`, for the one of the same key or in their order.

    Lines end as they did, where all end alike. None where the file is so written that this cannot
    be told from its lines.
    """
    if "\n" in text and text.count("\r") == text.count("\r\n") == text.count("\n"):
        made = with_table(text.replace("\r\n", "\n"), name, table, key)
        return None if made is None else made.replace("\n", "\r\n")
    if re.search(r"\r(?!\n)", text):
        return None  # ends lines too, for some readers and not for TOML's
    before: list[dict[str, Any]] = tomllib.loads(text).get(name, [])
    head, blocks = _blocks(text, name)
    if [_only(block, name) for block in blocks] != before:
        return None
    same = [i for i, known in enumerate(before) if key(known) == key(table)]
    if same:
        blocks[same[0]] = _changed(blocks[same[0]], before[same[0]], table)
        blocks = [block for i, block in enumerate(blocks) if i not in same[1:]]
    else:
        at = next((i for i, t in enumerate(before) if key(t) > key(table)), len(blocks))
        apart = _apart(blocks[at - 1] if at else head)
        blocks.insert(at, apart + written(name, table) + ("\n" if at < len(blocks) else ""))
    made = head + "".join(blocks)
    kept = [known for i, known in enumerate(before) if i not in same]
    wanted = [*kept, {k: printable(v) for k, v in table.items()}]
    try:
        found = tomllib.loads(made).get(name, [])
    except tomllib.TOMLDecodeError:
        return None
    return made if _sorted(found) == _sorted(wanted) else None


def _blocks(text: str, name: str) -> tuple[str, list[str]]:
    """What stands before the first table, then each with the comment right above it."""
    lines = text.split("\n")
    header = re.compile(rf"\s*\[\[\s*{re.escape(name)}\s*\]\]\s*(#.*)?$")
    starts = []
    for i, line in enumerate(lines):
        if header.match(line):
            while i and _COMMENT.match(lines[i - 1]):
                i -= 1
            starts.append(i)
    edges = [0, *starts, len(lines)]
    parts = ["\n".join([*lines[a:b], ""]) for a, b in pairwise(edges)]
    parts[-1] = parts[-1][:-1]  # the last line ends as it did
    return parts[0], parts[1:]


def _only(block: str, name: str) -> dict[str, Any] | None:
    try:
        (found,) = tomllib.loads(block)[name]
    except (tomllib.TOMLDecodeError, ValueError):
        return None
    return dict(found)


def _apart(before: str) -> str:
    """What sets a table apart from what stands before it."""
    if not before or before.endswith("\n\n"):
        return ""
    return "\n" if before.endswith("\n") else "\n\n"


def _changed(block: str, before: Table, table: Table) -> str:
    """The block's lines, those of other values written anew, each with its comment."""
    lines: list[str] = []
    last = 0
    for line in block.split("\n"):
        found = _KEY.match(line)
        key = found[1] if found and found[1] in before else None
        if key is not None and table.get(key) != before[key]:
            value = [f"{key} = {_text(table[key])}"] if key in table else []
            line = "  ".join([*value, *_comment_of(line)])
            if not line:
                continue
        lines.append(line)
        if key is not None or line.lstrip().startswith("[["):
            last = len(lines)
    added = [f"{key} = {_text(value)}" for key, value in table.items() if key not in before]
    return "\n".join([*lines[:last], *added, *lines[last:]])


def _comment_of(line: str) -> list[str]:
    """The comment behind a line's value, if there is one."""
    for at in (i for i, letter in enumerate(line) if letter == "#"):
        try:
            tomllib.loads(line[:at])
        except tomllib.TOMLDecodeError:
            continue  # within the value
        return [line[at:]]
    return []


def _sorted(tables: list[Any]) -> list[str]:
    return sorted(repr(sorted(t.items())) for t in tables)


def _text(value: str) -> str:
    # A JSON text is a TOML text once what neither prints is gone.
    return json.dumps(printable(value), ensure_ascii=False)
