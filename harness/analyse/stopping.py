"""Stopping as soon as an interval is narrow enough, without making it cover less than it says.

Whoever looks after each pair and stops at the first narrow interval stops too often where the noise
happened to look small, so that the interval covers less than its nominal rate (of 95% about 90%).
The rule looks at the width alone, never at the ratio, and for normal values the two are independent
(Anscombe 1952; Starr 1966). So the loss follows from the noise's distribution alone, and is made up
for by a higher confidence at every look: `stopped_confidence`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from harness.analyse.statistics import t_quantile
from harness.findings import Comparison

FEWEST_PAIRS = 3
PATHS = 20_000
NOISE = tuple(float(r) for r in np.geomspace(0.1, 10, 24))
"""A pair's noise over the wanted half-width: the worst of these decides."""


def first_look(launches: int) -> int:
    """The pairs of starts before the first look."""
    return max(FEWEST_PAIRS, launches)


@cache
def stopped_confidence(confidence: float, first: int, most: int) -> float:
    """The confidence that makes intervals cover `confidence` when a look is taken at every pair.

    From pair `first` to pair `most`, whatever the noise; rounded up to the next thousandth.
    """
    if most <= first:
        return confidence
    spread = _spreads(first, most)
    low, high = confidence, 1 - (1 - confidence) / 20
    while high - low > 1e-4:
        middle = (low + high) / 2
        good = _worst(spread, middle, first, most) >= confidence
        low, high = (low, middle) if good else (middle, high)
    return math.ceil(high * 1000) / 1000 if high < 0.999 else high


def _spreads(first: int, most: int) -> Any:
    """[path, look]: the standard deviation seen at each look, of values with deviation 1."""
    squares = np.random.default_rng(0).standard_normal((PATHS, most - 1)) ** 2
    n = np.arange(2, most + 1)
    return np.sqrt(np.cumsum(squares, axis=1) / (n - 1))[:, first - 2 :]


def _worst(spread: Any, confidence: float, first: int, most: int) -> float:
    """The least coverage over the noise levels.

    Given the deviation s seen where it stopped, the mean is off by more than t s / sqrt(n) with
    the normal probability beyond t s: the number of pairs drops out.
    """
    from scipy.special import ndtr

    n = np.arange(first, most + 1)
    quantiles = np.array([t_quantile(0.5 + confidence / 2, k - 1) for k in range(first, most + 1)])
    covered = 2 * ndtr(spread * quantiles) - 1
    rows = np.arange(len(spread))
    worst = 1.0
    for noise in NOISE:
        narrow = spread * quantiles / np.sqrt(n) * noise <= 1
        narrow[:, -1] = True
        worst = min(worst, float(covered[rows, narrow.argmax(axis=1)].mean()))
    return worst


def half_width(comparison: Comparison) -> float | None:
    """Half of an interval's width relative to the ratio, or None: 0.03 is 3% to either side."""
    low, high = comparison.ci_low, comparison.ci_high
    if low is None or high is None or low <= 0:
        return None
    return math.sqrt(high / low) - 1


def widest(comparisons: Sequence[Comparison], engine: str, metric: str) -> float | None:
    """The widest half-width of an engine's comparisons of one metric; None: one has none."""
    widths = [half_width(c) for c in comparisons if (c.engine, c.metric) == (engine, metric)]
    known = [w for w in widths if w is not None]
    return max(known) if known and len(known) == len(widths) else None
