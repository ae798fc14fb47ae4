"""Which entry is run first: the one whose result would tell the most, and why.

Points: ten for each step of the entry's priority; five for a suspect of the last night that nobody
could confirm, or an entry that broke, was cut short or left out, halved with each night since; one
for each night without data, at most ten (never measured: ten); and one for each percent that its
figures scatter by from night to night, at most five. The time budget cuts the end of the list.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import msgspec

from harness.nightly.records import Night
from harness.nightly.suite import Entry

PRIORITY, SUSPECT, OLDEST, NOISIEST = 10.0, 5.0, 10.0, 5.0
UNSETTLED = ("failed", "cut_short", "left_out", "running", "pending", "void")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an entry stands, and why in words."""

    name: str
    points: float
    why: str


def order(
    entries: Sequence[Entry], nights: Sequence[Night], scatter: dict[str, float | None]
) -> list[Place]:
    """The entries, most informative first; equal ones as the suite names them.

    `nights`: the earlier ones, the oldest first. `scatter`: each entry's night-to-night
    coefficient of variation, None where it is not known.
    """
    places = [_place(e, nights, scatter.get(e.name)) for e in entries]
    return sorted(places, key=lambda p: -p.points)


def _place(entry: Entry, nights: Sequence[Night], scatter: float | None) -> Place:
    parts: list[tuple[float, str]] = []
    if entry.priority:
        parts.append((PRIORITY * entry.priority, f"priority {entry.priority}"))
    if (since := _since_suspect(entry.name, nights)) is not None:
        ago = "last night" if since == 0 else f"{since + 1} nights ago"
        parts.append((SUSPECT * 0.5**since, f"unsettled {ago}"))
    age = _age(entry.name, nights)
    if age is None:
        parts.append((OLDEST, "never measured"))
    elif age:
        told = "1 night" if age == 1 else f"{age} nights"
        parts.append((min(float(age), OLDEST), f"{told} without data"))
    if scatter is not None and math.isfinite(scatter) and scatter > 0:
        parts.append((min(100 * scatter, NOISIEST), f"scatters by {100 * scatter:.1f}%"))
    why = ", ".join(text for _, text in parts) or "as the suite names it"
    return Place(name=entry.name, points=sum(p for p, _ in parts), why=why)


def _age(name: str, nights: Sequence[Night]) -> int | None:
    """How many nights passed since the entry was measured; None: it never was."""
    for back, night in enumerate(reversed(nights)):
        if any(e.name == name and e.status == "done" for e in night.entries):
            return back
    return None


def _since_suspect(name: str, nights: Sequence[Night]) -> int | None:
    """How many nights before the last one the entry was left in doubt, and not measured since."""
    for back, night in enumerate(reversed(nights)):
        state = next((e for e in night.entries if e.name == name), None)
        if state is None:
            continue
        open_ = [f for f in night.findings if f.entry == name and f.status == "unconfirmed"]
        if open_ or state.status in UNSETTLED:
            return back
        return None  # measured, and nothing was left open
    return None


def scatter_of(values: Sequence[float | None]) -> float | None:
    """Night-to-night coefficient of variation from successive differences; None below four values.

    Differences (J. von Neumann, 1941) leave a step between two levels out, a plain deviation
    would call it noise; the median of them leaves outliers out.
    """
    logs = [math.log(v) for v in values if v is not None and v > 0]
    if len(logs) < 4:
        return None
    steps = [abs(b - a) for a, b in itertools.pairwise(logs)]
    return 1.4826 * statistics.median(steps) / math.sqrt(2)
