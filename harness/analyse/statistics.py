"""Paired comparison: the ratio's interval over paired blocks, and the verdict it allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from harness.findings import Interval, Verdict
from harness.measure.metrics import Better

LARGEST = math.log(1e300)
"""An end further out is none: two starts far apart, at an error rate divided among many rows."""


class LogMean(msgspec.Struct, frozen=True, kw_only=True):
    """A mean of `units` independent values on the log scale, and how far it may be off.

    `error`: its standard error, None for one unit. `reference`: what |mean - truth| / error is in
    resamples, ascending; None: Student's t, of `degrees` of freedom where they are not units - 1.
    """

    mean: float
    error: float | None
    units: int
    reference: tuple[float, ...] | None = None
    degrees: float | None = None

    @property
    def freedom(self) -> float:
        """Student's t's degrees of freedom."""
        return self.units - 1 if self.degrees is None else self.degrees

    def half(self, confidence: float) -> float | None:
        """Half the interval's width on the log scale."""
        if self.error is None:
            return None
        if self.reference is None:
            return t_quantile(0.5 + confidence / 2, self.freedom) * self.error
        size = len(self.reference)
        at = math.ceil(confidence * (size + 1)) - 1
        return math.inf if at >= size else self.reference[at] * self.error

    def ends(self, confidence: float) -> tuple[float, float] | None:
        """The interval on the scale that the mean is on; None of one unit."""
        half = self.half(confidence)
        return None if half is None else (self.mean - half, self.mean + half)

    def interval(self, confidence: float) -> tuple[float, float] | None:
        """The interval of the ratio; None where it has none, as it is without any end."""
        ends = self.ends(confidence)
        if ends is None or max(map(abs, ends)) > LARGEST:
            return None
        return math.exp(ends[0]), math.exp(ends[1])

    def p_value(self) -> float | None:
        """Two-sided, of a mean of zero: no difference."""
        if self.error is None:
            return None
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        if self.reference is None:
            return t_p_value(self.mean, self.error, self.freedom)
        at = abs(self.mean) / self.error
        beyond = sum(value >= at for value in self.reference)
        return (beyond + 1) / (len(self.reference) + 1)


def log_mean(values: Sequence[float]) -> LogMean:
    """The mean of independent values and its standard error. Raises ValueError without values."""
    n = len(values)
    if n == 0:
        raise ValueError("no values")
    mean = sum(values) / n
    if n < 2:
        return LogMean(mean=mean, error=None, units=n)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
    return LogMean(mean=mean, error=deviation / math.sqrt(n), units=n)


def geometric_interval(ratios: Sequence[float], *, confidence: float) -> Interval:
    """Geometric mean of positive ratios, with Student's t interval on the log scale.

    A ratio's natural scale is the logarithm: there 2x and 0.5x lie equally far from no change.
    Raises ValueError without ratios.
    """
    found = log_mean([math.log(r) for r in ratios])
    low, high = found.interval(confidence) or (None, None)
    return Interval(value=math.exp(found.mean), ci_low=low, ci_high=high)


def holm(p_values: Sequence[float], alphas: Sequence[float]) -> list[float]:
    """The error rate that each of several comparisons is decided at, so that all keep theirs.

    S. Holm, Scandinavian Journal of Statistics 6 (1979): the smallest p-value stands against
    alpha / m; when it holds, the next against alpha / (m - 1), and so on. The first that fails and
    all after it differ in nothing that was shown; what else is said of them (that they are the
    same) has alpha / m, as Holm's ladder is for differences alone.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i] / alphas[i])
    levels = [alpha / len(p_values) for alpha in alphas]
    for at, i in enumerate(order):
        level = alphas[i] / (len(order) - at)
        if p_values[i] > level:
            break
        levels[i] = level
    return levels


def percent_of(confidence: float) -> str:
    """A confidence in words, by as many digits as its distance to 1 has: 95%, 97.5%, 99.17%."""
    digits = max(1, -math.floor(math.log10(1 - confidence)) - 1) if confidence < 1 else 0
    told = f"{100 * confidence:.{digits}f}"
    return f"{told.rstrip('0').rstrip('.') if '.' in told else told}%"


def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def t_p_value(value: float, error: float, degrees: float) -> float:
    """Two-sided p-value of a value whose standard error has so many degrees of freedom."""
    if error == 0:
        return 1.0 if value == 0 else 0.0
    from scipy.special import stdtr

    return float(2 * stdtr(degrees, -abs(value) / error))


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


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict, and the interval that it is drawn from with its confidence."""

    verdict: Verdict
    low: float | None
    high: float | None
    confidence: float


def judged(
    found: LogMean,
    *,
    level: float,
    strict: float,
    better: Better,
    min_effect: float,
) -> Judged:
    """A difference is decided at the error rate `level`, which is Holm's; `same` at `strict`.

    `strict` is the whole correction, alpha / m: see `holm`.
    """
    for rate in (level, strict):
        low, high = found.interval(1 - rate) or (None, None)
        told = verdict(math.exp(found.mean), low, high, better=better, min_effect=min_effect)
        if told in ("better", "worse"):
            break
    return Judged(verdict=told, low=low, high=high, confidence=1 - rate)


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
