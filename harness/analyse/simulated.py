"""Runs whose truth is known, drawn with the noise that real machines show.

Values are logarithms; noise is relative to what differs from start to start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from harness.analyse.bootstrap import Floats, PairSums, hierarchical
from harness.analyse.compare import PRIMARY, Measured, decided
from harness.analyse.estimates import pooled_ratio
from harness.analyse.statistics import LogMean, log_mean, t_quantile, verdict
from harness.findings import Comparison, Verdict
from harness.records import LoadPoint

CONFIDENCE = 0.95
FIRST, MOST = 3, 20
PRECISION = math.log(1.03)
QUIET, NOISY = 0.005, 0.03
"""Of what differs from pair to pair: the range of noise that early stopping is tried over."""

SURE = 0.95
"""The share of runs in which the fixed design has to be precise enough."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """What moves a block, in units of what differs from start to start (normal, deviation 1).

    `slow`: what passes slowly over neighbouring starts, an AR(1) process of a deviation up to so
    much and a correlation up to `correlation`; `drift`: deviation of the change from the first
    start to the last; `outliers`: the share of starts that are 3 to 8 deviations slower.
    """

    slow: float = 1.0
    correlation: float = 0.8
    drift: float = 1.0
    outliers: float = 0.02


REALISTIC = Noise()
PLAIN = Noise(slow=0, correlation=0, drift=0, outliers=0)


def differences(rng: np.random.Generator, runs: int, pairs: int, noise: Noise) -> Floats:
    """[run, pair]: log ratios of runs in which speculation changes nothing, starts in order ABBA.

    Divided by the square root of 2: without further noise their deviation is 1.
    """
    starts = 2 * pairs
    value = rng.standard_normal((runs, starts))
    if noise.slow:
        size = noise.slow * rng.random((runs, 1))
        near = noise.correlation * rng.random(runs)
        shocks = rng.standard_normal((runs, starts))
        for k in range(1, starts):
            shocks[:, k] = near * shocks[:, k - 1] + np.sqrt(1 - near**2) * shocks[:, k]
        value += size * shocks
    if noise.drift:
        value += noise.drift * rng.standard_normal((runs, 1)) * np.linspace(-0.5, 0.5, starts)
    if noise.outliers:
        hit = rng.random((runs, starts)) < noise.outliers
        value -= hit * rng.uniform(3, 8, (runs, starts))
    first, second = value[:, 0::2], value[:, 1::2]
    turn = np.where(np.arange(pairs) % 2 == 0, 1.0, -1.0)
    return turn * (second - first) / math.sqrt(2)


def same_against_same(rng: np.random.Generator, runs: int, pairs: int, noise: Noise) -> int:
    """How many of `runs` without any difference are called better or worse, whatever the size."""
    called = 0
    for logs in differences(rng, runs, pairs, noise):
        found = log_mean(logs.tolist())
        low, high = found.interval(CONFIDENCE) or (None, None)
        ratio = math.exp(found.mean)
        called += verdict(ratio, low, high, better="higher", min_effect=1e-9) in ("better", "worse")
    return called


def apart(logs: Floats) -> int:
    """How many runs' t intervals leave zero out; many at once, by the same formula."""
    pairs = logs.shape[1]
    quantile = t_quantile(0.5 + CONFIDENCE / 2, pairs - 1)
    half = quantile * logs.std(axis=1, ddof=1) / math.sqrt(pairs)
    return int((np.abs(logs.mean(axis=1)) > half).sum())


def percentile_misses(rng: np.random.Generator, runs: int, pairs: int, noise: Noise) -> int:
    """How often the plain bootstrap's percentiles over pairs leave the truth out."""
    missed = 0
    for logs in differences(rng, runs, pairs, noise):
        means = logs[rng.integers(0, pairs, (400, pairs))].mean(axis=1)
        low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        missed += not low <= 0 <= high
    return missed


def hierarchical_misses(
    rng: np.random.Generator, runs: int, pairs: int, requests: float, resamples: int = 399
) -> int:
    """How often the hierarchical bootstrap-t leaves the truth out.

    `requests`: deviation of a block's value that its 20 batches of requests bring, in units of
    what differs from start to start, here 1%.
    """
    scale, batches = 0.01, 20
    missed = 0
    for run, logs in enumerate(differences(rng, runs, pairs, REALISTIC)):
        sums = np.exp(
            rng.standard_normal((pairs, batches, 4)) * scale * requests * math.sqrt(batches)
        )
        sums[:, :, 1::2] = 1.0
        of = np.log(sums.sum(axis=1))
        blocks = scale * math.sqrt(2) * logs + of[:, 0] - of[:, 2]
        starts = [
            [PairSums(log_ratio=float(value), batches=own)]
            for value, own in zip(blocks, sums, strict=True)
        ]
        low, high = hierarchical(starts, name=str(run), resamples=resamples).interval(
            CONFIDENCE
        ) or (0.0, math.inf)
        missed += not low <= 1 <= high
    return missed


