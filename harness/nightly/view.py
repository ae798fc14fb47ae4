"""What a night's page, its Markdown and its messages say: plain rows and sentences, made once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from harness.nightly.places import places_of
from harness.nightly.records import EntryState, Finding, GateResult, Night
from harness.nightly.series import Series
from harness.report import words

SEARCH = "to find it: "
"""How a line begins that says which search would find a cause."""
Cell = tuple[str, str]
"""A table's cell: what it is sorted by, and its text."""
ENTRY_COLUMNS = ("entry", "status", "minutes", "expected", "fresh runs", "why in this place")
GATE_COLUMNS = ("gate", "of", "value", "limit", "result")
SERIES_COLUMNS = ("series", "trend", "tonight", "unit", "last night", "to baseline", "nights")
BADGES = {0: "well", 1: "regression", 2: "mistake", 3: "failed", 4: "void"}
STANDING = {0: "better", 1: "worse", 2: "failed", 3: "failed", 4: "void"}
"""The page's colours, by exit code, in the words of the style sheet."""


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """What is cried of one entry, and what changed in the environment, which they share."""

    texts: tuple[str, ...]
    changed: tuple[str, ...] = ()


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A night, ready to be shown. Notes are in the order in which they should be read."""

    title: str
    badge: str
    standing: str
    verdict: tuple[str, ...]
    meta: str
    alarms: tuple[Alarm, ...]
    doubts: tuple[str, ...]
    known: tuple[str, ...]
    better: tuple[str, ...]
    refuted: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    entries: tuple[tuple[str, ...], ...]
    links: Mapping[str, str]
    gates: tuple[tuple[str, ...], ...]

    @property
    def text(self) -> str:
        """For the terminal: the verdict, what is cried with its cause, doubts, and the entries."""
        lines = [f"{self.title}: {self.badge}", *self.verdict, self.meta]
        for alarm in self.alarms:
            lines += [*(f"! {text}" for text in alarm.texts), *(f"    {c}" for c in alarm.changed)]
        for heading, told in (("in doubt", self.doubts), ("known", self.known)):
            lines += [f"{heading}: {text}" for text in told]
        lines += [f"note: {text}" for text in self.notes]
        width = max((len(row[0]) for row in self.entries), default=0)
        lines += [f"{row[0]:<{width}}  {row[1]}, {row[2]} min" for row in self.entries]
        return "\n".join(lines)


def view_of(night: Night, links: Mapping[str, str]) -> View:
    """The view of a night that was judged. `links`: each entry's own report."""
    code = night.exit_code or 0
    return View(
        title=f"{night.suite}, night of {night.night}",
        badge=BADGES.get(code, "interrupted"),
        standing=STANDING.get(code, "undecided"),
        verdict=tuple(verdict(night)),
        meta=_meta(night),
        alarms=tuple(grouped(night)),
        doubts=tuple(
            [f.text for f in night.findings if f.status == "unconfirmed" and f.direction == "worse"]
            + [g.text for g in night.gates if g.status in ("unconfirmed", "unknown")]
        ),
        known=tuple(
            [f.text for f in night.findings if f.status == "known"]
            + [g.text for g in night.gates if g.status == "known"]
        ),
        better=tuple(
            f.text for f in night.findings if f.direction == "better" and f.status != "known"
        ),
        refuted=tuple(
            [f.text for f in night.findings if f.status == "refuted"]
            + [g.text for g in night.gates if g.status == "refuted"]
        ),
        left_out=tuple(
            f"{e.name}: {e.why}" for e in night.entries if e.status in ("left_out", "cut_short")
        ),
        notes=night.notes,
        entries=tuple(_entry_row(e) for e in night.entries),
        links=dict(links),
        gates=tuple(_gate_row(g) for g in night.gates),
    )


def grouped(night: Night) -> list[Alarm]:
    """What is cried, entry by entry; findings with the same cause stand together.

    Of the searches for a cause the one for the largest loss is told.
    """
    found: dict[tuple[str, tuple[str, ...]], list[Finding]] = {}
    for finding in sorted(alarms(night), key=_loss, reverse=True):
        causes = tuple(c for c in finding.changed if not c.startswith(SEARCH))
        found.setdefault((finding.entry, causes), []).append(finding)
    told = []
    for (_, causes), members in found.items():
        searches = [c for c in members[0].changed if c.startswith(SEARCH)]
        texts = tuple(f.text for f in members)
        told.append(Alarm(texts=texts, changed=(*causes, *searches)))
    gates = tuple(g.text for g in night.gates if g.status == "fail")
    return [*told, Alarm(texts=gates)] if gates else told


