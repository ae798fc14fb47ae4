"""Shares of prompts: right answers, and answers equal to the baseline's. Prompts are the units.

The starts of one engine answer a prompt alike, greedily in any case. Over starts such a share has
no spread at all, and one prompt that tips over at a near-tie would pass for a certain change. So
the two runs' answers to the same prompts are held against each other.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from harness.analyse.across.effect import Effect
from harness.analyse.across.readings import Key, plain
from harness.analyse.bootstrap import Floats
from harness.analyse.data import CellData, RunData, pairs
from harness.analyse.integrity import differ, matched_rows
from harness.analyse.statistics import LogMean
from harness.measure.columns import Bools
from harness.measure.table import RequestTable

INTERVAL = "{} t interval of the jackknife on the log scale"
Shares = dict[str, float]
"""By prompt: of its answers, how many."""


def shares(run: RunData, key: Key) -> Shares:
    """The share of each prompt's answers that `key.metric` counts; of first turns alone."""
    cells = [c for c in run.cells if _of(c, key) and c.to_its_end]
    if key.metric == "identical":
        return _by_prompt([_identical(*both) for both in pairs(cells)], None)
    tables = [c.ok for c in cells if c.cell.variant == key.side]
    return _by_prompt([_right(t) for t in tables], key.category)


def _of(data: CellData, key: Key) -> bool:
    return data.cell.engine == key.engine and plain(data.cell.load) == key.load


class _Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that were judged, and which of them count."""

    answers: RequestTable
    hits: Bools


def _right(table: RequestTable) -> _Judged:
    correct = table.ints("correct")
    rows = np.flatnonzero(correct.known & (table.ints("turn").values == 0))
    return _Judged(answers=table.take(rows), hits=correct.values[rows] != 0)


def _identical(base: CellData, cand: CellData) -> _Judged:
    theirs, ours = matched_rows(base.ok, cand.ok, first_turns=True)
    answers = cand.ok.take(ours)
    return _Judged(answers=answers, hits=~differ(base.ok.take(theirs), answers))


def _by_prompt(parts: list[_Judged], category: str | None) -> Shares:
    hits: dict[str, list[bool]] = {}
    for part in parts:
        names = part.answers.names("prompt_id").python()
        of = part.answers.names("category").python() if category is not None else names
        for name, group, hit in zip(names, of, part.hits.tolist(), strict=True):
            if category is None or group == category:
                hits.setdefault(name, []).append(hit)
    return {name: sum(own) / len(own) for name, own in hits.items()}


def share_effect(reference: Shares, candidate: Shares) -> Effect | None:
    """Over the prompts that both answered; None where there is none."""
    both = [name for name in reference if name in candidate]
    if not both:
        return None
    a = np.array([reference[name] for name in both])
    b = np.array([candidate[name] for name in both])
    alone = len(reference) + len(candidate) - 2 * len(both)
    return Effect(
        found=paired_shares(a, b),
        reference=float(a.mean()),
        candidate=float(b.mean()),
        paired=True,
        units=(len(both), len(both)),
        method=f"{len(both)} prompts that both answered, {INTERVAL}",
        note=f"{alone} prompts that one of them did not answer are left out" if alone else None,
    )


def paired_shares(a: Floats, b: Floats) -> LogMean | None:
    """log(sum b / sum a) over prompts: the jackknife on the logarithm, so that it is symmetric.

    Where no prompt changed, the variance would be zero. It is held to be that of one prompt that
    did, 1 / (sum a * sum b): of n prompts that stayed the same no smaller share of change is shown.
    For shares of 0 and 1 the jackknife is close to (n10 + n01) / (n1. n.1), the usual variance of a
    ratio of paired shares. None where a sum is zero, or would be without one prompt.
    """
    n, above, below = len(a), float(b.sum()), float(a.sum())
    if above <= 0 or below <= 0:
        return None
    mean = math.log(above / below)
    rest_b, rest_a = above - b, below - a
    if n < 2 or (rest_a <= 1e-9).any() or (rest_b <= 1e-9).any():
        return LogMean(mean=mean, error=None, units=n)
    without = np.log(rest_b) - np.log(rest_a)
    variance = (n - 1) / n * float(((without - without.mean()) ** 2).sum())
    least = 1 / (above * below)
    return LogMean(mean=mean, error=math.sqrt(max(variance, least)), units=n)
