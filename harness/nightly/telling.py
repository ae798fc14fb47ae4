"""Findings in words: what happened to a series, by how much, when, and how sure that is."""

from __future__ import annotations

from typing import Literal

from harness.analyse.series.records import Change
from harness.nightly.places import Places
from harness.nightly.records import Finding, FindingStatus
from harness.nightly.series import Series
from harness.report import words

STATES = {
    "confirmed": "confirmed",
    "refuted": "not shown again",
    "unconfirmed": "not confirmed",
    "machine": "the machine's, not the version's",
}


def finding_of(
    series: Series,
    places: Places,
    change: Change,
    *,
    source: Literal["series", "baseline"],
    status: FindingStatus = "unconfirmed",
    why: str | None = None,
    known: str | None = None,
) -> Finding:
    """A change as a finding. `known`: the reason it was accepted or is lived with."""
    first_bad, last_good = places.known_from(change.at), places.known_before(change.at)
    effect = change.effect
    state: FindingStatus = "known" if known is not None else status
    return Finding(
        series=series.name,
        entry=series.entry,
        source=source,
        kind="difference" if source == "baseline" else change.kind,
        direction=change.direction,
        status=state,
        before=change.before.value,
        after=change.after.value,
        ratio=effect.value if effect else None,
        low=effect.ci_low if effect else None,
        high=effect.ci_high if effect else None,
        p_value=change.p_value,
        first_bad=first_bad,
        found=places.nights[change.found],
        last_good=last_good,
        reason=known,
        text=sentence(series, change, (last_good, first_bad), state, why, known, source),
    )


def sentence(
    series: Series,
    change: Change,
    nights: tuple[str | None, str | None],
    status: str,
    why: str | None,
    known: str | None,
    source: str = "series",
) -> str:
    """One sentence, such as: x fell by 3.1% (2.2 to 4.0%), from 812 to 787 tokens/s, …"""
    last_good, first_bad = nights
    moved = "fell" if change.after.value < change.before.value else "rose"
    levels = (
        f"from {words.number(change.before.value, 4)} to {words.number(change.after.value, 4)} "
        f"{series.point.unit}"
    )
    when = f"on the night of {first_bad}" if first_bad else "tonight"
    if source == "baseline":
        when = f"against the baseline, {when}"
    elif change.kind == "drift":
        when = f"slowly, since about {first_bad or 'tonight'}"
    elif last_good:
        when = f"between the nights of {last_good} and {first_bad}"
    text = f"{series.name} {moved}{_by(change)}, {levels}, {when}"
    if known is not None:
        return f"{text}; known: {words.one_line(known, 200)}."
    return f"{text}; {STATES[status]}{f': {why}' if why else ''}."


def _by(change: Change) -> str:
    effect = change.effect
    if effect is None:
        return ""
    told = f" by {abs(effect.value - 1):.1%}"
    if effect.ci_low is None or effect.ci_high is None:
        return told
    return f"{told} ({effect.ci_low - 1:+.1%} to {effect.ci_high - 1:+.1%})"
