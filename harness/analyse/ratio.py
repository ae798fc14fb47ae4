"""Intervals of pooled ratios whose sample is not the verify step but the request.

Steps of one request resemble each other, so that an interval over steps would be too narrow. Each
cluster (all requests of one prompt) gives two sums, y and x; the figure R is sum(y) / sum(x). Its
variance is the jackknife's, which leaves one cluster out at a time (R. G. Miller, Biometrika 61
(1974)), about R: (n - 1)/n * sum((R without i - R)^2). Student's t has as many degrees of freedom
as clusters of equal size would have that weigh the same (L. Kish): (sum x)^2 / sum(x^2) - 1. It is
a closed formula, so that the same records give the same bytes; `docs/acceptance.md` tells how often
it holds the truth.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from harness.analyse.statistics import t_quantile, wilson
from harness.findings import Estimate

if TYPE_CHECKING:
    from harness.analyse.requests import Counts

CONFIDENCE = 0.95
ONE_THREAD = 10_000


def ratio(y: Counts, x: Counts, *, offset: float = 0.0, most: float | None = None) -> Estimate:
    """offset + sum(y) / sum(x): for lengths and means.

    Its interval is cut at `offset` and at `most`, beyond which the figure cannot be.
    """
    whole = float(x.sum())
    if whole <= 0:
        return Estimate(value=None)
    value = float(y.sum()) / whole
    found = _deviation(y, x, value)
    if found is None:
        return Estimate(value=offset + value)
    half = found.t * found.deviation
    low, high = offset + max(0.0, value - half), offset + value + half
    return Estimate(value=offset + value, low=low, high=high if most is None else min(high, most))


def share(y: Counts, x: Counts) -> Estimate:
    """sum(y) / sum(x) of trials that succeed or fail, by Wilson's interval.

    As many trials are taken as would give the jackknife's variance, at most all of them;
    where every trial ended alike the variance says nothing, and each cluster counts as one trial.
    """
    trials = float(x.sum())
    if trials <= 0:
        return Estimate(value=None)
    value = float(y.sum()) / trials
    found = _deviation(y, x, value)
    if found is None:
        return Estimate(value=value)
    if 0 < value < 1:
        variance = found.deviation**2
        worth = min(trials, value * (1 - value) / variance) if variance > 0 else trials
    else:
        worth = float((x > 0).sum())
    low, high = wilson(min(value, 1.0) * worth, worth, found.t)
    return Estimate(value=value, low=min(low, value), high=max(high, value))


class Deviation(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio's standard error, and how many of it the interval reaches to each side."""

    deviation: float
    t: float


def _deviation(y: Counts, x: Counts, value: float) -> Deviation | None:
    """None with fewer than two clusters that tell anything."""
    import numpy as np

    some = x > 0
    n = int(some.sum())
    if n < 2:
        return None
    own, trials = np.asarray(y, dtype=float)[some], np.asarray(x, dtype=float)[some]
    whole = float(trials.sum())
    left_out = (own - value * trials) / (whole - trials)
    variance = (n - 1) / n * _squared(left_out)
    worth = whole**2 / _squared(trials)
    t = t_quantile(0.5 + CONFIDENCE / 2, max(1.0, worth - 1))
    return Deviation(deviation=math.sqrt(variance), t=t)


def _squared(values: Counts) -> float:
    """The sum of squares; by parts that no linear algebra library spreads over its threads.

    Else the last digit would depend on the machine's number of cores.
    """
    parts = (values[at : at + ONE_THREAD] for at in range(0, len(values), ONE_THREAD))
    return sum(float(part @ part) for part in parts)
