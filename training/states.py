"""Hidden states by sample, wherever they come from: stored shards, or an engine as it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from harness.errors import UsageError
from training.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor

    from training.capture.store import ShardEntry
    from training.plan import TrainingPlan

SUMS_AT_ONCE = 4
AHEAD = 16
"""Samples that `stream` of stored states reads ahead."""


class SampleStates(msgspec.Struct, frozen=True, kw_only=True):
    """What the target computed for one sample of T tokens.

    `token_ids` int64 [T]; loss is on tokens `loss_from` … T - 1. `aux` [T, n * H]: the aux hidden
    states side by side; `last_normed` [T, H]: the last state AFTER the target's final norm. Both
    are float32 or bfloat16, whatever they were stored as. `choice` int32 [T]: the argmax of the
    target's logits after each token, over its whole vocabulary; None in states that were captured
    before it was stored.
    """

    sample_id: str
    category: str | None
    token_ids: Tensor
    loss_from: int
    aux: Tensor
    last_normed: Tensor
    choice: Tensor | None = None


class StateSource(Protocol):
    """Samples with their states, by number; the order never changes between runs."""

    aux_layers: tuple[int, ...]
    """Transformers' hidden-state indices of the target, in the order of the concatenation."""
    lengths: Sequence[int]
    """Tokens of each sample."""
    sample_ids: Sequence[str]

    def read(self, index: int) -> SampleStates:
        """The states of sample `index`. Raises `TrainingError` where its shard is damaged."""

    def stream(self, order: Sequence[int]) -> Iterator[SampleStates]:
        """The states of the samples in `order`, read ahead."""

    def close(self) -> None:
        """End what computes the states; a later use starts it again."""


