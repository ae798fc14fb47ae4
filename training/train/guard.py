"""When a training must stop by itself: no number, a jump of the loss, no data."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

HISTORY = 64
LEAST_HISTORY = 20
SPREADS = 10.0  # of the losses' spread about their median
SHARE = 0.5  # of the median
IN_A_ROW = 3
STARVED_SHARE = 0.9
STARVED_S = 300.0
SLOW_SHARE = 0.3
SLOW_S = 60.0


def not_finite(losses: Sequence[float], norm: float) -> list[int] | None:
    """Which of an update's rows have no finite loss; [] where only the gradient has none.

    None: all is well.
    """
    rows = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
    return rows if rows or not math.isfinite(norm) else None


class SpikeRule:
    """A jump of the loss: three updates in a row far above the last 64.

    Far is above their median by ten times their spread (1.48 times the median distance from the
    median, a standard deviation where losses are normal) and by half the median. The losses of
    the jump itself do not enter the history, and one odd batch is no jump.
    """

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self.history: deque[float] = deque(losses, maxlen=HISTORY)
        self.above = 0

    def add(self, loss: float) -> bool:
        """Take in an update's loss; True: stop."""
        limit = self.limit()
        if limit is not None and loss > limit:
            self.above += 1
            return self.above >= IN_A_ROW
        self.above = 0
        self.history.append(loss)
        return False

    def limit(self) -> float | None:
        """The loss that counts as far above; None while too little is known."""
        if len(self.history) < LEAST_HISTORY:
            return None
        middle = statistics.median(self.history)
        spread = 1.4826 * statistics.median(abs(loss - middle) for loss in self.history)
        return middle + max(SPREADS * spread, SHARE * abs(middle))


class Starvation:
    """Share of the time spent in waiting for data: a warning from 30% of a minute on, and a stop
    at 90% of five minutes."""

    def __init__(self) -> None:
        self.windows: deque[tuple[float, float]] = deque()  # (seconds, of them waited)

    def add(self, seconds: float, waited: float) -> tuple[str, float] | None:
        """An update took `seconds`, `waited` of them for data; ("slow" or "stop", the share)."""
        self.windows.append((seconds, waited))
        while sum(s for s, _ in self.windows) - self.windows[0][0] > STARVED_S:
            self.windows.popleft()
        total = sum(s for s, _ in self.windows)
        share = sum(w for _, w in self.windows) / total if total else 0.0
        if total >= STARVED_S and share > STARVED_SHARE:
            return "stop", share
        return ("slow", share) if total >= SLOW_S and share > SLOW_SHARE else None
