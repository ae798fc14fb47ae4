"""What a long run shows on standard error while it works: a live line, or plain lines.

Nothing here touches standard output: that is for results.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from harness.load.slices import Tally

QUIET_S = 10.0
"""A plain log says at least this often that it is alive."""


class Progress(Protocol):
    """Told by the story what happens; shows it."""

    def say(self, text: str) -> None:
        """Something to keep: one line."""

    def stage(self, text: str) -> None:
        """What is being done now."""

    def cell(self, title: str, total: int | None) -> None:
        """A cell begins; `total` requests, None where a duration ends it."""

    def tally(self, tally: Tally) -> None:
        """How far the current cell is."""

    def cell_done(self) -> None:
        """The current cell is saved."""

    def skip(self) -> None:
        """A cell was there already."""

    def expect(self, cells: int) -> None:
        """How many cells there will be."""


class _Counting:
    """What both kinds keep: cells done, requests done, and how fast tokens come."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.cells = 0
        self.cells_done = 0
        self.text = ""
        self.total: int | None = None
        self.done = self.failed = self.tokens = 0
        self.cell_begun = self.last = time.monotonic()

    def start_cell(self, title: str, total: int | None) -> None:
        self.text, self.total = title, total
        self.done = self.failed = self.tokens = 0
        self.cell_begun = self.last = time.monotonic()

    def count(self, tally: Tally) -> None:
        if tally.done != self.done:
            self.last = time.monotonic()
        self.done, self.failed, self.tokens = tally.done, tally.failed, tally.tokens

    def line(self) -> str:
        if not self.done:
            return self.text
        seconds = max(self.last - self.cell_begun, 1e-3)
        of = f"/{self.total}" if self.total else ""
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{self.text}: {self.done}{of} requests, {self.tokens / seconds:.0f} tokens/s{failed}"
        )


class PlainProgress:
    """Lines with the time since the start, for logs and pipes."""

    def __init__(self) -> None:
        self._state = _Counting()
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> PlainProgress:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def expect(self, cells: int) -> None:
        """How many cells there will be."""
        self._state.cells = cells

    def _write(self, text: str) -> None:
        with self._lock:
            self._last = time.monotonic()
            elapsed = self._last - self._state.begun
            sys.stderr.write(f"[{elapsed:6.1f} s] {text}\n")
            sys.stderr.flush()

    def _tick(self) -> None:
        while not self._stop.wait(1.0):
            if time.monotonic() - self._last >= QUIET_S and self._state.text:
                self._write(self._state.line())

    def say(self, text: str) -> None:
        self._write(text)

    def stage(self, text: str) -> None:
        if text != self._state.text:
            self._state.start_cell(text, None)
            self._write(text)

    def cell(self, title: str, total: int | None) -> None:
        self._state.start_cell(title, total)

    def tally(self, tally: Tally) -> None:
        self._state.count(tally)

    def cell_done(self) -> None:
        self._state.cells_done += 1
        self._write(f"{self._state.cells_done}/{self._state.cells} {self._state.line()}")
        self._state.text = ""

    def skip(self) -> None:
        self._state.cells_done += 1


class LiveProgress:
    """One moving line on a terminal, and the lines worth keeping above it."""

    def __init__(self) -> None:
        self._state = _Counting()
        self._rich: RichProgress | None = None
        self._task = 0

    def __enter__(self) -> LiveProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich is not None:
            self._rich.stop()
            self._rich = None

    def expect(self, cells: int) -> None:
        """How many cells there will be."""
        self._state.cells = cells

    def _live(self) -> RichProgress:
        if self._rich is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                Progress,
                SpinnerColumn,
                TextColumn,
                TimeElapsedColumn,
            )

            self._rich = Progress(
                SpinnerColumn(),
                BarColumn(bar_width=12),
                TextColumn("{task.completed:.0f}/{task.total:.0f} cells"),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
                console=Console(file=sys.stderr),
                transient=True,
                refresh_per_second=4,  # the engine may share these cores
            )
            self._rich.start()
            self._task = self._rich.add_task("", total=self._state.cells or 1)
        return self._rich

    def _show(self) -> None:
        part = self._state.done / self._state.total if self._state.total else 0.0
        self._live().update(
            self._task,  # type: ignore[arg-type]
            description=self._state.line(),
            completed=self._state.cells_done + min(part, 1.0),
            total=self._state.cells or 1,
        )

    def say(self, text: str) -> None:
        self._live().console.print(text, markup=False, highlight=False)

    def stage(self, text: str) -> None:
        self._state.start_cell(text, None)
        self._show()

    def cell(self, title: str, total: int | None) -> None:
        self._state.start_cell(title, total)
        self._show()

    def tally(self, tally: Tally) -> None:
        self._state.count(tally)
        self._show()

    def cell_done(self) -> None:
        text = self._state.line()
        self._state.cells_done += 1
        self._state.done, self._state.total = 0, None
        self.say(f"{self._state.cells_done}/{self._state.cells} {text}")
        self._show()

    def skip(self) -> None:
        self._state.cells_done += 1


def make_progress() -> PlainProgress | LiveProgress:
    """The kind that fits where standard error goes."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()
