"""An entry's night judged: gates, changes of its series, differences to its young baseline.

The statistics are those of `harness.analyse.series`. Here stands what is asked of them, on which
numbers, and what became of earlier answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median

import msgspec

from harness.analyse.series.confirm import confirm
from harness.analyse.series.detect import detect
from harness.analyse.series.records import DEFAULT, Change, Config, Decision
from harness.nightly import accepted as accepting
from harness.nightly import young
from harness.nightly.accepted import Accepted
from harness.nightly.folders import night_order, read_baseline
from harness.nightly.gates import gate_results
from harness.nightly.pins import Pin
from harness.nightly.places import Places, places_of
from harness.nightly.records import Baseline, Finding, FindingStatus, GateResult, Night
from harness.nightly.series import Series, name_of
from harness.nightly.suite import Gate, Loaded, Suite
from harness.nightly.telling import finding_of

RECENT = 3
"""Nights, at most, that say whether a loss still stands."""
DECISIONS: dict[str, Decision] = {
    "confirmed": "confirmed",
    "refuted": "refuted",
    "machine": "machine",
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an entry is judged by. `nights`: the earlier ones, the oldest first."""

    entry: str
    night: str
    gates: tuple[Gate, ...]
    series: Mapping[str, Series]
    baseline: Baseline | None
    accepted: tuple[Accepted, ...]
    nights: tuple[Night, ...]
    digest: str
    suite: Suite

    @property
    def config(self) -> Config:
        """How the series are watched."""
        return config_of(self.suite)

    @property
    def current(self) -> list[Series]:
        """The series that have a value of tonight."""
        return [s for s in self.series.values() if s.last.night == self.night]


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry's night is. `wanted`: further fresh blocks that would help tonight."""

    gates: tuple[GateResult, ...]
    findings: tuple[Finding, ...]
    wanted: int = 0


def config_of(suite: Suite) -> Config:
    """The suite's wishes, for the statistics; what it does not say stays as it is there."""
    wishes = {
        "least": suite.min_effect,
        "suspect": suite.suspect,
        "learn": suite.learn,
        "blocks": suite.confirm_blocks,
    }
    told = {key: value for key, value in wishes.items() if value is not None}
    return msgspec.structs.replace(DEFAULT, **told)


def wanted(case: Case) -> int:
    """How many further fresh blocks would help to decide a suspect; 0: there is none."""
    return judge(case).wanted


def judge(case: Case) -> Judged:
    """The entry's gates and findings."""
    findings: list[Finding] = []
    more = 0
    for series in case.current:
        if series.metric not in case.suite.watch or series.better is None:
            continue
        places = places_of(series)
        known = sum(v is not None for v in places.values)
        if known > case.config.learn:
            own, asked = _of_series(case, series, places)
        else:
            own, asked = young.differences(case, series, held_to(case, series))
        findings += own
        more = max(more, asked)
    gates, asked = gate_results(case, {s.name: held_to(case, s) for s in case.current})
    more = max(more, asked)
    return Judged(gates=tuple(gates), findings=tuple(findings), wanted=more)


def _of_series(case: Case, series: Series, places: Places) -> tuple[list[Finding], int]:
    """What the series itself shows, and how many fresh blocks are wanted for it."""
    changes = detect(
        places.values,
        errors=places.errors,
        better=series.better,
        config=case.config,
        decisions=_decisions(case, series.name, places),
    )
    last = len(places.values) - 1
    findings: list[Finding] = []
    more = 0
    for change in changes:
        if change.found == last:
            finding, more = _tonight(case, series, places, change)
            findings.append(finding)
        elif change.direction == "worse" and not _over(change, places):
            findings.append(_standing(case, series, places, change))
    return findings, more