def any_wrong(
    rng: np.random.Generator,
    runs: int,
    truth: Sequence[float],
    min_effect: float,
    *,
    corrected: bool,
) -> int:
    """In how many runs of several loads at least one verdict is wrong, over three to six pairs.

    `truth`: each load's log ratio. Half of the noise is common to all loads. Wrong is a difference
    where there is none, `same` where it is `min_effect` or more, and the wrong side of 1.
    """
    wrong = 0
    for _ in range(runs):
        pairs = int(rng.integers(3, 7))
        noise = differences(rng, len(truth) + 1, pairs, REALISTIC)
        found = [
            _measured(log_mean((0.01 * (noise[0] + own) + t).tolist()), min_effect)
            for own, t in zip(noise[1:], truth, strict=True)
        ]
        told = decided(found) if corrected else [decided([m])[0] for m in found]
        wrong += any(_is_wrong(c.verdict, t, min_effect) for c, t in zip(told, truth, strict=True))
    return wrong


def _is_wrong(told: Verdict, truth: float, min_effect: float) -> bool:
    if truth == 0:
        return told in ("better", "worse")
    far = abs(truth) >= math.log1p(min_effect)
    return told == ("worse" if truth > 0 else "better") or (far and told == "same")


def _measured(found: LogMean, min_effect: float) -> Measured:
    """A throughput comparison as a run would have it."""
    comparison = Comparison(
        metric=PRIMARY,
        engine="",
        load=LoadPoint(mode="closed"),
        baseline=None,
        candidate=None,
        ratio=math.exp(found.mean),
        ci_low=None,
        ci_high=None,
        pairs=found.units,
        method="",
        verdict="undecided",
        p_value=found.p_value(),
    )
    return Measured(
        comparison=comparison,
        found=found,
        alpha=1 - CONFIDENCE,
        min_effect=min_effect,
        primary=True,
        withheld=False,
    )


def power(
    rng: np.random.Generator, runs: int, pairs: int, noise: float, min_effect: float
) -> tuple[int, int]:
    """How many runs with 3% more are found to differ, and how many are called better."""
    logs = noise * rng.standard_normal((runs, pairs)) + math.log(1.03)
    mean = logs.mean(axis=1)
    half = t_quantile(0.5 + CONFIDENCE / 2, pairs - 1) * logs.std(axis=1, ddof=1) / math.sqrt(pairs)
    seen = mean - half > 0
    return int(seen.sum()), int((seen & (np.exp(mean) >= 1 + min_effect)).sum())


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that stopped as soon as they were precise: where, and whether the interval held."""

    pairs: Floats
    covered: Floats
    narrow: Floats


def stop_early(logs: Floats, *, confidence: float, limit: int = MOST) -> Stopped:
    """Stop each run (a row, in units of the wanted half-width) at its first narrow interval."""
    runs, most = logs.shape
    n = np.arange(1, most + 1)
    mean = np.cumsum(logs, axis=1) / n
    variance = (np.cumsum(logs**2, axis=1) - n * mean**2) / np.maximum(n - 1, 1)
    quantile = np.array([math.inf, *(t_quantile(0.5 + confidence / 2, k) for k in range(1, most))])
    half = quantile * np.sqrt(np.maximum(variance, 1e-12) / n)
    ends = half <= 1
    ends[:, : FIRST - 1] = False
    ends[:, limit - 1 :] = True
    at, rows = ends.argmax(axis=1), np.arange(runs)
    return Stopped(
        pairs=at + 1.0,
        covered=(np.abs(mean[rows, at]) <= half[rows, at]) * 1.0,
        narrow=(half[rows, at] <= 1) * 1.0,
    )


def fixed_pairs(noise: float, share: float) -> int:
    """The fewest pairs whose interval is narrow enough in such a share of runs.

    `noise` in units of the wanted half-width. By the chi-squared distribution of the variance.
    """
    from scipy.special import chdtr

    n = 2
    while True:
        most = math.sqrt(n) / (t_quantile(0.5 + CONFIDENCE / 2, n - 1) * noise)
        if chdtr(n - 1, (n - 1) * most**2) >= share:
            return n
        n += 1


def acceptance_misses(
    rng: np.random.Generator, runs: int, units: int, *, sizes: float, between: float
) -> int:
    """How often the interval of a pooled acceptance, 3 drafts of 0.5 each, leaves 1.5 out.

    `sizes`: spread of the units' drafts, on the log scale; `between`: of their acceptance rates.
    """
    missed = 0
    for _ in range(runs):
        drafts = rng.lognormal(5, sizes, units).round() + 1
        rates = np.clip(0.5 + between * rng.standard_normal(units), 0.05, 0.95)
        accepted = rng.binomial((3 * drafts).astype(int), rates)
        pairs = zip(accepted.tolist(), drafts.tolist(), strict=True)
        ratio, half = pooled_ratio(list(pairs), CONFIDENCE) or (0.0, None)
        missed += half is None or abs(ratio - 1.5) > half
    return missed
