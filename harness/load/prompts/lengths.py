"""Lengths in tokens, drawn from the plan's distributions."""

from __future__ import annotations

import math
import random

from harness.errors import UsageError
from harness.plan.schema import Length


def draw_lengths(wanted: int | Length, count: int, rng: random.Random) -> list[int]:
    """`count` lengths. Those outside of `min` and `max` are set to the nearer of them.

    A lognormal's `mean` and `spread` are those of the lengths, not of their logarithms.
    """
    if isinstance(wanted, int):
        return [wanted] * count
    if wanted.dist == "constant":
        return [_within(wanted.mean, wanted)] * count
    if wanted.dist == "uniform":
        low, high = wanted.mean - wanted.spread, wanted.mean + wanted.spread
        return [_within(rng.uniform(low, high), wanted) for _ in range(count)]
    if wanted.dist == "normal":
        return [_within(rng.gauss(wanted.mean, wanted.spread), wanted) for _ in range(count)]
    variance = math.log1p((wanted.spread / wanted.mean) ** 2)
    mu = math.log(wanted.mean) - variance / 2
    drawn = (rng.lognormvariate(mu, math.sqrt(variance)) for _ in range(count))
    return [_within(value, wanted) for value in drawn]


def check_length(wanted: int | Length | None, key: str) -> None:
    """Raise `UsageError` where a distribution's bounds exclude each other."""
    if not isinstance(wanted, Length):
        return
    most = math.inf if wanted.max is None else wanted.max
    if most < wanted.min:
        raise UsageError(f"{key}: max {wanted.max} is less than min {wanted.min}")
    if not wanted.min <= wanted.mean <= most:
        bounds = f"from min {wanted.min}" + ("" if wanted.max is None else f" to max {wanted.max}")
        raise UsageError(f"{key}: mean {wanted.mean:g} is not {bounds}")


def longest(wanted: int | Length) -> int | None:
    """The longest that can be drawn; None where nothing bounds it."""
    if isinstance(wanted, int):
        return wanted
    if wanted.dist in ("normal", "lognormal"):
        return wanted.max
    top = wanted.mean + (wanted.spread if wanted.dist == "uniform" else 0)
    return _within(top, wanted)


def _within(value: float, wanted: Length) -> int:
    # Beyond any bound of the schema: an infinity of a wide lognormal must not meet round().
    whole = round(min(value, 1e9))
    most = wanted.max if wanted.max is not None else 10_000_000
    return max(wanted.min, min(whole, most))
