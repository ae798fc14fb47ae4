"""What a training tells as it goes: a live table on a terminal, else plain lines.

In a log no 30 s pass without a line, whatever is being waited for: a thread repeats what is going
on. The first line comes before anything heavy is read.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TextIO

from training.progress import LIVE_S, PLAIN_S

if TYPE_CHECKING:
    from rich.live import Live

QUIET_S = 20.0  # after which the silence is broken


class Console:
    """Lines and figures on stderr; silent where `speaks` is False (all processes but one)."""

    def __init__(self, *, speaks: bool = True, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.speaks = speaks
        self.live = speaks and self.stream.isatty()
        self._doing, self._since = "starting", time.monotonic()
        self._spoke = time.monotonic()
        self._shown = 0.0
        self._table: Live | None = None
        self._lock = threading.Lock()
        self._soon: SimpleQueue[str | None] = SimpleQueue()

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Break every long silence while the block runs."""
        thread = threading.Thread(target=self._beat, name="console", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._soon.put(None)
            thread.join()
            self._close_table()

    def say(self, text: str) -> None:
        """One line."""
        if not self.speaks:
            return
        with self._lock:
            self._spoke = time.monotonic()
            if self._table is not None:
                self._table.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=self.stream, flush=True)

    def soon(self, text: str) -> None:
        """One line that the console's thread says at once: all that a signal's handler may do.

        The code it interrupts may hold any lock, that of `say` too.
        """
        self._soon.put(text)

    def doing(self, what: str, *, tell: bool = True) -> None:
        """What is going on from now on; repeated while it lasts."""
        self._doing, self._since = what, time.monotonic()
        if tell:
            self.say(f"train: {what}")

    def figures(self, title: str, values: Mapping[str, str], *, last: bool = False) -> None:
        """The figures of the moment: the live table, or a line where the last is old enough."""
        if not self.speaks:
            return
        now = time.monotonic()
        self._doing, self._since = title, now
        if not last and now - self._shown < (LIVE_S if self.live else PLAIN_S):
            return
        self._shown = now
        if self.live:
            self._draw(title, values)
        else:
            self.say(f"train: {title}  " + "  ".join(f"{k} {v}" for k, v in values.items()))

    def _draw(self, title: str, values: Mapping[str, str]) -> None:
        from rich.console import Console as Terminal
        from rich.live import Live
        from rich.table import Table

        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for name, value in values.items():
            table.add_row(name, value)
        with self._lock:
            if self._table is None:
                terminal = Terminal(file=self.stream)
                self._table = Live(console=terminal, auto_refresh=False, transient=True)
                self._table.start()
            self._table.update(table, refresh=True)
            self._spoke = time.monotonic()

    def _close_table(self) -> None:
        with self._lock:
            if self._table is not None:
                self._table.stop()
                self._table = None

    def _beat(self) -> None:
        while True:
            try:
                text = self._soon.get(timeout=1.0)
            except Empty:
                now = time.monotonic()
                if now - self._spoke >= QUIET_S:
                    self.say(f"train: {self._doing}: {now - self._since:.0f} s so far")
                continue
            if text is None:
                return
            self.say(text)
