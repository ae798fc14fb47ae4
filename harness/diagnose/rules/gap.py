"""Is there a gap at all, and where it is lost: the waterfall from what could be to what was."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import msgspec

from harness.diagnose.records import Dossier, Length, Share
from harness.diagnose.rules import wanted
from harness.diagnose.rules.measures import (
    USUAL,
    critical,
    finite,
    length,
    length_error,
    loss_error,
    lost,
    rate,
    shorter,
    shorter_on_same,
)
from harness.records import DraftCounts

GREEDY = 1e-5
BY_DRAFTS = 0.95
"""Drafts of which so many are the drafter's likeliest token are no sample of it."""

Name = Literal[
    "trained", "vocabulary", "expected", "states", "execution", "verification", "observed"
]
ON_TRACE: frozenset[Name] = frozenset({"states", "execution", "verification", "observed"})
"""Levels that are all over the text which the engine wrote."""
OF_CHECKPOINT: frozenset[Name] = frozenset({"trained", "vocabulary", "expected"})
"""Levels that are all over the text which the reference engine wrote."""
TITLES: dict[Name, str] = {
    "trained": "read as it was trained",
    "vocabulary": "with every token in the draft vocabulary",
    "expected": "expected of the checkpoint",
    "states": "on the states it was handed",
    "execution": "with the drafts the engine proposed",
    "verification": "as the trace counts it",
    "observed": "observed",
}


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the waterfall: the acceptance up to here, and what the next one loses."""

    name: Name
    acceptance: Length


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Observed beside expected; where the counters are wrong, what the trace counts.

    `there` None: it cannot be told.
    """

    there: bool | None
    expected: Length | None
    observed: Length | None
    share: float | None
    """Of the expected accepted drafts, how many are missing; negative where there are more."""


def sampled(dossier: Dossier) -> bool:
    """Whether the tokens were drawn: then a greedy walk over the text predicts nothing."""
    observed = dossier.observed
    if observed is not None:
        return observed.temperature > GREEDY
    return dossier.subject.temperature > GREEDY


def expectation(dossier: Dossier) -> Length | None:
    """What the declared drafter should be accepted as it was asked: by its way of drafting."""
    if not sampled(dossier):
        return None if dossier.expected is None else dossier.expected.acceptance
    return implied(dossier)


def implied(dossier: Dossier) -> Length | None:
    """What the two distributions imply for drafts as this engine makes them; None: not known."""
    found = dossier.sampling
    if found is None:
        return None
    value = finite(found.implied_greedy if drafts_greedily(dossier) else found.implied_sampled)
    if value is None:
        value = finite(found.implied_sampled) or finite(found.implied_greedy)
    if value is None:
        return None
    counts = DraftCounts(drafts=0, accepted=0)
    low, high = finite(found.implied_low), finite(found.implied_high)
    if low is None or high is None or not low <= value <= high:
        error = length_error(found.observed) or 0.1  # the same text, looked at once more
        low, high = value - USUAL * error, value + USUAL * error
    return Length(counts=counts, prompts=found.observed.prompts, length=value, low=low, high=high)


def drafts_greedily(dossier: Dossier) -> bool:
    """Whether this engine's drafts are the drafter's likeliest tokens."""
    found = dossier.sampling
    if found is None or found.drafts_are_argmax is None or found.drafts_are_argmax.of <= 0:
        return True  # what engines do by default
    return found.drafts_are_argmax.hits / found.drafts_are_argmax.of >= BY_DRAFTS


def observed_of(dossier: Dossier) -> Length | None:
    """What was observed: at a temperature, on the text that the expectation is of."""
    if sampled(dossier) and dossier.sampling is not None:
        return dossier.sampling.observed
    return None if dossier.observed is None else dossier.observed.acceptance


def gap(dossier: Dossier) -> Gap:
    """Whether surely fewer drafts are accepted than the drafter's accuracy predicts."""
    wanted_, seen = at_one_k(expectation(dossier), by_trace(dossier) or observed_of(dossier))
    share = lost(seen, wanted_)
    there: bool | None = None
    if share is not None and wanted_ is not None and seen is not None:
        same = same_text(dossier) and shorter_on_same(seen, wanted_)
        if same or shorter(seen, wanted_):
            there = True
        elif _precise(wanted_, seen):
            there = False
    return Gap(there=there, expected=wanted_, observed=seen, share=share)


def same_text(dossier: Dossier) -> bool:
    """Whether the engine's answers are mostly the reference's own, and all is over one text."""
    return not sampled(dossier) and answers_alike(dossier) is True


