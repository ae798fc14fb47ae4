"""The search for a capacity: which load to measure next, given all looks so far.

Nothing is kept but the looks themselves, so that a search can go on from what a folder holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import msgspec

from harness.analyse.statistics import wilson

Judged = Literal["met", "missed", "undecided"]
By = Literal["rate", "concurrency"]
SPAN = 2**10
"""How far the search goes from its start, up and down, where no bound is given."""


class Search(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is searched for: the highest load whose share of requests within the levels holds.

    `resolution`: the largest ratio of lowest missed to highest met, unless undecided loads lie
    between. `confidence`: that a load is not misjudged by chance. A load is looked at up to `looks`
    times, with `requests` requests each time, at a rate for `seconds` or longer.
    """

    by: By = "rate"
    attain: float = 0.9
    confidence: float = 0.95
    resolution: float = 1.1
    start: float = 1.0
    lowest: float = 1 / SPAN
    highest: float = float(SPAN)
    requests: int = 57
    seconds: float = 10.0
    looks: int = 4

    @property
    def z(self) -> float:
        """Of the normal distribution, for one look: the looks at a load share the error."""
        return NormalDist().inv_cdf(1 - (1 - self.confidence) / 2 / self.looks)


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One measured block: how many requests met the levels, of how many.

    `overloaded`: there was no steady state, so that a longer block would have met fewer.
    `tau`: so many of its requests tell no more than one would alone, since they share a queue.
    `hopeless`: those that had the server to themselves missed too, so no lower load can help.
    """

    value: float
    met: int
    of: int
    overloaded: bool = False
    tau: float = 1.0
    hopeless: bool = False


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One load with its looks pooled; `low`, `high`: the interval of the share that met.

    `independent`: how many independent requests the looks count for.
    """

    value: float
    met: int
    of: int
    independent: float
    looks: int
    low: float
    high: float
    overloaded: bool
    judged: Judged


class Bracket(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the capacity lies between the two; None where that end was not found."""

    highest_met: float | None
    lowest_missed: float | None
    undecided: tuple[float, ...]


def requests_needed(attain: float, z: float) -> int:
    """The fewest requests that can show, all of them meeting the levels, that `attain` holds."""
    return math.ceil(attain / (1 - attain) * z * z)


def points(looks: Sequence[Look], search: Search) -> list[Point]:
    """Every load that was looked at, judged, by ascending load."""
    return [
        _point(value, [look for look in looks if look.value == value], search)
        for value in sorted({look.value for look in looks})
    ]


def _point(value: float, looks: list[Look], search: Search) -> Point:
    met, of = sum(look.met for look in looks), sum(look.of for look in looks)
    independent = sum(look.of / look.tau for look in looks)
    low, high = wilson(sum(look.met / look.tau for look in looks), independent, search.z)
    overloaded = any(look.overloaded for look in looks)
    judged: Judged = "undecided"
    if overloaded or high < search.attain:
        judged = "missed"
    elif low >= search.attain:
        judged = "met"
    return Point(
        value=value,
        met=met,
        of=of,
        independent=independent,
        looks=len(looks),
        low=low,
        high=high,
        overloaded=overloaded,
        judged=judged,
    )


def next_value(looks: Sequence[Look], search: Search) -> float | None:
    """The load to look at next; None: the search is at its end.

    First from the start up or down by doubling, until a load is met and one is missed; then the
    gap between the two is halved on the logarithmic scale. An undecided load is looked at again;
    one that stays undecided parts the gap in two, and each part is made small. Where also requests
    that are alone miss the levels, no lower load is tried.
    """
    found = points(looks, search)
    if not found:
        return search.start
    for point in found:
        if point.judged == "undecided" and point.looks < search.looks:
            return point.value
    met = [p.value for p in found if p.judged == "met"]
    missed = [p.value for p in found if p.judged == "missed"]
    not_met = [p.value for p in found if p.judged != "met"]
    not_missed = [p.value for p in found if p.judged != "missed"]
    if not met:
        if any(look.hopeless for look in looks):
            return None
        return _beyond(min(not_met), search, 0.5)
    if not missed:
        return _beyond(max(not_missed), search, 2.0)
    below = _between(max(met), min(v for v in not_met if v > max(met)), search)
    return below or _between(max(v for v in not_missed if v < min(missed)), min(missed), search)


def _beyond(value: float, search: Search, factor: float) -> float | None:
    bounded = min(max(rounded(value * factor, search), search.lowest), search.highest)
    return None if bounded == value else bounded


def _between(low: float, high: float, search: Search) -> float | None:
    middle = rounded(math.sqrt(low * high), search)
    if high / low <= search.resolution or not low < middle < high:
        return None
    return middle


def rounded(value: float, search: Search) -> float:
    """Whole for a concurrency, four digits for a rate: what a cell's name can hold."""
    return float(max(1, round(value))) if search.by == "concurrency" else float(f"{value:.4g}")


def bracket(looks: Sequence[Look], search: Search) -> Bracket:
    """What the looks have shown."""
    found = points(looks, search)
    missed = [p.value for p in found if p.judged == "missed"]
    lowest = min(missed, default=None)
    met = [p.value for p in found if p.judged == "met" and (lowest is None or p.value < lowest)]
    return Bracket(
        highest_met=max(met, default=None),
        lowest_missed=lowest,
        undecided=tuple(p.value for p in found if p.judged == "undecided"),
    )
