"""Samples on disk: append-only JSON lines in shards, each line one answer of the target.

A line counts once its newline is written: what stands behind the last newline of the last shard was
cut off by a crash and is no line. Nothing is ever rewritten; what the gate leaves out is named in a
file beside the shards (`DROPPED`), which reading joins.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from harness.errors import UsageError, one_line, plain_words
from training.files import read_record

DROPPED = "dropped.json"
"""Holds an object, id -> why the gate left the sample out; there once the gate has judged."""
PATTERN = f"samples-{'[0-9]' * 5}.jsonl"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and the target's answer, as the target saw and wrote them.

    `token_ids`: prompt and answer; the answer begins at `loss_from`, and loss is taken on its
    tokens alone. `reasoning` and `answer` are the answer's parts as text, the markup around them
    left out; `text` is the answer with all its markup. `greedy`: temperature 0, so that each token
    is the target's own argmax. `dropped`: why the gate left the sample out, None: it is kept.

    `index`: its place in the plan's order, whenever it was answered. `ids_from`: the answer's ids
    as the server sent them, or made from the text that it sent. `agrees`: whether the ids give the
    text the server sent, or (made from text) are as many as it counted; None: it did not tell.
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
    index: int = 0
    ids_from: Literal["server", "text"] = "server"
    agrees: bool | None = None

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The tokens that loss is taken on."""
        return self.token_ids[self.loss_from :]


class Line(NamedTuple):
    """One whole line of a shard: where it stands (`number` from 1) and its bytes."""

    path: Path
    number: int
    offset: int
    data: bytes


class _Place(NamedTuple):
    order: int
    first: int
    line: Line


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a samples folder, in order."""
    return sorted(folder.glob(PATTERN))


def samples_in(folder: Path) -> Path:
    """Where the samples of `folder` lie: a training keeps them in a folder of their own."""
    inner = folder / "samples"
    return inner if inner.is_dir() else folder


def read_samples(folder: Path, *, dropped: bool = False) -> Iterator[Sample]:
    """The kept samples in order (`dropped`: the others too). Raises `UsageError`.

    The order is the plan's (`index`), then the shards'. Of several lines with one id the last
    counts. A last line that was cut off by a crash is no line; a broken one elsewhere is an error.
    """
    reasons = read_dropped(folder)
    places: dict[str, _Place] = {}
    for line in whole_lines(folder):
        sample = decode_line(line)
        before = places.get(sample.id)
        first = len(places) if before is None else before.first
        places[sample.id] = _Place(sample.index, first, line._replace(data=b""))
    for place in sorted(places.values(), key=lambda place: place[:2]):
        sample = _read_again(place.line)
        reason = sample.dropped or reasons.get(sample.id)
        if reason is None:
            yield sample
        elif dropped:
            yield msgspec.structs.replace(sample, dropped=reason)


def whole_lines(folder: Path) -> Iterator[Line]:
    """Every whole line of the shards, in order. Raises `UsageError` for a shard cut off midway."""
    paths = shard_paths(folder)
    for path in paths:
        with open(path, "rb") as file:
            offset = 0
            for number, data in enumerate(file, 1):
                if data.endswith(b"\n"):
                    yield Line(path, number, offset, data)
                elif path != paths[-1]:
                    raise UsageError(
                        f"{path}, line {number}: cut off, and not the last shard's last line; "
                        "remove that line and run generate again"
                    )
                offset += len(data)


def decode_line(line: Line) -> Sample:
    """The sample of a line. Raises `UsageError` naming the line."""
    try:
        sample = msgspec.json.decode(line.data, type=Sample)
        if not 0 <= sample.loss_from <= len(sample.token_ids):
            raise ValueError(
                f"loss_from {sample.loss_from} lies outside its {len(sample.token_ids)} tokens"
            )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        said = one_line(plain_words(str(error)), 120)
        raise UsageError(
            f"{line.path}, line {line.number}: not a sample ({said}); remove the line and run "
            "generate again"
        ) from None
    return sample


def read_dropped(folder: Path) -> dict[str, str]:
    """Why samples were left out, by id; empty where the gate has not judged yet.

    Raises `UsageError` where the file cannot be read.
    """
    return read_record(folder / DROPPED, dict[str, str], "remove it and run generate again") or {}


def _read_again(line: Line) -> Sample:
    """A line that was read before, from its place: all of them at once would fill the memory."""
    with open(line.path, "rb") as file:
        file.seek(line.offset)
        return decode_line(line._replace(data=file.readline()))
