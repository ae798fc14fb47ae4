"""From the evidence to a verdict: which cause, how surely, what it costs and what to do."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from harness.diagnose.causes import CAUSES, NONE, UNKNOWN, kin
from harness.diagnose.records import Diagnosis, Dossier, Point, Ranked, Strength
from harness.diagnose.remedies import OWN_PROMPTS, asked_builtin, details_of, remedy_of
from harness.diagnose.rules import gap, states, training, verification, wanted
from harness.diagnose.rules.located import (
    located,
    looked_at,
    not_made,
    seen_enough,
    seen_plenty,
    troubled,
)
from harness.diagnose.rules.points import points
from harness.diagnose.rules.weights import GOOD, STRONG
from harness.diagnose.sentences import sentence

WITH_FIX = "write the corrected copy with --fix, and diagnose it"
CERTAIN, LIKELY = 5.0, 3.0
"""Scores: the logarithm of the odds; 150 to 1, 20 to 1."""
AHEAD = 0.4
"""A cause that leads the next by less is not named: both are told."""
MEASURED_FROM = GOOD
"""An experiment must weigh so much for a cause to be named: reading files alone names none."""


def conclude(dossier: Dossier) -> Diagnosis:
    """The verdict on what is known so far; never raises, whatever is missing or contradictory."""
    found = points(dossier)
    ranked = rank(dossier, found)
    cause = _cause(dossier, ranked, found)
    wrong = cause == UNKNOWN and troubled(dossier, found)  # else too little was seen
    stage = located(dossier) if wrong else None
    return Diagnosis(
        verdict=sentence(dossier, cause, stage, ranked),
        cause=cause,
        stage=stage,
        collapse=collapsed(dossier),
        ranked=ranked,
        waterfall=gap.waterfall(dossier),
        next_experiments=_next(dossier, cause, ranked),
    )


def rank(dossier: Dossier, found: Sequence[Point]) -> tuple[Ranked, ...]:
    """Every cause that any evidence bears on, the likeliest first."""
    of_cause: dict[str, list[Point]] = defaultdict(list)
    for each in found:
        of_cause[each.cause].append(each)
    ranked = [_ranked(dossier, cause, own) for cause, own in of_cause.items()]
    return tuple(sorted(ranked, key=lambda r: (-r.score, r.cause)))


def _ranked(dossier: Dossier, cause: str, found: list[Point]) -> Ranked:
    told = CAUSES[cause]
    score = math.fsum([told.prior, *(p.weight for p in found)])
    strength = _strength(score)
    details: dict[str, str] = {}
    remedy = told.remedy
    if strength != "excluded":  # of the others nobody asks for an exact change
        details = details_of(dossier, cause)
        remedy = remedy_of(dossier, cause, details)
    by_weight = sorted(found, key=lambda p: (-abs(p.weight), p.says))
    return Ranked(
        cause=cause,
        title=told.title,
        strength=strength,
        score=score,
        evidence_for=tuple(dict.fromkeys(p.says for p in by_weight if p.weight > 0)),
        evidence_against=tuple(dict.fromkeys(p.says for p in by_weight if p.weight < 0)),
        undecided=tuple(dict.fromkeys(p.says for p in by_weight if p.weight == 0)),
        settles=told.settles or None,
        remedy=remedy,
        details=details,
    )


def _strength(score: float) -> Strength:
    if score >= CERTAIN:
        return "certain"
    if score >= LIKELY:
        return "likely"
    return "possible" if score > -LIKELY / 2 else "excluded"


def same_class(one: str, other: str) -> bool:
    """Whether no experiment tells the two causes apart from outside."""
    return one == other or other in kin(one)


def _cause(dossier: Dossier, ranked: Sequence[Ranked], found: Sequence[Point]) -> str:
    """ "none", "unknown", or the first of the ranked where enough speaks for it alone."""
    if not troubled(dossier, found):
        return NONE if seen_enough(dossier) else UNKNOWN
    if not ranked or ranked[0].score < LIKELY:
        return UNKNOWN
    first = ranked[0]
    if _measured(found, first.cause) < MEASURED_FROM:
        return UNKNOWN
    return first.cause if lead(ranked) >= AHEAD else UNKNOWN


def _measured(found: Sequence[Point], cause: str) -> float:
    """The weight of the strongest evidence for a cause that is more than files that were read."""
    own = (p.weight for p in found if p.cause == cause and p.experiment != "audit")
    return max(own, default=0.0)


def lead(ranked: Sequence[Ranked]) -> float:
    """How far the first cause is ahead of the next one of another class."""
    if not ranked:
        return 0.0
    rivals = [r for r in ranked[1:] if not same_class(r.cause, ranked[0].cause)]
    return ranked[0].score - max((r.score for r in rivals), default=-math.inf)


def collapsed(dossier: Dossier) -> bool:
    """Whether surely fewer drafts are accepted than this drafter could be, or than drafters are."""
    return (
        gap.gap(dossier).there is True
        or verification.rejects(dossier)
        or bool(wanted.better(dossier))
        or training.is_low(dossier) is True
    )


def decided(dossier: Dossier) -> bool:
    """Whether the evidence so far already decides, so that no experiment need follow.

    A cause: it is certain by an experiment that was made, and far ahead of every other class.
    None: nothing is wrong in any of the four places where something could be, over so many steps
    that little could hide.
    """
    diagnosis = conclude(dossier)
    if diagnosis.cause == UNKNOWN:
        return False
    if diagnosis.cause == NONE:
        clean = states.is_clean(dossier.states) is not False
        return clean and looked_at(dossier) and seen_plenty(dossier)
    first = diagnosis.ranked[0]
    strongest = _measured(points(dossier), first.cause)
    return first.strength == "certain" and lead(diagnosis.ranked) >= 2.0 and strongest >= STRONG


def _next(dossier: Dossier, cause: str, ranked: Sequence[Ranked]) -> tuple[str, ...]:
    """What would settle it: experiments that were not made, and what tells the leaders apart."""
    missing = [f"make the experiment {name}" for name in not_made(dossier)]
    if cause == NONE:
        return tuple(missing)
    leaders = [r for r in ranked if r.score > 0 and r.evidence_for][:3]
    if cause != UNKNOWN and ranked[0].strength == "certain":
        fixable = CAUSES[cause].fixable
        return (WITH_FIX,) if fixable else ()
    settling = [f"{r.title}: {r.settles}" for r in leaders if r.settles]
    if training.is_low(dossier) and asked_builtin(dossier):
        settling.insert(0, OWN_PROMPTS)
    return (*settling, *(missing if cause == UNKNOWN else ()))
