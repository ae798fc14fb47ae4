"""A training's figures as JSON lines and as TensorBoard events, one record an update."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from training.files import write_whole
from training.train.events import EventFile

FILE = "metrics.jsonl"
EVENTS = "tensorboard"


class Metrics:
    """Appends to `metrics.jsonl` and the event files of a train folder.

    On a resume, records behind the checkpoint are dropped: the updates are made again. `again`:
    the checkpoint itself will be examined again too.
    """

    def __init__(self, folder: Path, *, resumed_at: int, again: bool = False) -> None:
        self.path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        kept = [r for r in read_metrics(folder) if r["update"] <= resumed_at]
        if again:
            kept = [r for r in kept if r["update"] < resumed_at or r["kind"] == "update"]
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in kept)
        write_whole(self.path, lines)
        self._file = open(self.path, "ab")  # noqa: SIM115 - open for the run's length
        self._events = EventFile(folder / EVENTS)

    def add(self, kind: str, update: int, **values: Any) -> None:
        """One record. `kind`: update, validation or checkpoint; None values are kept as null."""
        record = {"kind": kind, "update": update, "time": round(time.time(), 3), **values}
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()
        self._events.add(update, dict(_scalars(f"{kind}/", values)))

    def close(self) -> None:
        """Sync and close both files."""
        os.fsync(self._file.fileno())
        self._file.close()
        self._events.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The whole records of a train folder, in order; a line cut off by a crash is none."""
    try:
        lines = (folder / FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for line in lines[:-1]:
        try:
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError:
            continue
    return [r for r in records if isinstance(r.get("update"), int)]


def _scalars(prefix: str, values: dict[str, Any]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, list | tuple):
            numbers = [(i, v) for i, v in enumerate(value) if isinstance(v, int | float)]
            found += [(f"{prefix}{name}_{i}", float(v)) for i, v in numbers]
        elif isinstance(value, int | float):
            found.append((prefix + name, float(value)))
    return found


def peak_memory(device: torch.device) -> int:
    """Bytes: the accelerator's peak, else this process's."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
