"""What a load generating process is given, and what it gives back: two files and a board.

A worker takes a slice file and yields a record file, so that it can run wherever files can be
carried. The board is a small shared file: the common start, and how far each worker is.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import msgspec

from harness.load.prompts.datasets import Prompt
from harness.load.schedule.conversations import Share
from harness.load.streaming.client import Asking
from harness.records import ClientFigures, LoadPoint, RequestRecord


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of a cell's load. `prompts` are the whole cell's."""

    asking: Asking
    prompts: tuple[Prompt, ...]
    load: LoadPoint
    cell_id: str
    seed: int
    share: Share


class Yield(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it: records by index, the last payloads by index, how the worker fared.

    `interrupted`, `given_up`: see `Timeline`.
    """

    records: tuple[RequestRecord, ...]
    tails: dict[int, tuple[bytes, ...]]
    figures: ClientFigures
    interrupted: str | None
    given_up: bool = False


def write(path: Path, what: Slice | Yield) -> None:
    """Write as MessagePack; whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_bytes(msgspec.msgpack.encode(what))
    beside.replace(path)


def read_slice(path: Path) -> Slice:
    """Read what `write` wrote."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Slice)


def read_yield(path: Path) -> Yield:
    """Read what `write` wrote."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Yield)


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """How far a cell is: requests ended, those that failed among them, output tokens."""

    done: int = 0
    failed: int = 0
    tokens: int = 0

    def plus(self, record: RequestRecord) -> Tally:
        """One more request has ended."""
        return Tally(
            done=self.done + 1,
            failed=self.failed + (record.status == "failed"),
            tokens=self.tokens + (record.output_tokens or 0),
        )


class Board:
    """The common start and each worker's tally, in memory shared through a file.

    Laid out as 64-bit integers: the start in ns (0: not yet), then for each worker whether it is
    ready, and its tally. Each integer is written by one process alone.
    """

    FIELDS = 4

    def __init__(self, path: Path, workers: int, *, create: bool = False) -> None:
        size = 8 * (1 + self.FIELDS * workers)
        if create:
            path.write_bytes(bytes(size))
        self._workers = workers
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), size)

    def _get(self, at: int) -> int:
        value: int = struct.unpack_from("=q", self._map, 8 * at)[0]
        return value

    def _put(self, at: int, value: int) -> None:
        struct.pack_into("=q", self._map, 8 * at, value)

    @property
    def start_ns(self) -> int:
        """When all workers begin, on `perf_counter_ns`; 0: not said yet."""
        return self._get(0)

    @start_ns.setter
    def start_ns(self, value: int) -> None:
        self._put(0, value)

    def ready(self, worker: int) -> None:
        """The worker waits for the start."""
        self._put(1 + self.FIELDS * worker, 1)

    def all_ready(self) -> bool:
        """Whether every worker waits for the start."""
        return all(self._get(1 + self.FIELDS * w) for w in range(self._workers))

    def tell(self, worker: int, tally: Tally) -> None:
        """How far the worker is."""
        at = 2 + self.FIELDS * worker
        for i, value in enumerate((tally.done, tally.failed, tally.tokens)):
            self._put(at + i, value)

    def tally(self) -> Tally:
        """How far all of them are together."""
        sums = [
            sum(self._get(2 + self.FIELDS * w + i) for w in range(self._workers)) for i in range(3)
        ]
        return Tally(done=sums[0], failed=sums[1], tokens=sums[2])

    def close(self) -> None:
        """Let the memory go."""
        self._map.close()
        self._file.close()
