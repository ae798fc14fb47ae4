"""Counts by prompt as the dossier keeps them: pooled, with intervals whose unit is the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.analyse.ratio import CONFIDENCE, ratio, share
from harness.analyse.statistics import t_quantile
from harness.diagnose.records import Length, Proportion
from harness.measure.metrics import pool
from harness.records import DraftCounts


def length(counts: Sequence[DraftCounts], k: int) -> Length:
    """The acceptance length of each prompt's counts, pooled; k drafts a step."""
    told = [each for each in counts if each.drafts]
    total = pool(told) if told else DraftCounts(drafts=0, drafted=0, accepted=0)
    assert total is not None
    accepted = np.array([each.accepted for each in told], dtype=float)
    drafts = np.array([each.drafts for each in told], dtype=float)
    found = ratio(accepted, drafts, offset=1, most=k + 1)
    return Length(
        counts=total, prompts=len(told), length=found.value, low=found.low, high=found.high
    )


def proportion(hits: Sequence[float], of: Sequence[float]) -> Proportion:
    """Each prompt's hits and trials, pooled."""
    y, x = np.array(hits, dtype=float), np.array(of, dtype=float)
    found = share(y, x)
    return Proportion(hits=int(y.sum()), of=int(x.sum()), low=found.low, high=found.high)


def by_group(
    hits: NDArray[np.bool_], group: NDArray[np.int64], chosen: NDArray[np.bool_] | None = None
) -> Proportion | None:
    """Trials [N] or [N, k], true where they hit, of prompts `group` [N]; None without a trial."""
    if chosen is not None:
        hits, group = hits[chosen], group[chosen]
    if not hits.size:
        return None
    each = 1 if hits.ndim == 1 else hits.shape[1]
    found = hits if hits.ndim == 1 else hits.sum(axis=1)
    y = np.bincount(group, weights=found)
    x = np.bincount(group) * each
    return proportion(y.tolist(), x.tolist())


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """A difference of two ratios paired by prompt; `error`: its standard error, of n prompts."""

    gain: float
    error: float | None = None
    n: int = 0


def paired(mine: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> Paired:
    """sum(y)/sum(x) of `mine` less that of `other`, pairs (y, x) by prompt; 0 without any.

    The variance is that of cluster sampling by linearisation (W. G. Cochran, Sampling Techniques
    (1977), section 6.4), of the two ratios' residuals prompt by prompt: what is common to both
    ways to run a drafter over one prompt cancels.
    """
    some = [(a, b) for a, b in zip(mine, other, strict=True) if a[1] or b[1]]
    if not some:
        return Paired(gain=0.0)
    (ya, xa), (yb, xb) = np.array(some, dtype=float).transpose(1, 2, 0)
    if not xa.sum() or not xb.sum():
        return Paired(gain=0.0)
    ra, rb = ya.sum() / xa.sum(), yb.sum() / xb.sum()
    n = len(xa)
    if n < 2:
        return Paired(gain=float(ra - rb), n=n)
    off = (ya - ra * xa) / xa.sum() - (yb - rb * xb) / xb.sum()
    error = math.sqrt(n / (n - 1) * float(np.square(off).sum()))
    return Paired(gain=float(ra - rb), error=error, n=n)


def paired_gain(
    mine: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]
) -> tuple[float, float | None, float | None]:
    """The gain of `paired`, and its interval by Student's t over the prompts."""
    found = paired(mine, other)
    if found.error is None:
        return found.gain, None, None
    half = t_quantile(0.5 + CONFIDENCE / 2, found.n - 1) * found.error
    return found.gain, found.gain - half, found.gain + half
