"""What the engine did with the drafter: the reading that proposes as it did."""

from __future__ import annotations

from harness.diagnose.causes import CAUSES
from harness.diagnose.records import Dossier, Point, Proportion, ReadingFit, Replay
from harness.diagnose.rules import naming, power
from harness.diagnose.rules.measures import (
    above,
    bare,
    counted,
    known,
    pooled,
    rate,
    surely_above,
    surely_below,
)
from harness.diagnose.rules.weights import DECISIVE, GOOD, STRONG, WEAK, of_stage, point

NAME = "replay"
AGREES = 0.9
"""Of a rightly executed drafter's proposals so many are float32's; rounding takes the rest."""
PARTLY = AGREES - 0.1
"""And of every part of them: of first calls, in batches, of each draft position."""
EXPLAINED = 0.5
"""Of the calls that the declared drafter does not explain: a reading that gives more is the rest's
rule. What is not in the catalogue is met by none of its readings so often."""
INHERITED = 0.2
"""The same of a reading that alone gives so many, where all others give what chance does."""
ODD = 0.02
"""Calls that are not all as declared: so many are near-ties of honest arithmetic."""
BATCHES = ("proposals_other_request",)
CACHES = ("drafter_cache", "kv_not_overwritten")
LATER = ("recurrence", "drafter_graph")


def declared(replay: Replay) -> ReadingFit | None:
    """The checkpoint's own reading among those that were tried."""
    return next((r for r in replay.readings if naming.is_declared(r.reading)), None)


def agrees(replay: Replay | None) -> bool | None:
    """Whether the engine ran the drafter as its checkpoint says; None where that is open."""
    own = None if replay is None else declared(replay)
    if replay is None or own is None or not known(own.agreement):
        return None
    if better(replay):
        return False
    if any(surely_below(part, PARTLY) for part in _parts(replay, own)):
        return False
    if surely_below(own.agreement, AGREES):
        return False
    return True if (rate(own.agreement) or 0.0) >= AGREES else None


def _parts(replay: Replay, own: ReadingFit) -> tuple[Proportion | None, ...]:
    return replay.first_call, replay.later_calls, replay.alone, replay.batched, *own.by_draft


def better(replay: Replay) -> list[ReadingFit]:
    """Readings that propose as the engine did, surely more often than the declared one; best first.

    Both are held against the same tokens, so that the test of two samples is a strict one. Where
    calls go wrong now and then the reading behind them is no better over all: it is found by the
    calls that are not as declared, most of which it gives.
    """
    own = declared(replay)
    if own is None:
        return []
    looks, base = _looks(replay), bare(own.agreement)
    fits = [
        r
        for r in replay.readings
        if not naming.is_declared(r.reading)
        and (
            above(bare(r.agreement), base, looks=looks)
            or surely_above(r.explains, EXPLAINED, looks=looks)
            or _stands_out(r, replay)
        )
    ]
    return sorted(fits, key=lambda r: (-(rate(held(r)) or 0.0), r.reading))


def _looks(replay: Replay) -> int:
    return max(12, 2 * len(replay.readings))


def _stands_out(fit: ReadingFit, replay: Replay) -> bool:
    """Whether a reading gives many of the calls in question, and what they have is its own.

    Of rows that go wrong now and then the calls behind them inherit some right and some wrong ones:
    a reading that is wrong throughout gives only the calls whose past is mostly wrong. Either no
    other cause's gives many of those calls, or this gives most, and surely more than each other
    cause's does, call by call.
    """
    cause, looks = naming.cause_of_reading(fit.reading), _looks(replay)
    others = [
        r
        for r in replay.readings
        if not naming.is_declared(r.reading) and naming.cause_of_reading(r.reading) != cause
    ]
    if cause is None or not others or not surely_above(fit.explains, INHERITED):
        return False
    share = rate(fit.explains) or 0.0
    next_best = max((r.explains for r in others), key=lambda p: rate(p) or 0.0)
    if share > 3 * (rate(next_best) or 0.0):
        return above(bare(fit.explains), bare(next_best), looks=looks)
    most = fit.beaten is None and share > EXPLAINED
    # All of them have to be beaten: no chance is given to one of many.
    return most and all(surely_above(bare(r.beaten), 0.5, fewest=1) for r in others)


def held(fit: ReadingFit) -> Proportion | None:
    """What a reading is judged by: the calls that the declared one does not explain, or all."""
    return fit.explains if known(fit.explains) else fit.agreement


