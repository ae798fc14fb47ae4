"""Paired comparison: the ratio's interval over paired blocks, and the verdict it allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from harness.measure.metrics import Better
from harness.records import Verdict


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Candidate over baseline. The interval is None with fewer than two pairs."""

    ratio: float
    ci_low: float | None
    ci_high: float | None
    pairs: int


def paired_ratio(pairs: Sequence[tuple[float, float]], *, confidence: float) -> Ratio | None:
    """Geometric mean of candidate/baseline over pairs, with Student's t interval on the log scale.

    A ratio's natural scale is the logarithm: there 2x and 0.5x lie equally far from no change.
    Pairs that are not positive say nothing of a ratio and are left out; None if no pair is left.
    """
    logs = [math.log(c / b) for b, c in pairs if b > 0 and c > 0]
    n = len(logs)
    if n == 0:
        return None
    mean = sum(logs) / n
    if n < 2:
        return Ratio(ratio=math.exp(mean), ci_low=None, ci_high=None, pairs=n)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / (n - 1))
    half = t_quantile(0.5 + confidence / 2, n - 1) * deviation / math.sqrt(n)
    return Ratio(
        ratio=math.exp(mean), ci_low=math.exp(mean - half), ci_high=math.exp(mean + half), pairs=n
    )


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def verdict(
    ratio: float, low: float | None, high: float | None, *, better: Better, min_effect: float
) -> Verdict:
    """better or worse: the interval on one side of 1 and the effect at least `min_effect`.

    same: the interval within 1 +- `min_effect`. Else, or without an interval: undecided.
    """
    if low is None or high is None:
        return "undecided"
    if low > 1 and ratio >= 1 + min_effect:
        return "better" if better == "higher" else "worse"
    if high < 1 and ratio <= 1 - min_effect:
        return "worse" if better == "higher" else "better"
    if low >= 1 - min_effect and high <= 1 + min_effect:
        return "same"
    return "undecided"


def autocorrelation_time(values: Sequence[float]) -> float:
    """How many successive values tell no more than one independent value; at least 1.

    1 + 2 times the sum of the autocorrelations, cut where the sums of neighbouring pairs are no
    longer positive (C. J. Geyer, Statistical Science 7 (1992), initial positive sequence).
    """
    import numpy as np

    n = len(values)
    if n < 8:
        return 1.0
    centred = np.asarray(values, dtype=float) - float(np.mean(values))
    power = np.abs(np.fft.rfft(centred, 2 * n)) ** 2
    covariance = np.fft.irfft(power)[:n] / n
    if covariance[0] <= 1e-12 * max(1.0, float(np.mean(np.square(values)))):
        return 1.0
    pairs = (covariance[0 : n - 1 : 2] + covariance[1:n:2]) / covariance[0]
    positive = pairs[: int(np.argmax(pairs <= 0))] if (pairs <= 0).any() else pairs
    return float(min(n, max(1.0, 2 * float(positive.sum()) - 1)))


def wilson(hits: float, n: float, z: float) -> tuple[float, float]:
    """Wilson's interval of a share, `z` standard normal deviations wide to each side.

    E. B. Wilson, JASA 22 (1927): unlike the plain one it holds for few trials and near 0 and 1.
    """
    if n == 0:
        return 0.0, 1.0
    share, square = hits / n, z * z / n
    middle = share + square / 2
    half = z * math.sqrt(share * (1 - share) / n + square / (4 * n))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def sign_test(more: int, less: int) -> float:
    """Two-sided exact p-value that `more` and `less` discordant pairs are a fair coin's."""
    n = more + less
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(more, less) + 1)) / 2**n
    return min(1.0, 2 * tail)
