"""Shares of prompts: answered, answered right, or as the baseline did. Prompts are the units.

The starts of one engine answer a prompt alike, greedily in any case. Over starts such a share has
no spread at all, and one prompt that tips over at a near-tie would pass for a certain change. So
the two runs' answers to the same prompts are held against each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.analyse.across.effect import NOTHING, Effect
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


class Answers:
    """What a side's runs answered, by figure; their records are looked through once."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self._runs = runs
        self._hits: dict[Key, dict[str | None, dict[str, list[bool]]]] = {}

    def shares(self, key: Key) -> Shares:
        """The share of each prompt's requests that `key.metric` counts.

        Of answers those to first turns alone: a later one's question depends on what was answered.
        """
        whole = key._replace(category=None)
        if whole not in self._hits:
            self._hits[whole] = _by_category(self._judged(whole))
        hits = self._hits[whole].get(key.category, {})
        return {name: sum(own) / len(own) for name, own in hits.items()}

    def _judged(self, key: Key) -> list[_Judged]:
        found: list[_Judged] = []
        for run in self._runs:
            cells = [
                c
                for c in run.cells
                if c.cell.engine == key.engine and plain(c.cell.load) == key.load and c.to_its_end
            ]
            if key.metric == "identical":
                found += [_identical(*both) for both in pairs(cells)]
            else:
                look = _answered if key.metric == "answered" else _right
                found += [look(c) for c in cells if c.cell.variant == key.side]
        return found


_Judged = tuple[list[str], list[str | None], list[bool]]
"""Answers that were judged: prompt, category, and whether it counts."""


def _by_category(parts: Sequence[_Judged]) -> dict[str | None, dict[str, list[bool]]]:
    """Of each category the prompts with their answers; under None all of them."""
    found: dict[str | None, dict[str, list[bool]]] = {None: {}}
    for part in parts:
        for name, category, hit in zip(*part, strict=True):
            found[None].setdefault(name, []).append(hit)
            if category is not None:
                found.setdefault(category, {}).setdefault(name, []).append(hit)
    return found


def _answered(data: CellData) -> _Judged:
    return _told(data.records, data.records.answered)


def _right(data: CellData) -> _Judged:
    correct = data.ok.ints("correct")
    rows = np.flatnonzero(correct.known & (data.ok.ints("turn").values == 0))
    return _told(data.ok.take(rows), correct.values[rows] != 0)


def _identical(base: CellData, cand: CellData) -> _Judged:
    theirs, ours = matched_rows(base.ok, cand.ok, first_turns=True)
    answers = cand.ok.take(ours)
    return _told(answers, ~differ(base.ok.take(theirs), answers))


def _told(answers: RequestTable, hits: Bools) -> _Judged:
    names, categories = (answers.names(name).python() for name in ("prompt_id", "category"))
    return list(names), list(categories), hits.tolist()


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


def paired_shares(a: Floats, b: Floats) -> LogMean:
    """log(sum b / sum a) over prompts: the jackknife on the logarithm, so that it is symmetric.

    Where no prompt changed, the variance would be zero. It is held to be that of one prompt that
    did, 1 / (sum a * sum b): of n prompts that stayed the same no smaller share of change is shown.
    For shares of 0 and 1 the jackknife is close to (n10 + n01) / (n1. n.1), the usual variance of a
    ratio of paired shares. There is no error where a sum would be zero without one prompt.
    """
    n, above, below = len(a), float(b.sum()), float(a.sum())
    if above <= 0 or below <= 0:  # then both have half a prompt more
        above, below = above + NOTHING, below + NOTHING
    mean = math.log(above / below)
    rest_b, rest_a = above - b, below - a
    if n < 2 or (rest_a <= 1e-9).any() or (rest_b <= 1e-9).any():
        return LogMean(mean=mean, error=None, units=n)
    without = np.log(rest_b) - np.log(rest_a)
    variance = (n - 1) / n * float(((without - without.mean()) ** 2).sum())
    least = 1 / (above * below)
    return LogMean(mean=mean, error=math.sqrt(max(variance, least)), units=n)
