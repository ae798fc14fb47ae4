"""E-divisive with a t-test, as in Hunter, now Apache Otava: what the watch is measured against.

D. S. Matteson and N. A. James, JASA 109 (2014), 334: the split of a window that maximises the
energy distance between its two sides. Its significance by Student's t instead of permutations, and
windows of 50: M. Fleming, P. Kołaczkowski, I. Kumar, S. Das, S. McCarthy, P. Pattabhiraman and H.
Ingo, Hunter: Using change point detection to hunt for performance regressions, ICPE 2023.
"""

from __future__ import annotations

import numpy as np
from scipy.special import stdtr

from harness.analyse.series.templates import Bools, Floats, Ints

WINDOW = 50
P_VALUE = 0.001
CHUNK = 200
"""Series whose distances are held at once."""


def energy(values: Floats, known: Bools) -> Floats:
    """[series, nights - 1]: the scaled energy distance between nights before and after each split.

    m n / (m + n) times twice the mean distance across, less the mean distance within each side.
    NaN nights are left out; -1 where a side is empty.
    """
    there = np.where(known, values, 0.0)
    apart = np.abs(there[:, :, None] - there[:, None, :])
    apart *= known[:, :, None] & known[:, None, :]
    total = apart.cumsum(axis=1).cumsum(axis=2)
    nights = values.shape[1]
    k = np.arange(nights - 1)
    left, edge, whole = total[:, k, k], total[:, k, -1], total[:, -1, -1][:, None]
    across, right = edge - left, whole - 2 * edge + left
    m = known.cumsum(axis=1)[:, :-1].astype(float)
    n = known.sum(axis=1)[:, None] - m
    within = left / np.maximum(m * (m - 1), 1) + right / np.maximum(n * (n - 1), 1)
    both = np.maximum(m * n, 1)
    found = both / np.maximum(m + n, 1) * (2 * across / both - within)
    return np.where((m > 0) & (n > 0), found, -1.0)


def split(values: Floats, known: Bools) -> tuple[Ints, Floats, Floats]:
    """[series] each: first night after the best split, its t-test's p-value, and the change."""
    at = energy(values, known).argmax(axis=1) + 1
    after = (np.arange(values.shape[1]) >= at[:, None]) & known
    before = known & ~after
    sides = [_moments(values, side) for side in (before, after)]
    (m, mean_m, square_m), (n, mean_n, square_n) = sides
    degrees = np.maximum(m + n - 2, 1)
    error = np.sqrt((square_m + square_n) / degrees * (1 / np.maximum(m, 1) + 1 / np.maximum(n, 1)))
    usable = (m > 0) & (n > 0) & (m + n > 2)
    t = np.abs(mean_n - mean_m) / np.maximum(error, 1e-300)
    p = np.where(usable, 2 * stdtr(degrees, -t), 1.0)
    return at, p, np.where(usable, mean_n - mean_m, 0.0)


def _moments(values: Floats, own: Bools) -> tuple[Floats, Floats, Floats]:
    """Count, mean and sum of squares around it."""
    n = own.sum(axis=1).astype(float)
    mean = np.where(own, values, 0.0).sum(axis=1) / np.maximum(n, 1)
    return n, mean, np.where(own, (values - mean[:, None]) ** 2, 0.0).sum(axis=1)


def alarms(values: Floats, learn: int) -> Bools:
    """[series, nights]: a loss is found on that night; the window then begins at the change."""
    found = np.zeros(values.shape, dtype=bool)
    for low in range(0, len(values), CHUNK):
        part = values[low : low + CHUNK]
        start = np.zeros(len(part), dtype=np.int64)
        for night in range(learn, values.shape[1]):
            first = max(0, night + 1 - WINDOW)
            window = part[:, first : night + 1]
            known = np.isfinite(window) & (np.arange(first, night + 1) >= start[:, None])
            at, p, change = split(np.where(known, window, 0.0), known)
            new = (p < P_VALUE) & np.isfinite(part[:, night])
            found[low : low + CHUNK, night] = new & (change < 0)
            start = np.where(new, first + at, start)
    return found
