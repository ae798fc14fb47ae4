"""Samples on disk: append-only JSON lines in shards, each line one answer of the target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and the target's answer, as the target saw and wrote them.

    `token_ids`: prompt and answer; the answer begins at `loss_from`, and loss is taken on its
    tokens alone. `reasoning` and `answer` are the answer's parts as text, the markup around them
    left out; `text` is the answer with all its markup. `greedy`: temperature 0, so that each token
    is the target's own argmax. `dropped`: why the gate left the sample out, None: it is kept.
    """

    id: str
    prompt_id: str
    category: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[int, ...]
    loss_from: int
    text: str
    reasoning: str | None = None
    answer: str | None = None
    finish_reason: str | None = None
    greedy: bool = True
    seed: int | None = None
    dropped: str | None = None


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a samples folder, in order."""
    return sorted(folder.glob("samples-*.jsonl"))


def read_samples(folder: Path, *, dropped: bool = False) -> Iterator[Sample]:
    """The kept samples in order (`dropped`: the others too). Raises `UsageError`.

    Of several lines with one id the last counts. A last line that was cut off by a crash is no
    line; a broken one elsewhere is an error.
    """
    raise NotImplementedError
