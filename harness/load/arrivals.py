"""When requests are due: absolute offsets from the start, drawn from a seed before the run."""

from __future__ import annotations

import numpy as np


def poisson(
    rate: float, *, seed: int, count: int | None = None, duration_s: float | None = None
) -> list[float]:
    """Offsets in seconds of a Poisson process of `rate` per second, ascending.

    Ends after `count` arrivals, or before `duration_s`; one of the two is given.
    """
    generator = np.random.default_rng(seed)
    if count is not None:
        return np.cumsum(generator.exponential(1.0 / rate, count)).tolist()
    assert duration_s is not None
    offsets: list[float] = []
    now = float(generator.exponential(1.0 / rate))
    while now < duration_s:
        offsets.append(now)
        now += float(generator.exponential(1.0 / rate))
    return offsets
