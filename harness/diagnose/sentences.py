"""The verdict in one sentence of plain words: the cause, what it costs, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.diagnose.causes import CAUSES, NONE, UNKNOWN, kin
from harness.diagnose.records import Dossier, Length, Ranked
from harness.diagnose.remedies import is_of_the_text, prompts_of
from harness.diagnose.rules import gap, training, wanted
from harness.diagnose.rules.located import made, wanted_ones
from harness.diagnose.rules.measures import finite, first_rate, length, number, percent, rate, span
from harness.errors import one_line

SAMPLED = ("strict_rejection", "greedy_drafts_sampled")
OF_DRAFTER = ("checkpoint", "training")
MOST_NAMES = 4
"""So many causes are named of which nothing can be told."""
SURELY = {
    "certain": "The cause",
    "likely": "Probably the cause",
    "possible": "Perhaps the cause",
    "excluded": "Hardly the cause",
}


def sentence(dossier: Dossier, cause: str, stage: str | None, ranked: Sequence[Ranked]) -> str:
    """One sentence; what is not known is not said."""
    if cause == NONE:
        return _none(dossier)
    if cause == UNKNOWN:
        return _unknown(dossier, stage, ranked)
    first = ranked[0]
    others = ", or ".join(CAUSES[name].title for name in kin(cause))
    what = first.title + (f" (not to be told from: {others})" if others else "")
    parts = [f"{SURELY[first.strength]}: {what}", *_cost_of(dossier, cause)]
    if is_of_the_text(cause):
        parts += [f"that holds for {prompts_of(dossier)} alone", *_cannot_tell(ranked[1:])]
    return "; ".join([*parts, f"remedy: {first.remedy}"]) + "."


def _cannot_tell(ranked: Sequence[Ranked]) -> list[str]:
    """The causes of a drafter that predicts badly of which these prompts say nothing."""
    names = [
        r.cause
        for r in ranked
        if r.undecided and r.strength == "possible" and CAUSES[r.cause].stage in OF_DRAFTER
    ]
    if not names:
        return []
    told = names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], "others"]
    listed = " or ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
    return [f"these prompts cannot tell whether it is {listed} as well"]


def _cost_of(dossier: Dossier, cause: str) -> list[str]:
    """What the cause costs, in the terms that fit it."""
    if cause in SAMPLED:
        return _sampled_cost(dossier, cause)
    if cause == "counting":
        told, seen = gap.observed_of(dossier), gap.gap(dossier).observed
        says = f"they say {number(length(told))} tokens a step, and {number(length(seen))} were"
        return [f"{says} accepted"]
    return _cost(dossier)


def _cost(dossier: Dossier) -> list[str]:
    """What is lost: against what the checkpoint promises, or against what the drafter could do."""
    found = gap.gap(dossier)
    now, before = found.observed, found.expected
    could = wanted.better(dossier)
    best = could[0].acceptance if could else None
    if best is not None and (length(best) or 1.0) > max(length(before) or 1.0, 1.0):
        now, before = now if length(now) is not None else wanted.base(dossier), best
    seen, expected = length(now), length(before)
    if seen is None or expected is None or (found.there is None and best is None):
        return []
    if seen >= expected:
        return [f"{span(now)} tokens a step are accepted, and {span(before)} were expected"]
    k = max(dossier.subject.k, 1)
    lost = percent((expected - seen) / (expected - 1)) if expected > 1 else "none"
    return [
        f"it costs {lost} of the accepted drafts, {span(now)} tokens a step instead of "
        f"{span(before)} ({percent((seen - 1) / k)} of the drafts instead of "
        f"{percent((expected - 1) / k)}, k = {k})" + _break_even(dossier, seen, expected)
    ]


def _sampled_cost(dossier: Dossier, cause: str) -> list[str]:
    """What is lost at a temperature, against what the two distributions imply."""
    found = dossier.sampling
    if found is None:
        return []
    seen, implied = length(found.observed), gap.implied(dossier)
    could = finite(found.implied_sampled) if cause == SAMPLED[1] else length(implied)
    if seen is None or could is None or could <= max(seen, 1.0):
        return []
    return [
        f"it costs {percent((could - seen) / (could - 1))} of the accepted drafts at temperature "
        f"{found.temperature:g}, {span(found.observed)} tokens a step instead of {number(could)}"
    ]


def _break_even(dossier: Dossier, seen: float, expected: float | None) -> str:
    """Where speculation begins to pay, beside what is accepted."""
    even = None if dossier.expected is None else finite(dossier.expected.break_even)
    if even is None:
        return ""
    told = f", and speculation pays from {number(even)} tokens a step"
    if seen < even and expected is not None and expected < even:
        told += ", which not even the expected acceptance reaches"
    return told


def _none(dossier: Dossier) -> str:
    found = gap.gap(dossier)
    left = _left_out(dossier)
    open_ = f" (not looked at: {left})" if left else ""
    seen, expected = length(found.observed), length(found.expected)
    if seen is None and expected is None:
        return f"No fault was found, and nothing was measured that could show one{open_}."
    if seen is None or expected is None:
        known = "observed" if expected is None else "expected"
        value = number(seen if expected is None else expected)
        return f"No fault was found: {value} tokens a step were {known}{open_}."
    k = _depth(dossier, found.expected, found.observed)
    accuracy = rate(first_rate(found.expected))
    first = (
        "" if accuracy is None else f" whose first draft is right in {percent(accuracy)} of cases"
    )
    where = " in what was looked at" if left else ""
    return (
        f"No fault{where}: {percent((seen - 1) / k)} of the drafts accepted ({number(seen)} "
        f"tokens a step) at k = {k} is what a drafter{first} predicts: "
        f"{percent((expected - 1) / k)} ({number(expected)})"
        + _break_even(dossier, seen, expected)
        + f"{open_}."
    )


def _left_out(dossier: Dossier) -> str:
    """The experiments that could have shown a fault and were not made, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name in wanted_ones(dossier):
        why = dossier.skipped.get(name, "")
        open_ = not made(dossier, name) and name not in dossier.needless
        if open_ and (why or name != "audit"):
            by_reason.setdefault(_few_words(why), []).append(name)
    return "; ".join(
        ", ".join(names) + (f" [{why}]" if why else "") for why, names in by_reason.items()
    )


