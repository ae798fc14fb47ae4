"""A night before it begins: its entries in their order, and how long each is expected to take."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from harness.errors import UsageError
from harness.nightly.folders import NightFolder, read_nights
from harness.nightly.order import order, scatter_of
from harness.nightly.records import NIGHT_SCHEMA, EntryPoints, EntryState, Night
from harness.nightly.series import name_of, series_of
from harness.nightly.suite import Entry, Loaded, digest_of, hint

HEADLINE = "output_tokens_per_s"
"""The figure whose scatter says how noisy an entry is."""
EXPECTED_FROM = 5
"""Of so many earlier nights the median duration is expected."""


def planned(loaded: Loaded, name: str, now: datetime, nights: Sequence[NightFolder]) -> Night:
    """A night that begins now. `nights`: the earlier ones, the oldest first."""
    earlier_nights, _ = read_nights(nights[-loaded.suite.keep_nights :])
    places = order(loaded.suite.entries, earlier_nights, _scatter(loaded, nights))
    budget = loaded.suite.time_budget_min
    return Night(
        schema_version=NIGHT_SCHEMA,
        suite=loaded.suite.name,
        night=name,
        begun=now.isoformat(timespec="seconds"),
        budget_s=None if budget is None else 60 * budget,
        entries=tuple(
            EntryState(
                name=p.name,
                digest=digest_of(loaded, loaded.entry(p.name)),
                why=p.why,
                expected_s=_expected(loaded.entry(p.name), earlier_nights),
            )
            for p in places
        ),
    )


def _scatter(loaded: Loaded, nights: Sequence[NightFolder]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for entry in loaded.suite.entries:
        kept = kept_of(nights[-loaded.suite.keep_nights :], entry.name)
        series = series_of(entry.name, kept, digest_of(loaded, entry))
        each = [
            scatter_of([r.value for r in s.readings])
            for s in series.values()
            if s.metric == HEADLINE
        ]
        found[entry.name] = max((v for v in each if v is not None), default=None)
    return found


def kept_of(nights: Sequence[NightFolder], entry: str) -> list[EntryPoints]:
    """What the nights have kept of an entry; a broken file costs that night alone."""
    found = []
    for night in nights:
        try:
            points = night.points(entry)
        except UsageError:
            continue
        if points is not None:
            found.append(points)
    return found


def known_series(entries: Sequence[str], nights: Sequence[NightFolder]) -> set[str]:
    """The series of these entries, of the last night that measured each."""
    found: set[str] = set()
    for entry in entries:
        for night in reversed(nights):
            kept = kept_of([night], entry)
            if kept:
                found |= {name_of(entry, p) for p in kept[0].points}
                break
    return found


def no_such(wanted: str, known: set[str]) -> UsageError:
    """What is said of a series that no night knows."""
    near = hint(wanted, sorted(known))
    if len(near) >= 300:
        near = "; the night's page lists them all"
    return UsageError(f"{wanted}: no such series{near}")


def _expected(entry: Entry, nights: Sequence[Night]) -> float | None:
    """Seconds that the entry is expected to take: as the suite says, else as it took."""
    if entry.minutes is not None:
        return 60 * entry.minutes
    took = [
        e.attempt.seconds
        for night in nights
        for e in night.entries
        if e.name == entry.name and e.status == "done" and e.attempt is not None
    ][-EXPECTED_FROM:]
    return sorted(took)[len(took) // 2] if took else None
