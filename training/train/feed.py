"""Rows of states, read ahead in a thread so that the trainer waits for none."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from training.data import Document, collate
from training.errors import TrainingError
from training.states import SampleStates, StateSource
from training.train.rows import Row
from training.trainer import Captured

AHEAD = 3  # rows read before they are asked for
FIRST_SIGN_S = 10.0  # after which the wait for one row is told
GIVE_UP_S = 900.0
CLOSE_S = 30.0


class LoadedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row's states, and where its samples lie: (begin, loss_from, end) within the row."""

    row: Row
    sample_ids: tuple[str, ...]
    places: tuple[tuple[int, int, int], ...]
    captured: Captured


def load_row(row: Row, samples: Sequence[SampleStates], vocab_size: int) -> LoadedRow:
    """Put the samples of a row side by side, tensors [1, tokens, …]. Raises `TrainingError`."""
    documents, places, start = [], [], 0
    for states in samples:
        length = len(states.token_ids)
        where = f"sample {states.sample_id}"
        if states.aux.shape[0] != length or states.last_normed.shape[0] != length:
            raise TrainingError(f"{where}: {length} tokens, but states of {states.aux.shape[0]}")
        ids = states.token_ids.tolist()
        if length and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise TrainingError(f"{where}: token ids outside the target's {vocab_size}")
        documents.append(Document(ids=ids, loss_from=states.loss_from))
        _check_choice(states, where, vocab_size)
        places.append((start, start + states.loss_from, start + length))
        start += length
    captured = Captured(
        batch=collate([documents], start),
        aux=torch.cat([states.aux for states in samples])[None],
        last_normed=torch.cat([states.last_normed for states in samples])[None],
        choice=_choice(samples),
    )
    names = tuple(states.sample_id for states in samples)
    return LoadedRow(row=row, sample_ids=names, places=tuple(places), captured=captured)


def _check_choice(states: SampleStates, where: str, vocab_size: int) -> None:
    """Raises `TrainingError` for choices that are not one token a row."""
    choice = states.choice
    if choice is None:
        return
    if len(choice) != len(states.token_ids):
        raise TrainingError(f"{where}: {len(states.token_ids)} tokens, but {len(choice)} choices")
    if len(choice) and not 0 <= int(choice.min()) <= int(choice.max()) < vocab_size:
        raise TrainingError(f"{where}: choices outside the target's {vocab_size} tokens")


def _choice(samples: Sequence[SampleStates]) -> torch.Tensor | None:
    """The target's choices of a row [1, tokens], where all its samples bring them."""
    found = [states.choice for states in samples if states.choice is not None]
    return torch.cat(found).long()[None] if len(found) == len(samples) else None


class Feed:
    """Rows in the given order; `waited` sums the seconds that the caller had to wait.

    `on_wait` is told the seconds of a wait that grows long.
    """

    def __init__(
        self,
        source: StateSource,
        rows: Sequence[Row],
        vocab_size: int,
        on_wait: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._source, self._rows, self._vocab = source, rows, vocab_size
        self._queue: queue.Queue[LoadedRow | BaseException] = queue.Queue(AHEAD)
        self._stop = threading.Event()
        self._on_wait = on_wait
        self.waited = 0.0
        self._thread = threading.Thread(target=self._read, name="states", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[LoadedRow]:
        for _ in self._rows:
            yield self._next()

    def close(self) -> None:
        """Stop reading ahead; a read that hangs is left behind."""
        self._stop.set()
        deadline = time.monotonic() + CLOSE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.05)

    def _next(self) -> LoadedRow:
        begun = time.perf_counter()
        told = FIRST_SIGN_S
        while True:
            try:
                item = self._queue.get(timeout=0.5)
                break
            except queue.Empty:
                waited = time.perf_counter() - begun
                if waited > GIVE_UP_S:
                    raise TrainingError(
                        f"no states came for {waited:.0f} s: the states' disk or engine hangs"
                    ) from None
                if waited > told:
                    self._on_wait(waited)
                    told += FIRST_SIGN_S
        self.waited += time.perf_counter() - begun
        if isinstance(item, BaseException):
            raise item
        return item

    def _read(self) -> None:
        try:
            stream = self._source.stream([i for row in self._rows for i in row.indices])
            for row in self._rows:
                samples = [next(stream) for _ in row.indices]
                if not self._put(load_row(row, samples, self._vocab)):
                    return
        except StopIteration:
            self._put(TrainingError("the states ended before the epoch did"))
        except BaseException as error:
            self._put(error)

    def _put(self, item: LoadedRow | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def to_device(captured: Captured, device: torch.device, dtype: torch.dtype) -> Captured:
    """The row on the trainer's device, its states as `dtype`."""
    batch = captured.batch
    moved = {name: getattr(batch, name).to(device) for name in batch.__struct_fields__}
    return Captured(
        batch=type(batch)(**moved),
        aux=captured.aux.to(device, dtype),
        last_normed=captured.last_normed.to(device, dtype),
        choice=None if captured.choice is None else captured.choice.to(device),
    )