def _decisions(case: Case, series: str, places: Places) -> dict[int, Decision]:
    """What became of earlier suspicions of a series, by the place of the night."""
    found: dict[int, Decision] = {}
    for night in case.nights:
        place = places.at.get(night.night)
        if place is None:
            continue
        for finding in night.findings:
            decided = DECISIONS.get(finding.status)
            if finding.series == series and finding.found == night.night and decided:
                found[place] = decided
    for change in case.accepted:
        if change.kind == "accepted" and accepting.matches(change, series):
            place = places.from_night(change.since)
            if place is not None:
                found[place] = "accepted"
    return found


def _tonight(case: Case, series: Series, places: Places, change: Change) -> tuple[Finding, int]:
    """A change that is told tonight for the first time, as far as fresh blocks decide it."""
    finding = finding_of(series, places, change, source="series")
    if change.direction == "better":
        return msgspec.structs.replace(finding, status="confirmed"), 0
    record = _excuse(case, series.name)
    if record is not None:
        return finding_of(series, places, change, source="series", known=record.reason), 0
    said = confirm(
        change,
        series.last.fresh,
        reference=series.last.control or None,
        better=series.better,
        config=case.config,
    )
    status: FindingStatus = "unconfirmed"
    if said.verdict != "undecided":
        status = said.verdict
    elif change.certain and not said.more:
        status = "confirmed"  # three nights of it stand without fresh blocks
    why = said.why if series.last.fresh else None
    told = finding_of(series, places, change, source="series", status=status, why=why)
    return told, said.more


def _standing(case: Case, series: Series, places: Places, change: Change) -> Finding:
    """A loss that an earlier night told, and that has not gone since."""
    record = _accepted_at(case, series.name, places, change) or _excuse(case, series.name)
    if record is not None:
        return finding_of(series, places, change, source="series", known=record.reason)
    return finding_of(series, places, change, source="series", status="confirmed", why="it stands")


def _over(change: Change, places: Places) -> bool:
    """Whether what was lost has come back: the last nights lie nearer to the level before."""
    last = [v for v in places.values[change.found + 1 :] if v is not None][-RECENT:]
    if not last:
        return False
    now, middle = median(last), (change.before.value + change.after.value) / 2
    return now > middle if change.after.value < change.before.value else now < middle


def _accepted_at(case: Case, series: str, places: Places, change: Change) -> Accepted | None:
    """The record that accepts the change: from the night that it begins on, or a later one."""
    for record in case.accepted:
        place = places.from_night(record.since)
        fits = record.kind == "accepted" and accepting.matches(record, series)
        if fits and place is not None and place >= change.at:
            return record
    return None


def _excuse(case: Case, series: str) -> Accepted | None:
    return accepting.known_bad(case.accepted, series, case.night)


def held_to(case: Case, series: Series) -> Pin | None:
    """What the series is held to: the baseline's value, or that of a night accepted since.

    A value accepted tonight is no measure for tonight.
    """
    record = accepting.restart_of(case.accepted, series.name)
    pinned = case.baseline
    if record is not None and (
        pinned is None or night_order(pinned.night) < night_order(record.since)
    ):
        since = night_order(record.since)
        for reading in series.readings:
            if night_order(reading.night) >= since and reading.value is not None:
                return Pin(value=reading.value, night=reading.night)
        return None
    if pinned is None or pinned.digest != case.digest:
        return None
    value = pinned_values(pinned).get(series.name)
    return None if value is None else Pin(value=value, night=pinned.night)


def pinned_values(pinned: Baseline) -> dict[str, float | None]:
    """A baseline's values by series."""
    return {name_of(pinned.entry, p): p.value for p in pinned.points if not p.void}


def baseline_values(loaded: Loaded, results: Path) -> dict[str, float | None]:
    """Every series' pinned value, for the page."""
    found: dict[str, float | None] = {}
    for entry in loaded.suite.entries:
        pinned = read_baseline(results, loaded.suite.name, entry.name)
        if pinned is not None:
            found |= pinned_values(pinned)
    return found
