"""Intervals of pooled ratios whose sample is not the verify step but the request.

Steps of one request resemble each other, so that an interval over steps would be too narrow. Each
cluster (all requests of one prompt) gives two sums, y and x; the figure is sum(y) / sum(x) and its
variance that of a ratio estimator (W. G. Cochran, Sampling Techniques, 3rd ed., chapter 6), by
Student's t with clusters - 1 degrees of freedom.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.analyse.statistics import t_quantile, wilson
from harness.records import Estimate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray

CONFIDENCE = 0.95


def ratio(y: Counts, x: Counts, *, offset: float = 0.0, most: float | None = None) -> Estimate:
    """offset + sum(y) / sum(x): for lengths and means.

    Its interval is cut at `offset` and at `most`, beyond which the figure cannot be.
    """
    whole = float(x.sum())
    if whole <= 0:
        return Estimate(value=None)
    value = float(y.sum()) / whole
    spread = _deviation(y, x, value)
    if spread is None:
        return Estimate(value=offset + value)
    half = t_quantile(0.5 + CONFIDENCE / 2, len(x) - 1) * spread
    low, high = offset + max(0.0, value - half), offset + value + half
    return Estimate(value=offset + value, low=low, high=high if most is None else min(high, most))


def share(y: Counts, x: Counts) -> Estimate:
    """sum(y) / sum(x) of trials that succeed or fail, by Wilson's interval.

    As many trials are taken as would give the ratio estimator's variance, at most all of them;
    where every trial ended alike the variance says nothing, and each cluster counts as one trial.
    """
    trials = float(x.sum())
    if trials <= 0:
        return Estimate(value=None)
    value = float(y.sum()) / trials
    spread = _deviation(y, x, value)
    if spread is None:
        return Estimate(value=value)
    if 0 < value < 1:
        worth = min(trials, value * (1 - value) / spread**2) if spread > 0 else trials
    else:
        worth = float((x > 0).sum())
    z = t_quantile(0.5 + CONFIDENCE / 2, len(x) - 1)
    low, high = wilson(min(value, 1.0) * worth, worth, z)
    return Estimate(value=value, low=min(low, value), high=max(high, value))


def _deviation(y: Counts, x: Counts, value: float) -> float | None:
    """The ratio's standard error; None with fewer than two clusters that tell anything."""
    import numpy as np

    n = len(x)
    if int((x > 0).sum()) < 2:
        return None
    rest = np.asarray(y, dtype=float) - value * np.asarray(x, dtype=float)
    return math.sqrt(n / (n - 1) * float(rest @ rest)) / float(x.sum())