def answers_alike(dossier: Dossier) -> bool | None:
    """Whether the engine's greedy answers are mostly the reference's own; None: not compared."""
    found = None if dossier.observed is None else rate(dossier.observed.identical)
    return None if found is None else found >= 0.8


def at_one_k(one: Length | None, other: Length | None) -> tuple[Length | None, Length | None]:
    """Both at the smaller k: a chain's first drafts are the same whatever follows them."""
    if one is None or other is None:
        return one, other
    depths = [len(each.counts.per_position or ()) for each in (one, other)]
    if 0 in depths or depths[0] == depths[1]:
        return one, other
    k = min(depths)
    return _cut(one, k), _cut(other, k)


def _cut(found: Length, k: int) -> Length:
    """The same acceptance with the first `k` drafts alone; its interval shrinks with it."""
    positions = found.counts.per_position or ()
    whole = length(found)
    if len(positions) <= k or found.counts.drafts <= 0 or whole is None or whole <= 1:
        return found
    counts = msgspec.structs.replace(
        found.counts, per_position=positions[:k], accepted=sum(positions[:k]), drafted=None
    )
    value = 1 + sum(positions[:k]) / found.counts.drafts
    shrunk = (value - 1) / (whole - 1)
    low, high = (None if e is None else 1 + (e - 1) * shrunk for e in (found.low, found.high))
    return Length(counts=counts, prompts=found.prompts, length=value, low=low, high=high)


def _precise(expected: Length, seen: Length) -> bool:
    """Whether a loss of half of the drafts would have been seen."""
    one, other = length_error(expected), length_error(seen)
    accepted = (length(expected) or 1.0) - 1
    if one is None or other is None:
        return False
    return critical() * (one * one + other * other) ** 0.5 < max(0.5 * accepted, 0.1)


def levels(dossier: Dossier) -> list[Level]:
    """Every acceptance that is known, from what could be to what was."""
    found: list[tuple[Name, Length | None]] = []
    if not sampled(dossier):
        better = wanted.better(dossier)
        expected, replay = dossier.expected, dossier.replay
        found = [
            ("trained", better[0].acceptance if better else None),
            ("vocabulary", expected.without_vocabulary_loss if expected and not better else None),
            ("expected", expected.acceptance if expected else None),
            ("states", replay.on_engine_states if replay else None),
            ("execution", replay.proposals if replay else None),
            ("verification", by_trace(dossier)),
        ]
    else:
        found = [("expected", expectation(dossier))]
    found.append(("observed", observed_of(dossier)))
    return [
        Level(name=name, acceptance=acceptance)
        for name, acceptance in found
        if acceptance is not None and length(acceptance) is not None
    ]


def by_trace(dossier: Dossier) -> Length | None:
    """The trace's own count, where the engine's counters say something else."""
    observed = dossier.observed
    if observed is None or observed.counted_otherwise is None:
        return None
    counts = observed.counted_otherwise
    if counts.drafts < 20:
        return None
    return Length(counts=counts, prompts=observed.acceptance.prompts, length=None)


def waterfall(dossier: Dossier) -> tuple[Share, ...]:
    """The levels with what each loses of the one before; what no level stands between is pooled."""
    found: list[Share] = []
    before: Level | None = None
    for level in levels(dossier):
        now = length(level.acceptance) or 1.0
        lost_here = None if before is None else (length(before.acceptance) or 1.0) - now
        share = Share(
            name=TITLES[level.name],
            length=now,
            lost=lost_here,
            error=None if before is None else _error(dossier, before, level),
            steps=level.acceptance.counts.drafts or None,
        )
        found.append(share)
        before = level
    return tuple(found)


def _error(dossier: Dossier, before: Level, after: Level) -> float | None:
    """Of what is lost between two levels; None: see `Share`."""
    both = {before.name, after.name}
    if both <= OF_CHECKPOINT:
        return None
    same = same_text(dossier) or both <= ON_TRACE
    return loss_error(after.acceptance, before.acceptance, same=same)


def losses(dossier: Dossier) -> dict[Name, float]:
    """The levels that surely lose drafts against the one before, with the share of them lost.

    `trained` and `vocabulary` are no stages of serving: the loss behind them is the checkpoint's.
    """
    found: dict[Name, float] = {}
    told = levels(dossier)
    for before, after in pairwise(told):
        more, less = at_one_k(before.acceptance, after.acceptance)
        share = lost(less, more)
        same = same_text(dossier) or {before.name, after.name} <= ON_TRACE
        test = shorter_on_same if same else shorter
        if share is not None and test(less, more):
            found[after.name] = share
    return found
