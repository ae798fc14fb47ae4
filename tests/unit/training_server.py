"""A scripted server in a thread of its own, for stages that ask one that runs already."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness_scripted import Seen, Step, serve, stream, whole

from training.generate.text import TargetText

Answering = Callable[[int, dict[str, Any]], Sequence[Step]]
MODELS = whole("200 OK", json.dumps({"data": [{"id": "scripted", "max_model_len": 512}]}))


@contextmanager
def running(answering: Answering) -> Iterator[tuple[str, Seen]]:
    """The server's URL and what it sees; `answering` is given each request's number and body."""
    asked = 0

    def script(number: int, body: dict[str, Any]) -> Sequence[Step]:
        nonlocal asked
        if not body:
            return [MODELS]
        asked += 1
        return answering(asked - 1, body)

    ready: list[tuple[str, Seen]] = []
    begun, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def go() -> None:
        async with serve(script) as served:
            ready.append(served)
            begun.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(go(),))
    thread.start()
    assert begun.wait(300)
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


def said(body: dict[str, Any]) -> str:
    """What is answered to a request: a text that depends on the last thing the user said alone."""
    content = body["messages"][-1]["content"]
    number = int("".join(c for c in content if c.isdigit()) or 0)
    return f"a {number}</think>the answer is {number}" + " b c" * (number % 3)


def by_ids(
    text: TargetText, answer: str, gap_s: float = 0.0, finish: str = "stop", **more: Any
) -> Sequence[Step]:
    """An answer with its token ids, two a chunk; `more` goes into the first chunk."""
    ids = text.encode(answer + "<|end|>")
    chunks: list[dict[str, Any]] = []
    for at in range(0, len(ids), 2):
        part = ids[at : at + 2]
        shown = text.tokenizer.decode(part, skip_special=True)
        choice = {"index": 0, "delta": {"content": shown}, "token_ids": part}
        chunks.append({"choices": [{**choice, "finish_reason": None}]})
    chunks[-1]["choices"][0]["finish_reason"] = finish
    chunks[0] |= more
    return stream(chunks, gap_s=gap_s)


def in_words(
    answer: str, reasoning: str | None, tokens: int | None, finish: str = "stop"
) -> Sequence[Step]:
    """An answer without token ids, its thinking in a field of its own where there is any."""
    parts: list[dict[str, Any]] = []
    if reasoning is not None:
        parts.append({"reasoning_content": reasoning})
    parts.append({"content": answer})
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": part, "finish_reason": None}]} for part in parts
    ]
    chunks[-1]["choices"][0]["finish_reason"] = finish
    if tokens is not None:
        chunks.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})
    return stream(chunks)


def prompts(path: Path, count: int) -> Path:
    """A file of prompts, numbered."""
    lines = [json.dumps({"id": f"p{i}", "prompt": f"number {i} ?"}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path
