"""Arrivals drawn before a run, beside a loop that draws them one by one."""

from __future__ import annotations

import random
from typing import Any

from streams import side_by_side

from harness.load.schedule.arrivals import poisson

COUNT = 100_000


def one_by_one() -> list[float]:
    """The same number of arrivals from the standard library's generator."""
    generator = random.Random(1)
    now, at = 0.0, []
    for _ in range(COUNT):
        now += generator.expovariate(100.0)
        at.append(now)
    return at


def test_poisson_arrivals(benchmark: Any) -> None:
    offsets = benchmark(lambda: poisson(100.0, seed=1, count=COUNT))
    assert len(offsets) == COUNT
    ratio = side_by_side(lambda: poisson(100.0, seed=1, count=COUNT), one_by_one, rounds=5)
    benchmark.extra_info["over a loop"] = round(ratio, 3)
    assert ratio <= 1.0


def test_poisson_arrivals_of_a_duration(benchmark: Any) -> None:
    offsets = benchmark(lambda: poisson(1000.0, seed=1, duration_s=100.0))
    assert abs(len(offsets) - COUNT) < 5 * COUNT**0.5
    assert offsets[-1] < 100.0
