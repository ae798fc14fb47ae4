"""Writing samples: appended line by line, synced in small batches, never rewritten."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from training.samples import Sample, shard_paths

SYNC_EVERY = 16
SYNC_AFTER_S = 2.0


class ShardWriter:
    """Appends samples to the last shard; a new one begins where it holds `shard_samples` lines.

    What a crash left behind the last newline is cut off first. A line is in the file when `append`
    returns, so that a killed process loses nothing; it is on the disk after `sync` at the latest.
    """

    def __init__(self, folder: Path, shard_samples: int) -> None:
        self._folder = folder
        self._shard_samples = shard_samples
        self._pending = 0
        self._synced = time.monotonic()
        shards = shard_paths(folder)
        self._number = int(shards[-1].stem.partition("-")[2]) if shards else -1
        self._fd = -1
        self._lines = self._size = 0
        if shards:
            self._open(shards[-1])
            self._cut()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, sample: Sample) -> None:
        """Write one sample's line. Raises `OSError`; the file then ends with the line before."""
        if self._fd < 0 or self._lines >= self._shard_samples:
            self._begin()
        data = msgspec.json.encode(sample) + b"\n"
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)
        self._lines += 1
        self._pending += 1
        if self._pending >= SYNC_EVERY or time.monotonic() - self._synced > SYNC_AFTER_S:
            self.sync()

    def sync(self) -> None:
        """Everything appended so far is on the disk when this returns."""
        if self._pending:
            os.fsync(self._fd)
        self._pending, self._synced = 0, time.monotonic()

    def close(self) -> None:
        """Sync, and let the file go."""
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._fd = -1

    def _path(self) -> Path:
        return self._folder / f"samples-{self._number:05d}.jsonl"

    def _begin(self) -> None:
        self.close()
        self._number += 1
        self._open(self._path())
        self._lines = self._size = 0
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)  # the file's name, too
        os.close(folder)

    def _open(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _cut(self) -> None:
        """Count the whole lines of the shard, and cut off what stands behind them."""
        with open(self._fd, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._lines += 1
                self._size += len(line)
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