def execution_points(dossier: Dossier) -> list[Point]:
    """What replaying the drafter says of every cause between the states and the proposals."""
    replay = dossier.replay
    if replay is None:
        return []
    right = agrees(replay)
    own = declared(replay)
    if own is None or right is None:
        return []
    if right and surely_above(odd(replay), ODD):
        return _hints(replay, own)
    if right:
        return _right(replay, own)
    fits = better(replay)
    return [
        *_named(replay, own, fits),
        *([] if fits else _hints(replay, own)),
        *_tried(replay, own, suspected(replay)),
        *_signatures(replay, own, fits),
    ]


def _right(replay: Replay, own: ReadingFit) -> list[Point]:
    """Against every cause of a wrong execution, if enough was proposed where it lives."""
    says = f"{counted(own.agreement)} proposals are the declared drafter's in float32"
    able = power.mostly(own.agreement, PARTLY) and all(
        (rate(part) or 0.0) >= PARTLY for part in _parts(replay, own) if known(part)
    )
    alone = [c for c in of_stage("execution") if c not in BATCHES]
    batched = f"{says}; of those in batches {counted(replay.batched)}"
    in_batches = able and power.mostly(replay.batched, PARTLY)
    return [
        *power.against(alone, STRONG, says, NAME, able=able),
        *power.against(BATCHES, STRONG, batched, NAME, able=in_batches),
    ]


def suspected(replay: Replay | None) -> set[str]:
    """Causes whose readings propose as the engine did, surely or, where none does, perhaps."""
    own = None if replay is None else declared(replay)
    if replay is None or own is None:
        return set()
    fits = better(replay)
    if not fits:
        return {p.cause for p in _hints(replay, own)}
    return {cause for r in fits if (cause := naming.cause_of_reading(r.reading)) is not None}


def odd(replay: Replay) -> Proportion | None:
    """The calls whose proposals are not all the declared drafter's; None where that is not told."""
    own = declared(replay)
    calls = [p.of for p in (replay.first_call, replay.later_calls) if p is not None]
    if own is None or own.explains is None or sum(calls) < own.explains.of:
        return None
    return Proportion(hits=own.explains.of, of=sum(calls))


def _hints(replay: Replay, own: ReadingFit) -> list[Point]:
    """Where nothing is certain: the readings that give most of the calls which are not as declared.

    Most of all of these, or more than any other cause's reading does.
    """
    given = [r for r in replay.readings if known(r.explains) and naming.cause_of_reading(r.reading)]
    given.sort(key=lambda r: -(rate(r.explains) or 0.0))
    found: dict[str, Point] = {}
    for at, fit in enumerate(given):
        cause = naming.cause_of_reading(fit.reading)
        others = [r for r in given if naming.cause_of_reading(r.reading) != cause]
        ahead = at == 0 and bool(others) and above(bare(fit.explains), bare(others[0].explains))
        if cause is not None and (ahead or (rate(fit.explains) or 0.0) > EXPLAINED):
            found.setdefault(cause, point(cause, WEAK, _says(fit, own), NAME))
    return list(found.values())


def _named(replay: Replay, own: ReadingFit, fits: list[ReadingFit]) -> list[Point]:
    """The causes of the readings that fit: the best one's, and those that fit hardly worse."""
    if not fits:
        return []
    best = fits[0]
    found: dict[str, Point] = {}
    near = [r for r in fits if not above(bare(held(best)), bare(held(r)), looks=1)]
    rivals = {naming.cause_of_reading(r.reading) for r in near}
    for fit in fits:
        cause = naming.cause_of_reading(fit.reading)
        if cause is None or cause in found:
            continue
        if fit in near:
            weight = DECISIVE if len(rivals) == 1 else STRONG
            if not _explains(fit, own):
                weight = min(weight, STRONG if _stands_out(fit, replay) else GOOD)
        else:
            weight = WEAK
        if fit is best:
            weight += WEAK / 2
        found[cause] = point(cause, weight, _says(fit, own), NAME)
    return list(found.values())


def _says(fit: ReadingFit, own: ReadingFit) -> str:
    says = f"{counted(fit.agreement)} proposals are those of the drafter read with "
    says += f'"{fit.reading}", and {counted(own.agreement)} as declared'
    if known(fit.explains):
        says += f"; of the calls that are not as declared it gives {counted(fit.explains)}"
    return says


def _explains(fit: ReadingFit, own: ReadingFit) -> bool:
    """Whether a reading leaves less than half of the differing proposals, or next to none."""
    if known(fit.explains) and (rate(fit.explains) or 0.0) > EXPLAINED:
        return True
    one, other = rate(fit.agreement), rate(own.agreement)
    if one is None or other is None:
        return False
    return one >= 0.95 or (1 - one) < 0.5 * (1 - other)


