"""Prompts: the built-in set, the demo pair's held-out prompts, and JSONL files of the user's.

A line is `{"messages": [{"role", "content"}…]}` or `{"prompt": "…"}`, with optional `id`,
`category` and `answer`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import UsageError

BUILTIN = Path(__file__).with_name("builtin.jsonl")
NAMED = ("builtin", "demo")
LATER = ("synthetic", "random")


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: a chat (`messages`), a raw text (`text`) or its `token_ids`; one of the three.

    `answer` is the right answer where there is one. `turns` are what the user says next in a
    conversation, each after the answer to what was said before. `max_tokens` and `sampling`
    (request fields) go before the plan's. `input_tokens`: its length where it is known.
    """

    id: str
    category: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    answer: str | None = None
    turns: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    sampling: dict[str, Any] = {}
    input_tokens: int | None = None


class Allotment(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one start of an engine: its warm-up, and each measured cell's in order."""

    warmup: tuple[Prompt, ...]
    cells: tuple[tuple[Prompt, ...], ...]
    repeated: bool


def load_prompts(dataset: str, *, demo_prompts: Path | None = None) -> list[Prompt]:
    """The prompts of `dataset`. Raises `UsageError` naming file and line."""
    if dataset in LATER:
        raise UsageError(
            f"workload.dataset={dataset}: this version has no generated prompts; "
            "use 'builtin', 'demo' or the path of a JSONL file"
        )
    if dataset == "builtin":
        return read_jsonl(BUILTIN)
    if dataset == "demo":
        if demo_prompts is None:
            raise UsageError("workload.dataset=demo: only with the demo pair as the target")
        return read_jsonl(demo_prompts)
    try:
        path = Path(dataset).expanduser()
        found = path.is_file()
    except (OSError, RuntimeError):
        found = False
    if not found:
        raise UsageError(
            f"workload.dataset={dataset[:200]}: no such file, nor a known data set "
            f"({', '.join(NAMED)})"
        )
    return read_jsonl(path)


def read_jsonl(path: Path) -> list[Prompt]:
    """Read prompts, one JSON object a line. Raises `UsageError` naming the line."""
    prompts: list[Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_prompt(line, f"{path}, line {number}", f"{path.stem}-{number}"))
    if not prompts:
        raise UsageError(f"{path}: holds no prompt")
    return prompts


def _prompt(line: str, where: str, default_id: str) -> Prompt:
    try:
        row = msgspec.json.decode(line.encode())
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{where}: an object with 'messages' or 'prompt' is wanted")
    messages, text = row.get("messages"), row.get("prompt")
    if (messages is None) == (text is None):
        raise UsageError(f"{where}: give either 'messages' or 'prompt'")
    if messages is not None:
        _check_messages(messages, where)
    elif not isinstance(text, str) or not text:
        raise UsageError(f"{where}: 'prompt' is a text that is not empty")
    answer = row.get("answer")
    return Prompt(
        id=str(row.get("id", default_id)),
        category=None if row.get("category") is None else str(row["category"]),
        messages=None if messages is None else tuple(messages),
        text=text,
        answer=None if answer is None else str(answer),
    )


def _check_messages(messages: Any, where: str) -> None:
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and "role" in m and "content" in m for m in messages
    )
    if not (good and messages):
        raise UsageError(f"{where}: 'messages' is a list of objects with 'role' and 'content'")
    for message in messages:
        role, content = message["role"], message["content"]
        silent = content is None and role == "assistant"  # one that calls a tool
        if not isinstance(role, str) or not (isinstance(content, str | list) or silent):
            raise UsageError(f"{where}: a message's 'role' and 'content' are texts")


def allot(prompts: list[Prompt], *, warmup: int, needs: list[int], seed: int) -> Allotment:
    """Deal the prompts of one start: shuffled by `seed`, each once before any comes again.

    The warm-up's prompts are not measured, so that no cache holds a measured prompt; where the
    set is too small for that, the warm-up asks something else: its prompts are altered.
    """
    order = list(prompts)
    random.Random(seed).shuffle(order)
    spare = max(0, len(order) - sum(needs))
    apart = order[len(order) - min(warmup, spare) :] if spare and warmup else []
    measured = order[: len(order) - len(apart)] or order
    altered = [_altered(measured[i % len(measured)]) for i in range(warmup - len(apart))]
    cells: list[tuple[Prompt, ...]] = []
    at = 0
    for need in needs:
        cells.append(tuple(measured[(at + i) % len(measured)] for i in range(need)))
        at += need
    return Allotment(
        warmup=tuple(apart + altered), cells=tuple(cells), repeated=sum(needs) > len(measured)
    )


def _altered(prompt: Prompt) -> Prompt:
    if prompt.text is not None:
        return msgspec.structs.replace(
            prompt, id=f"{prompt.id}-warm", text=f"Warm up. {prompt.text}"
        )
    assert prompt.messages is not None
    first = dict(prompt.messages[0])
    if isinstance(first["content"], list):
        first["content"] = [{"type": "text", "text": "Warm up."}, *first["content"]]
    else:
        first["content"] = f"Warm up. {first['content'] or ''}"
    return msgspec.structs.replace(
        prompt, id=f"{prompt.id}-warm", messages=(first, *prompt.messages[1:])
    )


def is_correct(text: str | None, answer: str | None) -> bool | None:
    """Whether the text after the thinking equals the answer, letter case and spaces apart."""
    if answer is None or text is None:
        return None
    said = text.rpartition("</think>")[2]
    return " ".join(said.split()).casefold() == " ".join(answer.split()).casefold()
