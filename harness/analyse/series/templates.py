"""Shapes that a change may have over the last nights, and how surely each is told from noise.

A bank of templates: steps that are 1 to 21 nights old and ramps that began 14 to 42 nights ago.
Each is a contrast between the nights since and the level before; the likeliest over all of them
is the generalised likelihood ratio for a change of unknown time and shape (T. L. Lai, JRSS B 57,
1995, 613: window-limited GLR; D. Siegmund and E. S. Venkatraman, Annals of Statistics 23, 1995,
255), of which E. S. Page's CUSUM (Biometrika 41, 1954, 100) is the case of a known size.
"""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.analyse.series.records import Kind

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

STEPS = (1, 2, 3, 4, 5, 7, 10, 14, 21)
RAMPS = (14, 21, 28, 42)
DECAY = 0.7
"""Autocorrelation falls by so much a night after the first: rho(k) = rho(1) * DECAY^(k - 1)."""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A change that has lasted `nights`, tonight among them: a step, or a straight loss."""

    kind: Kind
    nights: int

    @property
    def weights(self) -> Floats:
        """[nights]: its shape, 1 on the last night."""
        if self.kind == "step":
            return np.ones(self.nights)
        return np.arange(1, self.nights + 1) / self.nights


BANK = (
    *(Template(kind="step", nights=n) for n in STEPS),
    *(Template(kind="drift", nights=n) for n in RAMPS),
)


@cache
def neighbours(nights: int) -> Floats:
    """[nights, nights]: correlation of two nights per unit of rho(1); 0 on the diagonal."""
    apart = np.abs(np.subtract.outer(np.arange(nights), np.arange(nights)))
    return np.where(apart == 0, 0.0, DECAY ** np.maximum(apart - 1, 0))


def spread(weights: Floats, rho: Floats) -> Floats:
    """[series]: variance of a weighted sum of correlated nights of variance 1.

    `weights`: [series, nights], 0 where a night is missing; `rho`: [series], the correlation of
    neighbouring nights.
    """
    own = np.einsum("sn,sn->s", weights, weights)
    cross = np.einsum("sn,sn->s", weights @ neighbours(weights.shape[1]), weights)
    return np.maximum(own + rho * cross, 0.2 * own)


def level_spread(count: Floats, rho: Floats) -> Floats:
    """[series]: variance of the mean of `count` correlated nights of variance 1, for many."""
    n = np.maximum(count, 1.0)
    shorter = np.minimum(n - 1, 1 / (1 - DECAY))
    return (1 + 2 * rho * shorter) / n