def _tried(replay: Replay, own: ReadingFit, good: set[str]) -> list[Point]:
    """Against causes whose readings were tried and propose otherwise than the engine did."""
    tried: dict[str, list[ReadingFit]] = {}
    for fit in replay.readings:
        cause = naming.cause_of_reading(fit.reading)
        if cause is not None and cause not in good and known(fit.agreement):
            tried.setdefault(cause, []).append(fit)
    found: list[Point] = []
    for cause, own_fits in tried.items():
        if cause in (*BATCHES, *CACHES, *LATER) or CAUSES[cause].stage != "execution":
            continue  # one reading of many; and other experiments speak of the other stages
        best = max(own_fits, key=lambda r: (rate(r.agreement) or 0.0, r.reading))
        says = f'"{best.reading}" gives {counted(best.agreement)} of the proposals, as declared '
        says += counted(own.agreement)
        able = all(_proposes_otherwise(r) for r in own_fits)
        found += power.against([cause], GOOD, says, NAME, able=able)
    return found


def _proposes_otherwise(fit: ReadingFit) -> bool:
    """Whether a reading surely gives less than what the engine's own would."""
    if known(fit.explains):
        return power.rarely(fit.explains, EXPLAINED)
    return power.rarely(fit.agreement, AGREES)


def _signatures(replay: Replay, own: ReadingFit, fits: list[ReadingFit]) -> list[Point]:
    """Where the proposals differ: which causes live there."""
    named = bool(fits) and _explains(fits[0], own)
    strong, weak = (WEAK, WEAK / 2) if named else (STRONG - 0.5, WEAK)
    found: list[Point] = []
    if above(replay.alone, replay.batched, margin=0.05):
        says = f"{counted(replay.alone)} proposals agree at batch size 1, "
        says += f"{counted(replay.batched)} in batches"
        found.append(point("proposals_other_request", strong, says, NAME))
    calls = _calls(replay)
    if above(replay.first_call, replay.later_calls, margin=0.05):
        found += [point(c, strong if c == CACHES[0] else weak, calls, NAME) for c in CACHES]
    elif above(replay.later_calls, replay.first_call, margin=0.05):
        found.append(point("drafter_cache", strong, calls, NAME))
    first, later = _drafts(own)
    if surely_above(first, AGREES) and above(first, later, margin=0.05):
        says = f"{counted(first)} first drafts agree, and {counted(later)} later ones"
        graph = strong if not named and not known_calls(replay) else weak
        found.append(point("drafter_graph", graph, says, NAME))
        found += [point(c, weak, says, NAME) for c in ("recurrence", "norm_output")]
    if len(replay.by_position) > 1 and above(
        replay.by_position[0], replay.by_position[-1], margin=0.05
    ):
        says = f"{counted(replay.by_position[0])} proposals agree early in the text, and "
        says += f"{counted(replay.by_position[-1])} late"
        found += [point(c, weak, says, NAME) for c in ("rope", "positions", "kv_not_overwritten")]
    return found


def known_calls(replay: Replay) -> bool:
    """Whether the calls of the drafter differ from each other: then it is no matter of drafts."""
    first, later = replay.first_call, replay.later_calls
    return above(first, later, margin=0.05) or above(later, first, margin=0.05)


def _calls(replay: Replay) -> str:
    return (
        f"{counted(replay.first_call)} first drafts agree in the call after a prefill, and "
        f"{counted(replay.later_calls)} in later calls"
    )


def _drafts(own: ReadingFit) -> tuple[Proportion | None, Proportion | None]:
    """Agreement of first drafts and of all later ones."""
    if len(own.by_draft) < 2:
        return None, None
    return own.by_draft[0], pooled(own.by_draft[1:])


def where_differs(replay: Replay) -> str:
    """Where the proposals are not the declared drafter's, for a verdict without a name."""
    own = declared(replay)
    places: list[str] = []
    if above(replay.first_call, replay.later_calls, margin=0.05):
        places.append("in calls after the first")
    elif above(replay.later_calls, replay.first_call, margin=0.05):
        places.append("in the first call after a prefill")
    if above(replay.alone, replay.batched, margin=0.05):
        places.append("in batches")
    first, later = _drafts(own) if own is not None else (None, None)
    if surely_above(first, AGREES) and above(first, later, margin=0.05):
        places.append("at draft positions \N{GREATER-THAN OR EQUAL TO} 1")
    return " ".join(places)
