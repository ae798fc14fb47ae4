"""How far generation is: a live bar on a terminal, else a plain line at a steady pace."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, TextIO

from training.progress import PLAIN_S, clock

WINDOW_S = 120.0
"""Rates are of so long a time, so that they follow the answers' changing lengths."""


class Meter:
    """Counts samples, answer tokens and failures; `tick` shows them when it is time to.

    `total` samples are wanted, of which `done` were there already. `clock` gives seconds.
    """

    def __init__(
        self,
        total: int,
        done: int,
        *,
        stream: TextIO | None = None,
        clock: Any = time.monotonic,
    ) -> None:
        self.total, self.done, self.failed, self.tokens = total, done, 0, 0
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._begun = self._shown = clock()
        self._marks: deque[tuple[float, int, int]] = deque([(self._begun, done, 0)])
        self._bar: Any = None
        if self._stream.isatty():
            self._bar = _bar(self._stream, total, done)

    def add(self, tokens: int) -> None:
        """One more sample is there."""
        self.done += 1
        self.tokens += tokens

    def fail(self) -> None:
        """One more request failed."""
        self.failed += 1

    def tick(self) -> None:
        """Show where it stands, where that was not shown for a while."""
        now = self._clock()
        self._marks.append((now, self.done, self.tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()
        if self._bar is not None:
            self._bar.update(0, completed=self.done, told=self.line())
        elif now - self._shown >= PLAIN_S:
            self._shown = now
            self._say()

    def close(self) -> None:
        """Show where it ended."""
        self._marks.append((self._clock(), self.done, self.tokens))
        if self._bar is not None:
            self._bar.update(0, completed=self.done, told=self.line())
            self._bar.stop()
        else:
            self._say()

    def line(self) -> str:
        """Samples, failures, rates and the time left in words."""
        first, last = self._marks[0], self._marks[-1]
        spent = last[0] - first[0]
        samples_per_s = (last[1] - first[1]) / spent if spent > 0 else 0.0
        tokens_per_s = (last[2] - first[2]) / spent if spent > 0 else 0.0
        failed = f", {self.failed} failed" if self.failed else ""
        left = self.total - self.done - self.failed
        time_left = f"{clock(left / samples_per_s)} left" if samples_per_s and left > 0 else ""
        if left > 0 and not samples_per_s:
            time_left = "time left not known yet"
        rates = f"{samples_per_s:.2f} samples/s  {tokens_per_s:,.0f} tokens/s"
        return f"{self.done}/{self.total} samples{failed}  {rates}  {time_left}".rstrip()

    def _say(self) -> None:
        print(f"generate: {self.line()}", file=self._stream, flush=True)


class Pace:
    """Tells at a steady pace how far a pass over `total` things is: `what 300/1000`."""

    def __init__(self, what: str, total: int, *, clock: Any = time.monotonic) -> None:
        self._what, self._total, self._done = what, total, 0
        self._clock = clock
        self._shown = clock()

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        now = self._clock()
        if now - self._shown >= PLAIN_S:
            self._shown = now
            print(f"{self._what} {self._done}/{self._total}", file=sys.stderr, flush=True)


def _bar(stream: TextIO, total: int, done: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("generate"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[told]}"),
        console=Console(file=stream),
    )
    bar.add_task("generate", total=total, completed=done, told="")
    bar.start()
    return bar
