"""Accept a change of a series, call it known, or pin a night's run as the baseline."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from harness.errors import UsageError
from harness.nightly import accepted as accepting
from harness.nightly import folders
from harness.nightly.accepted import Accepted
from harness.nightly.folders import NightFolder, night_order
from harness.nightly.pinning import pin
from harness.nightly.planning import known_series, no_such
from harness.nightly.records import Finding, Night
from harness.nightly.suite import Loaded, hint


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be accepted. `series`: a series, several with `*`, or an entry's name.

    `since`: a night; None: the one that told the change first, else the last one. `pin`: the
    entries' runs of that night become their baselines too.
    """

    series: str
    reason: str
    known_bad: bool = False
    since: str | None = None
    until: str | None = None
    pin: bool = False


def accept(loaded: Loaded, wish: Wish) -> list[str]:
    """Record it beside the suite file; returns what was done, in words. Raises `UsageError`."""
    if not wish.reason.strip():
        raise UsageError("--reason: say why: it is what the next reader needs")
    if wish.pin and wish.known_bad:
        raise UsageError("--pin goes with what is accepted, not with --known-bad")
    if wish.until is not None and not wish.known_bad:
        raise UsageError("--until goes with --known-bad: what is accepted does not end")
    results = loaded.results.resolve()
    with folders.claimed(results, loaded.suite.name):
        nights = folders.nights_of(results, loaded.suite.name)
        if not nights:
            raise UsageError(f"{results}: no night of {loaded.suite.name} yet")
        pattern, names = _series(loaded, wish.series, nights)
        last = nights[-1].read()
        since = wish.since or _told_first(last, pattern) or last.night
        known = {n.name for n in nights}
        if since not in known:
            raise UsageError(f"--since {since}: no such night{hint(since, sorted(known))}")
        change = Accepted(
            series=pattern,
            since=since,
            kind="known-bad" if wish.known_bad else "accepted",
            reason=wish.reason,
            until=wish.until,
        )
        accepting.add(loaded.accepted, change)
        what = "known to be bad" if wish.known_bad else "accepted"
        told = [f"{pattern} ({len(names)} series): {what} since the night of {since}"]
        if wish.pin:
            told += _pin(loaded, results, names, nights, wish)
        return [*told, f"written to {loaded.accepted}"]


def _series(loaded: Loaded, wanted: str, nights: list[NightFolder]) -> tuple[str, list[str]]:
    """The pattern to record, and the series that it means now."""
    entries = [e.name for e in loaded.suite.entries]
    known = known_series(entries, nights)
    pattern = f"{wanted}/*" if wanted in entries else wanted
    found = sorted(name for name in known if fnmatchcase(name, pattern))
    if not found:
        raise no_such(wanted, known)
    return pattern, found


def _told_first(night: Night, pattern: str) -> str | None:
    """The night that told the latest change of those series."""

    def fits(finding: Finding) -> bool:
        return fnmatchcase(finding.series, pattern) and finding.status != "refuted"

    told = [f.found for f in night.findings if fits(f) and f.found]
    return max(told, key=night_order, default=None)


def _pin(
    loaded: Loaded, results: Path, names: list[str], nights: list[NightFolder], wish: Wish
) -> list[str]:
    """Pin the last night that measured each entry of those series."""
    told = []
    for entry in dict.fromkeys(name.partition("/")[0] for name in names):
        for night in reversed(nights):
            state = next((e for e in night.read().entries if e.name == entry), None)
            if state is not None and state.status == "done":
                told.append(pin(loaded, results, night, state, wish.reason))
                break
    return told
