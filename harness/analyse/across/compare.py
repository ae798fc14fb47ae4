"""Runs against a reference: what differs in how they were made, then what differs in the figures.

The rules are those of a run's own comparison (`harness.analyse.compare`): ratios on the log scale,
starts as units, Holm's correction, `same` by the interval within the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from harness.analyse.across.conditions import conditions
from harness.analyse.across.differences import differences, ordered
from harness.analyse.across.matching import hindrances, left_out, loads_of, match
from harness.analyse.across.metrics import FAMILIES
from harness.analyse.across.records import Across, Difference, Group, Row, Stored, Versus
from harness.analyse.across.rows import Measured, Rows, Wanted
from harness.analyse.statistics import holm, judged
from harness.errors import UsageError, VoidRun


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate before the verdicts, which depend on how many comparisons there are in all."""

    candidate: Group
    differences: tuple[Difference, ...]
    hindrances: tuple[str, ...]
    left_out: tuple[str, ...]
    void: str | None
    measured: tuple[Measured, ...]


def compare_groups(groups: Sequence[Group], wanted: Wanted) -> Across:
    """The first against each of the others.

    Raises `UsageError` where they cannot be compared, `VoidRun` where a void run measured nothing.
    """
    reference, *candidates = groups
    ours, *theirs = [_mixed(group) for group in groups]
    found = [_found(reference, candidate, wanted) for candidate in candidates]
    rows = iter(decided([m for f in found for m in f.measured]))
    return Across(
        reference=reference.label,
        run_ids=_ids(reference),
        comparisons=tuple(
            Versus(
                candidate=f.candidate.label,
                run_ids=_ids(f.candidate),
                differences=f.differences,
                hindrances=f.hindrances,
                left_out=f.left_out,
                mixed=(*ours, *own),
                void=f.void,
                rows=tuple(next(rows) for _ in f.measured),
            )
            for f, own in zip(found, theirs, strict=True)
        ),
    )


def _ids(group: Group) -> tuple[str, ...]:
    return tuple(run.summary.run_id for run in group.runs)


def _mixed(group: Group) -> list[str]:
    """In what the runs of a side are not alike. Raises `UsageError` where they are of two kinds."""
    keys: dict[str, None] = {}
    for run in group.runs[:-1]:
        same = match(run, group.last, anyway=False)
        told = differences(run, group.last, same.engines)
        why = hindrances(run, group.last, same, told)
        if why:
            raise UsageError(
                f"{group.label}: {run.label} and {group.last.label} cannot stand for each other "
                f"({'; '.join(why)}): choose runs of one kind"
            )
        keys.update((d.key, None) for d in ordered(told) if d.affects)
    return [f"the runs of {group.label} are not alike in: {', '.join(keys)}"] if keys else []


def _found(reference: Group, candidate: Group, wanted: Wanted) -> _Found:
    a, b = reference.last, candidate.last
    matched = match(a, b, anyway=wanted.anyway)
    told = [*differences(a, b, matched.engines), *conditions(a, b)]
    why = hindrances(a, b, matched, told)
    void = _void([*reference.runs, *candidate.runs])
    if void is not None and not (loads_of(a) and loads_of(b)):
        raise VoidRun(f"{reference.label} and {candidate.label} cannot be compared: {void}")
    if why and not wanted.anyway:
        raise UsageError(
            f"{reference.label} and {candidate.label} cannot be compared: {'; '.join(why)} "
            "(--anyway compares them all the same)"
        )
    rows = Rows(reference, candidate, matched, wanted)
    measured = tuple(rows.all(void))
    if not measured:
        raise UsageError(
            f"{reference.label} and {candidate.label}: no figure that both have; "
            "`python -m harness report RUN` shows what each measured"
        )
    return _Found(
        candidate=candidate,
        differences=ordered(told),
        hindrances=tuple(why),
        left_out=(*left_out(a, b, matched), *rows.alone()),
        void=void,
        measured=measured,
    )


def _void(runs: Iterable[Stored]) -> str | None:
    for run in runs:
        why = run.summary.void
        if why is not None:
            return f"{run.label} is void: {why}"
    return None


def decided(measured: Sequence[Measured]) -> list[Row]:
    """Verdicts by Holm's correction, within the question, the figures beside it and the details.

    Looking at more figures takes nothing from the question, nor details from the figures. A row
    that cannot have a verdict counts in no family.
    """
    rows = [m.row for m in measured]
    for kind in FAMILIES:
        family = [
            i
            for i, m in enumerate(measured)
            if m.row.kind == kind and not m.withheld and m.row.p_value is not None
        ]
        levels = holm(
            [measured[i].row.p_value or 0.0 for i in family],
            [measured[i].alpha for i in family],
        )
        for i, level in zip(family, levels, strict=True):
            rows[i] = _judged(measured[i], level, len(family))
    return rows


def _judged(measured: Measured, level: float, family: int) -> Row:
    assert measured.found is not None
    told = judged(
        measured.found,
        level=level,
        strict=measured.alpha / family,
        better=measured.row.better,
        min_effect=measured.row.tolerance,
    )
    return msgspec.structs.replace(
        measured.row,
        verdict=told.verdict,
        family=family,
        corrected_low=told.low,
        corrected_high=told.high,
        corrected_confidence=told.confidence,
    )