def _loss(finding: Finding) -> float:
    """How large a loss is, whichever way worse is."""
    ratio = finding.ratio
    return abs(math.log(ratio)) if ratio is not None and ratio > 0 else math.inf


def alarms(night: Night) -> list[Finding]:
    """What is cried: confirmed, worse, and not accepted."""
    return [f for f in night.findings if f.status == "confirmed" and f.direction == "worse"]


def verdict(night: Night) -> list[str]:
    """The night in a few sentences, the most important first."""
    bad, failed = alarms(night), [g for g in night.gates if g.status == "fail"]
    told: list[str] = []
    if bad or failed:
        parts = []
        if bad:
            parts.append(f"{words.plural(len(bad), 'regression')} confirmed on fresh blocks")
        if failed:
            parts.append(f"{words.plural(len(failed), 'gate')} not kept")
        told.append(" and ".join(parts) + ".")
        told += [max(bad, key=_loss).text] if bad else [failed[0].text]
    broken = [e for e in night.entries if e.status == "failed"]
    void = [e for e in night.entries if e.status == "void"]
    for state, what in ((broken, "failed"), (void, "void")):
        if state:
            told.append(f"{what.capitalize()}: {', '.join(e.name for e in state)}.")
    doubts = [f for f in night.findings if f.status == "unconfirmed" and f.direction == "worse"]
    doubts_of = {f.series for f in doubts}
    doubts_of |= {g.series for g in night.gates if g.status == "unconfirmed"}
    if doubts_of:
        count = words.plural(len(doubts_of), "suspect")
        told.append(f"{count} not confirmed yet: no fresh blocks could decide.")
    if not told:
        done = [e for e in night.entries if e.status == "done"]
        told.append(
            f"No regression: {words.plural(len(done), 'entry', 'entries')} measured, "
            f"{words.plural(sum(g.status == 'pass' for g in night.gates), 'gate')} kept."
        )
    out = [e for e in night.entries if e.status in ("left_out", "cut_short")]
    if out:
        told.append(f"No time was left for {', '.join(e.name for e in out)}.")
    return told


def _meta(night: Night) -> str:
    spent = f"{night.spent_s / 60:.1f} min"
    budget = "" if night.budget_s is None else f" of {night.budget_s / 60:g}"
    return f"begun {night.begun}, ended {night.ended or words.DASH}, {spent}{budget} spent"


def _entry_row(state: EntryState) -> tuple[str, ...]:
    attempt = state.attempt
    status = state.status.replace("_", " ")
    if attempt is not None and attempt.error:
        status = f"{status}: {words.one_line(attempt.error, 160)}"
    minutes = words.DASH if attempt is None else f"{attempt.seconds / 60:.1f}"
    expected = words.DASH if state.expected_s is None else f"{state.expected_s / 60:.1f}"
    return state.name, status, minutes, expected, str(len(state.fresh)), state.why


def _gate_row(gate: GateResult) -> tuple[str, ...]:
    return (
        gate.rule,
        gate.series,
        words.number(gate.value, 4),
        words.number(gate.bound, 4),
        gate.status,
    )


def series_rows(
    series: Sequence[Series], baselines: Mapping[str, float | None]
) -> list[dict[str, object]]:
    """One row a series: its name, its values for the sparkline, and how it moved."""
    rows: list[dict[str, object]] = []
    for one in series:
        values = [r.value for r in one.readings]
        now, before = values[-1], next((v for v in reversed(values[:-1]) if v is not None), None)
        rows.append(
            {
                "name": one.name,
                "values": places_of(one).values,
                "now": now,
                "now_text": words.number(now, 4),
                "unit": one.point.unit,
                "last": _change(now, before),
                "baseline": _change(now, baselines.get(one.name)),
                "nights": sum(v is not None for v in values),
            }
        )
    return rows


def _change(now: float | None, then: float | None) -> Cell:
    """How far a value is from another: as a percentage, where that means anything."""
    if now is None or then is None or then == 0:
        return "", words.DASH
    share = now / then - 1
    return f"{share:.6f}", f"{100 * share:+.1f}%"
