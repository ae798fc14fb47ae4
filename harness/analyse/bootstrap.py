"""The hierarchical bootstrap: starts at the top, the requests of each start below.

A draw takes as many starts as there were, with replacement, and draws each one's requests anew;
the two variants' answers to the same prompt stay together. Each draw is divided by its own standard
error (bootstrap-t), so that the noise of the requests, which a start's value holds already, is not
counted twice. `docs/statistics.md` says why it is used from `BOOTSTRAP_STARTS` on.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.analyse.statistics import LogMean, log_mean
from harness.measure.metrics import e2el_s, tpot_s, ttft_s
from harness.measure.table import RequestTable
from harness.records import LoadPoint, RequestRecord

BOOTSTRAP_STARTS = 20
RESAMPLES = 1999
BATCHES = 40
"""Requests are drawn in batches of neighbours: what lasts longer than a request stays together."""

Floats = NDArray[np.float64]


class PairSums(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of blocks: its log ratio, and its requests in batches.

    `batches`: [batch, 4], sums of the candidate's numerator and denominator and the baseline's.
    """

    log_ratio: float
    batches: Floats


def figures(records: Sequence[RequestRecord]) -> Floats:
    """[request, 5]: index, TTFT, TPOT and E2E latency in seconds, tokens; NaN where undefined."""
    ok = RequestTable.of(records).ok
    tokens = ok.ints("output_tokens")
    counted = np.where(tokens.known, tokens.values, np.nan)
    index = ok.ints("index").values.astype(float)
    return np.column_stack([index, ttft_s(ok), tpot_s(ok), e2el_s(ok), counted])


def parts_of(figure: Floats, metric: str, load: LoadPoint) -> tuple[Floats, Floats]:
    """Each request's numerator and denominator: a block's value is the ratio of their sums.

    The throughput of a closed loop is its concurrency times tokens over time under way.
    """
    one = np.ones(len(figure))
    if metric == "output_tokens_per_s":
        return figure[:, 4], figure[:, 3] if load.mode == "closed" else one
    return figure[:, {"ttft_s": 1, "tpot_s": 2, "e2el_s": 3}[metric]], one


def pair_sums(
    log_ratio: float, baseline: Floats, candidate: Floats, *, metric: str, load: LoadPoint
) -> PairSums:
    """The requests that both blocks answered, in `BATCHES` batches of neighbours."""
    shared, at_b, at_c = np.intersect1d(baseline[:, 0], candidate[:, 0], return_indices=True)
    columns = np.column_stack(
        [
            *parts_of(candidate[at_c], metric, load),
            *parts_of(baseline[at_b], metric, load),
        ]
    ).reshape(len(shared), 4)
    columns = columns[np.isfinite(columns).all(axis=1) & (columns > 0).all(axis=1)]
    if not len(columns):
        return PairSums(log_ratio=log_ratio, batches=np.zeros((0, 4)))
    groups = np.array_split(columns, min(BATCHES, len(columns)))
    return PairSums(log_ratio=log_ratio, batches=np.array([g.sum(axis=0) for g in groups]))


def hierarchical(
    starts: Sequence[Sequence[PairSums]], *, name: str, resamples: int = RESAMPLES
) -> LogMean:
    """The mean log ratio over starts with its bootstrap reference; `name` seeds the draws."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = np.array([np.mean([p.log_ratio for p in own]) for own in starts])
    plain = log_mean(values.tolist())
    if plain.error is None:
        return plain
    n = len(values)
    chosen = rng.integers(0, n, (resamples, n))
    drawn = values[chosen]
    for i, own in enumerate(starts):
        slots = chosen == i
        drawn[slots] += np.mean(
            [_redrawn(rng, pair.batches, int(slots.sum())) for pair in own], axis=0
        )
    errors = drawn.std(axis=1, ddof=1) / np.sqrt(n)
    off = np.abs(drawn.mean(axis=1) - plain.mean)
    reference = np.divide(off, errors, out=np.where(off > 0, np.inf, 0.0), where=errors > 0)
    reference.sort()
    return LogMean(mean=plain.mean, error=plain.error, units=n, reference=tuple(reference.tolist()))


def _redrawn(rng: np.random.Generator, batches: Floats, times: int) -> Floats:
    """How far a block's log ratio moves when its batches are drawn anew, `times` times over."""
    size = len(batches)
    if size < 2 or times == 0:
        return np.zeros(times)
    counts = rng.multinomial(size, np.full(size, 1 / size), times)
    sums = np.log(counts @ batches) - np.log(batches.sum(axis=0))
    moved: Floats = sums[:, 0] - sums[:, 1] - sums[:, 2] + sums[:, 3]
    return moved
