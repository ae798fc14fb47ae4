"""Progress on stderr: a live line on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import TextIO

PLAIN_S = 10.0
"""Between two plain lines of one stage."""
LIVE_S = 0.2


class Progress:
    """The progress of one stage of `steps` steps: loss, accuracies, tokens/s and time left."""

    def __init__(self, stage: str, steps: int, *, stream: TextIO | None = None) -> None:
        self.stage, self.steps = stage, steps
        self.stream = stream if stream is not None else sys.stderr
        self.live = self.stream.isatty()
        self.begun = time.perf_counter()
        self.shown = 0.0
        self.tokens = 0
        self._first = 0

    def start_at(self, step: int) -> None:
        """Begin from a step that is not the first, as after a resume."""
        self._first = step

    def update(self, step: int, *, tokens: int, text: str) -> None:
        """Step `step` (from 0) is done, having taken in `tokens`; `text` holds the figures."""
        self.tokens += tokens
        now = time.perf_counter()
        last = step + 1 == self.steps
        interval = LIVE_S if self.live else PLAIN_S
        if not last and now - self.shown < interval:
            return
        self.shown = now
        spent = now - self.begun
        done = step + 1 - self._first
        left = spent / done * (self.steps - step - 1)
        line = (
            f"{self.stage}: step {step + 1}/{self.steps}  {text}  "
            f"{self.tokens / max(spent, 1e-9):,.0f} tokens/s  {clock(left)} left"
        )
        if self.live:
            self.stream.write(f"\r\x1b[2K{line}" + ("\n" if last else ""))
        else:
            self.stream.write(line + "\n")
        self.stream.flush()


class Smoothed:
    """Running means over about the last twenty values of each figure."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._count = 0

    def add(self, *values: float) -> None:
        """Take in one value of each figure."""
        self._count += 1
        share = max(1 / self._count, 0.05)
        old = self.values or list(values)
        self.values = [o + share * (v - o) for o, v in zip(old, values, strict=True)]


def note(text: str) -> None:
    """One plain line on stderr."""
    print(text, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Hours, minutes, seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