def _few_words(why: str) -> str:
    """A reason without where, what follows from it, or what to do about it."""
    why = re.sub(r"^\S*/\S*: (?=\S)", "", why)  # an address or a path is none
    first = re.split(r"[:;] ", why, maxsplit=1)[0]
    return one_line(first if first.count("(") == first.count(")") else why, 80)


def _depth(dossier: Dossier, *found: Length | None) -> int:
    """The number of drafts that both acceptances are of."""
    depths = [len(f.counts.per_position or ()) for f in found if f is not None]
    known = [d for d in depths if d]
    return min(known) if len(known) > 1 else max(dossier.subject.k, 1)


def _unknown(dossier: Dossier, stage: str | None, ranked: Sequence[Ranked]) -> str:
    if stage is None:
        left = _left_out(dossier)
        return "Nothing can be said: too few verify steps were seen" + (
            f" (not looked at: {left})." if left else "."
        )
    where = f"The fault lies {stage}"
    leaders = [r for r in ranked if r.score > 1][:2]
    if len(leaders) == 2 and leaders[0].score - leaders[1].score < 1:
        why = f"it may be that {leaders[0].title}, or that {leaders[1].title}"
    elif leaders:
        why = f"what fits best, and not well enough to be named, is that {leaders[0].title}"
    else:
        why = "none of the known causes fits"
    open_: list[str] = []
    if training.is_low(dossier):
        why = f"{wanted.told_first(dossier)}; {why}"
        open_ = _cannot_tell(ranked)
    return "; ".join([where, why, *_cost(dossier), *open_]) + "."
