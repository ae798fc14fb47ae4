"""An engine's log, read while it grows, and the start-up phases that its lines tell."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from engines.base import PhaseMark, PhaseTiming

FIRST_PHASE = "launch"
"""From the start of the process to the first line that marks a phase: Python and its imports."""
MAX_LOG_BYTES = 4_000_000
MAX_LINE_BYTES = 1_000_000
MAX_PROGRESS_CHARS = 2000
"""Of a line: a progress bar is shorter, and the search of a far longer line could take hours."""
PROGRESS = re.compile(r"\d+%.*?\|?\s*\b(\d+)/(\d+) \[")
"""A progress bar's count, as `tqdm` writes it: shards loaded, graphs captured."""
TARGET_PHASES = ("load_weights", "load_target")
DRAFTER_PHASE = "load_drafter"


class PhaseTracker:
    """Start-up phases from log lines, each stretch of a phase kept apart.

    A line that matches a mark ends the current phase and begins the marked one, unless that is
    the current one already. A phase that comes back later (weights again, for the drafter) is a
    new stretch. Times are seconds since the launch.
    """

    def __init__(self, marks: tuple[PhaseMark, ...]) -> None:
        self._marks = [(mark.phase, re.compile(mark.pattern)) for mark in marks]
        self._begun: list[tuple[str, float]] = [(FIRST_PHASE, 0.0)]
        self._progress: dict[int, tuple[int, int]] = {}

    @property
    def current(self) -> tuple[str, float]:
        """The current phase and when it began."""
        return self._begun[-1]

    @property
    def index(self) -> int:
        """The current phase's place among all stretches so far."""
        return len(self._begun) - 1

    @property
    def said(self) -> str:
        """The current phase with how far it is, where the log tells."""
        done = self._progress.get(self.index)
        return self.current[0] if done is None else f"{self.current[0]} {done[0]} of {done[1]}"

    def feed(self, line: str, now_s: float) -> bool:
        """Take one log line; True if a phase began with it."""
        begins = self._begin(line, now_s)
        count = PROGRESS.search(line[:MAX_PROGRESS_CHARS])
        if count is not None and int(count[1]) <= int(count[2]):
            self._progress[self.index] = int(count[1]), int(count[2])
        return begins

    def _begin(self, line: str, now_s: float) -> bool:
        for phase, pattern in self._marks:
            if pattern.search(line):
                if phase == self.current[0]:
                    return False
                self._begun.append((phase, now_s))
                return True
        return False

    def timings(self, end_s: float | None) -> tuple[PhaseTiming, ...]:
        """All phases so far; the last ends at `end_s`."""
        ends = [start for _, start in self._begun[1:]] + [end_s]
        return tuple(
            PhaseTiming(phase=phase, start_s=start, end_s=end, progress=self._progress.get(i))
            for i, ((phase, start), end) in enumerate(zip(self._begun, ends, strict=True))
        )


class LogFollower:
    """Complete new lines of a growing file, read once each. A carriage return ends a line too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # cut by someone: from its beginning again
                file.seek(self._offset)
                data = file.read(MAX_LOG_BYTES)
        except OSError:
            return []  # taken away by someone: the engine goes on without
        self._offset += len(data)
        *lines, rest = re.split(rb"[\r\n]", self._rest + data)
        self._rest = rest[-MAX_LINE_BYTES:]
        return [line.decode("utf-8", "replace") for line in lines if line.strip()]


def read_log(path: Path) -> str:
    """The log's text; of a very long one the first and the last two megabytes."""
    half = MAX_LOG_BYTES // 2
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_LOG_BYTES if size <= MAX_LOG_BYTES else half)
            if size > MAX_LOG_BYTES:  # never the whole: it may be larger than the memory
                file.seek(size - half)
                data += b"\n[...]\n" + file.read(half)
    except OSError:
        return ""
    return data.decode("utf-8", "replace")


def with_weights(
    phases: tuple[PhaseTiming, ...], target: int | None, drafter: int | None
) -> tuple[PhaseTiming, ...]:
    """The phases that read a checkpoint, with its size in bytes.

    Weights that are loaded a second time are the drafter's; an engine whose log does not say
    "weights" again loads them in its phase for the drafter.
    """
    stretches = [i for i, p in enumerate(phases) if p.phase in TARGET_PHASES]
    own = [i for i, p in enumerate(phases) if p.phase == DRAFTER_PHASE]
    sizes = dict(zip(stretches[:1], [target], strict=False))
    if drafter is not None:
        sizes |= dict.fromkeys(stretches[1:2] or own[:1], drafter)
    return tuple(replace(p, weight_bytes=sizes.get(i)) for i, p in enumerate(phases))


def weights_size(folder: Path | None) -> int | None:
    """The bytes of a checkpoint's weight files; None where it has none at hand."""
    if folder is None:
        return None
    try:
        kinds = ("*.safetensors", "*.gguf", "*.bin")
        found = next((files for k in kinds if (files := list(folder.glob(k)))), [])
        return sum(file.stat().st_size for file in found) or None
    except OSError:
        return None
