"""How often the intervals of a comparison between runs hold a truth that is known.

`python -m harness.analyse.across.simulate` prints the table of `docs/compare.md`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import numpy as np

from harness.analyse.across.effect import apart
from harness.analyse.across.shares import paired_shares
from harness.analyse.simulated import CONFIDENCE, REALISTIC, differences
from harness.analyse.statistics import LogMean, log_mean

SPREAD = 0.01


def paired(rng: np.random.Generator, runs: int, starts: int) -> Iterator[LogMean]:
    """Blocks that pair, with the noise that real machines show; the truth is no difference."""
    for logs in differences(rng, runs, starts, REALISTIC):
        yield log_mean((SPREAD * logs).tolist())


def unpaired(
    rng: np.random.Generator, runs: int, starts: tuple[int, int], wider: float
) -> Iterator[LogMean]:
    """Starts that do not pair; the candidate's spread `wider` times as much."""
    for _ in range(runs):
        a, b = (SPREAD * rng.standard_normal(n) for n in starts)
        yield apart(a.tolist(), (wider * b).tolist())[0]


def prompts(rng: np.random.Generator, runs: int, n: int) -> Iterator[LogMean]:
    """Right answers to the same prompts: 55% in both runs, 7% in either one alone."""
    for _ in range(runs):
        draw = rng.random(n)
        a = (draw < 0.62).astype(np.float64)
        b = ((draw < 0.55) | ((draw >= 0.62) & (draw < 0.69))).astype(np.float64)
        yield paired_shares(a, b)


def covered(found: Iterator[LogMean]) -> float:
    """The share of intervals that hold 1."""
    hits = []
    for told in found:
        low, high = told.interval(CONFIDENCE) or (math.nan, math.nan)
        hits.append(low <= 1 <= high)
    return sum(hits) / len(hits)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5000, help="simulated runs a line")
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    print(f"{asked.runs} simulated comparisons a line: how many 95% intervals hold the truth")
    for starts in (3, 4, 6):
        print(f"{starts} paired starts: {covered(paired(rng, asked.runs, starts)):.1%}")
    for ends, wider in (((3, 3), 1), ((3, 6), 1), ((6, 3), 3), ((4, 4), 3), ((6, 6), 1)):
        told = covered(unpaired(rng, asked.runs, ends, wider))
        which = f", the second spreading {wider} times as much" if wider != 1 else ""
        print(f"{ends[0]} starts against {ends[1]}, unpaired{which}: {told:.1%}")
    for n in (3, 5, 10):
        print(f"{n} runs against 1: {covered(unpaired(rng, asked.runs, (n, 1), 1)):.1%}")
    for n in (60, 300):
        print(f"shares of {n} prompts: {covered(prompts(rng, asked.runs, n)):.1%}")


if __name__ == "__main__":
    main()