class StoredStates:
    """A states folder, read by memory map: a sample costs its own bytes, whatever its place."""

    def __init__(self, folder: Path) -> None:
        from training.capture.store import read_index

        index = read_index(folder)
        if index is None:
            raise UsageError(f"{folder}: no states there; run `python -m training capture` first")
        if len(index.shards) != index.shards_planned:
            raise UsageError(
                f"{folder}: {len(index.shards)} of {index.shards_planned} shards are captured; "
                "run `python -m training capture` again to go on"
            )
        self.folder, self.index, self.layout = folder, index, index.layout
        self.aux_layers = self.layout.aux_layers
        self._files: dict[int, Any] = {}
        self._opening = threading.Lock()
        self._places: list[tuple[int, int]] = []  # of each sample: its shard, its number in it
        self._offsets: list[list[int]] = []
        self._loss_from: list[list[int]] = []
        sample_ids: list[str] = []
        self.categories: list[str | None] = []
        for number, shard in enumerate(index.shards):
            self._add(number, shard)
            sample_ids += shard.sample_ids
        self.sample_ids: Sequence[str] = sample_ids
        self.lengths: Sequence[int] = [self._length(place) for place in self._places]

    def read(self, index: int) -> SampleStates:
        """The states of sample `index`. Raises `TrainingError` where its shard is damaged."""
        from training.capture.fp8 import dequantise

        shard, number = self._places[index]
        begin, end = self._offsets[shard][number : number + 2]
        names = ["token_ids", "aux", "last_normed"]
        if self.layout.choice:
            names += ["choice"]
        if self.layout.dtype == "fp8":
            names += ["aux_scale", "last_scale"]
        found = {name: self._rows(shard, name, begin, end) for name in names}
        aux, last = found["aux"], found["last_normed"]
        if self.layout.dtype == "fp8":
            aux = dequantise(aux, found["aux_scale"])
            last = dequantise(last, found["last_scale"])
        else:
            # A slice of a memory map is not read until it is touched: read it here, in the thread
            # that reads ahead.
            aux, last = aux.clone(), last.clone()
        return SampleStates(
            sample_id=self.sample_ids[index],
            category=self.categories[index],
            token_ids=found["token_ids"].clone(),
            loss_from=self._loss_from[shard][number],
            aux=aux,
            last_normed=last,
            choice=found["choice"].clone() if self.layout.choice else None,
        )

    def token_ids(self, index: int) -> Tensor:
        """The token ids int64 [T] of sample `index` alone."""
        shard, number = self._places[index]
        begin, end = self._offsets[shard][number : number + 2]
        return self._rows(shard, "token_ids", begin, end)

    def loss_from(self, index: int) -> int:
        """Where the loss of sample `index` begins."""
        shard, number = self._places[index]
        return self._loss_from[shard][number]

    def stream(self, order: Sequence[int]) -> Iterator[SampleStates]:
        """The states of the samples in `order`, read ahead in a thread."""
        from training.capture.ahead import Ahead

        return iter(Ahead(lambda: (self.read(index) for index in order), AHEAD))

    def close(self) -> None:
        """Nothing is held but maps of files."""

    def damaged(self, shards: Sequence[ShardEntry]) -> TrainingError | None:
        """The first of `shards` whose bytes have another sum than when they were captured.

        A shard that was not touched since its last sum is not read again (`remembered`).
        """
        from concurrent.futures import ThreadPoolExecutor

        from training.remembered import remembered_digest

        with ThreadPoolExecutor(SUMS_AT_ONCE) as pool:
            sums = pool.map(lambda shard: remembered_digest(self.folder / shard.file), shards)
            for shard, found in zip(shards, sums, strict=True):
                if found != shard.sha256:
                    pool.shutdown(cancel_futures=True)
                    return self._damaged(shard.file, "changed since it was captured")
        return None

    def _add(self, number: int, shard: ShardEntry) -> None:
        path = self.folder / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            what = "is missing" if size is None else f"holds {size} of {shard.bytes} bytes"
            raise self._damaged(shard.file, what)
        self._offsets.append(self._rows(number, "offsets", 0, len(shard.sample_ids) + 1).tolist())
        self._loss_from.append(self._rows(number, "loss_from", 0, len(shard.sample_ids)).tolist())
        self._places += [(number, i) for i in range(len(shard.sample_ids))]
        self.categories += shard.categories

    def _length(self, place: tuple[int, int]) -> int:
        offsets = self._offsets[place[0]]
        return offsets[place[1] + 1] - offsets[place[1]]

    def _rows(self, shard: int, name: str, begin: int, end: int) -> Tensor:
        from safetensors import SafetensorError, safe_open

        file = self.index.shards[shard].file
        try:
            with self._opening:
                if shard not in self._files:
                    self._files[shard] = safe_open(self.folder / file, framework="pt")
            rows: Tensor = self._files[shard].get_slice(name)[begin:end]
        except (SafetensorError, OSError, IndexError, ValueError) as error:
            raise self._damaged(file, f"cannot be read ({error})") from None
        if len(rows) != end - begin:
            raise self._damaged(file, f"has {len(rows)} of {end - begin} rows of {name}")
        return rows

    def _damaged(self, file: str, what: str) -> TrainingError:
        return TrainingError(
            f"the shard {self.folder / file} {what}; run `python -m training capture` again: a "
            "shard that is missing or cut off is captured anew (remove one that is damaged)"
        )


def open_states(folder: Path) -> StoredStates:
    """The stored states in `folder`.

    Raises `UsageError` where there are none or not all yet, `TrainingError` naming the shard that
    is missing, cut off or damaged.
    """
    return StoredStates(folder)


def open_source(plan: TrainingPlan, work: Path) -> StateSource:
    """What training reads: the stored states of `work`, or with `capture.online` an engine.

    The capture stage must have ended; its gate is the caller's to ask. Raises as `open_states`.
    """
    if plan.capture.online:
        from training.capture.online import open_online

        return open_online(plan, work)
    from training.folders import stage_folder

    return open_states(stage_folder(work, "capture"))
