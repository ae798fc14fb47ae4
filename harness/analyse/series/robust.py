"""Level, noise, weekdays and memory of many series at once, a few wild nights notwithstanding.

Arrays are [series, nights]; a missing night is NaN. Nothing here looks at a loop of series.
"""

from __future__ import annotations

import msgspec
import numpy as np

from harness.analyse.series.templates import Bools, Floats, Ints

CLIP = 2.0
"""Residuals are cut at so many deviations before they are averaged (P. J. Huber, 1964)."""
WILD = 2.5
MAD = 1.4826
_CUT_MEAN_SQUARE = 0.921
"""E[min(|z|, WILD)^2] of a standard normal z."""
PRIOR_NIGHTS = 10.0
"""The correlation of neighbours is shrunk towards PRIOR_RHO as if so many nights had shown it."""
PRIOR_RHO = 0.1


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """[series] each: deviation of a night, correlation of neighbours, and how well known.

    `weekday`: [series, period], what a weekday adds.
    """

    sigma: Floats
    rho: Floats
    degrees: Floats
    weekday: Floats


def median(values: Floats) -> Floats:
    """[series]: the median of what is there; NaN where nothing is."""
    if values.shape[1] == 0:
        return np.full(len(values), np.nan)
    ordered = np.sort(values, axis=1)  # NaN goes last
    count = np.isfinite(values).sum(axis=1)
    rows = np.arange(len(values))
    low = ordered[rows, np.maximum(count - 1, 0) // 2]
    high = ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    return np.asarray((low + high) / 2)


def mean(values: Floats, known: Bools) -> Floats:
    """[series]: mean over the known; 0 where nothing is."""
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.asarray(total / np.maximum(known.sum(axis=1), 1))


def huber(values: Floats, sigma: Floats) -> Floats:
    """[series]: the median, and one step from it with residuals cut at CLIP deviations.

    Nearly as sharp as the mean for normal values, and no night moves it by more than
    CLIP * sigma / n.
    """
    middle = median(values)
    off = values - middle[:, None]
    cut = CLIP * sigma[:, None]
    return middle + mean(np.clip(off, -cut, cut), np.isfinite(off))


def line(values: Floats) -> Floats:
    """[series, nights]: a straight line by the medians of the outer thirds (J. W. Tukey, 1977).

    Flat where a third is empty. It keeps an unnoticed drift out of the noise.
    """
    nights = values.shape[1]
    third = max(nights // 3, 1)
    first, last = median(values[:, :third]), median(values[:, -third:])
    slope = (last - first) / max(nights - third, 1)
    slope = np.where(np.isfinite(slope), slope, 0.0)
    sloped = slope[:, None] * (np.arange(nights) - (nights - 1) / 2)
    middle = median(values - sloped)
    return sloped + np.where(np.isfinite(middle), middle, 0.0)[:, None]


def deviation(off: Floats) -> Floats:
    """[series]: deviation of residuals: their MAD, then the root mean square of the cut ones.

    The MAD alone wastes two thirds of the nights; cut at WILD of it, the mean square is nearly as
    sharp as that of normal values without outliers.
    """
    first = MAD * median(np.abs(off))
    cut = WILD * first[:, None]
    square = mean(np.clip(off, -cut, cut) ** 2, np.isfinite(off))
    sharp = np.sqrt(square / _CUT_MEAN_SQUARE)
    return np.where(np.isfinite(first), np.where(first > 0, sharp, 0.0), 0.0)


def weekdays(off: Floats, phase: Ints, period: int) -> tuple[Floats, Floats]:
    """[series, period]: what each weekday adds, shrunk towards nothing; [series]: its share.

    Each weekday's robust mean is one noisy reading; it counts by the share of the spread between
    weekdays that the noise within them does not explain (W. James and C. Stein, 1961). `phase`:
    each column's weekday.
    """
    series, nights = off.shape
    if period < 2 or nights < 2 * period:
        return np.zeros((series, max(period, 1))), np.zeros(series)
    days = [phase == day for day in range(period)]
    middles = np.stack([median(off[:, day]) for day in days], axis=1)
    known = np.isfinite(off).sum(axis=1)
    sigma = deviation(off - middles[:, phase]) * np.sqrt(known / np.maximum(known - period, 1))
    effects = np.stack([huber(off[:, day], sigma) for day in days], axis=1)
    counts = np.stack([np.isfinite(off[:, day]).sum(axis=1) for day in days], axis=1)
    effects = np.where(counts > 0, effects, 0.0)
    effects -= effects.mean(axis=1, keepdims=True)
    error = (sigma[:, None] ** 2 / np.maximum(counts, 1)).mean(axis=1)
    spread = (effects**2).sum(axis=1) / (period - 1)
    share = np.maximum(spread - error, 0.0) / np.maximum(spread, 1e-300)
    return effects * share[:, None], share


def neighbour_correlation(off: Floats, sigma: Floats) -> Floats:
    """[series]: correlation of neighbouring nights, shrunk, between 0 and 0.8."""
    cut = np.maximum(WILD * sigma[:, None], 1e-300)
    clipped = np.clip(off, -cut, cut)
    pairs = clipped[:, 1:] * clipped[:, :-1]
    known = np.isfinite(pairs)
    count = known.sum(axis=1)
    product = mean(pairs, known) / np.maximum(sigma**2, 1e-300)
    # residuals of a fitted line look a little less alike than the nights are
    product = product + 3.0 / np.maximum(count, 3.0) * (count > 0)
    shrunk = (count * product + PRIOR_NIGHTS * PRIOR_RHO) / (count + PRIOR_NIGHTS)
    return np.clip(shrunk, 0.0, 0.8)


def noise_of(values: Floats, phase: Ints, period: int, least: Floats) -> Noise:
    """Noise of nights at one level but for a drift; `least`: [series], never taken for less."""
    off = values - line(values)
    effects, share = weekdays(off, phase, period)
    off = off - effects[:, phase]
    off = off - median(off)[:, None]
    known = np.isfinite(off).sum(axis=1)
    spent = 2 + max(period - 1, 0) * share
    degrees = np.maximum(0.85 * (known - spent), 2.0)
    wider = np.sqrt(known / np.maximum(known - spent, 1.0))
    sigma = np.maximum(deviation(off) * np.where(known > spent, wider, 1.0), least)
    return Noise(
        sigma=sigma, rho=neighbour_correlation(off, sigma), degrees=degrees, weekday=effects
    )
