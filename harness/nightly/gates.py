"""Gates: limits that a figure of an entry has to keep, absolute or relative to the baseline.

A gate that tonight's run does not keep is measured again: only what the fresh blocks do not keep
either has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from statistics import fmean
from typing import TYPE_CHECKING

from harness.nightly import accepted as accepting
from harness.nightly.pins import Pin
from harness.nightly.records import GateResult, GateStatus
from harness.nightly.series import Series
from harness.nightly.suite import Gate, hint
from harness.report import words

if TYPE_CHECKING:
    from harness.nightly.judge import Case


def gate_results(case: Case, pins: Mapping[str, Pin | None]) -> tuple[list[GateResult], int]:
    """Every gate against every figure it is of, and the fresh blocks wanted for a breach."""
    found: list[GateResult] = []
    more = 0
    for gate in case.gates:
        fits = [s for s in case.current if _is_of(gate, s)]
        if not fits:
            found.append(_unknown(case, gate))
        for series in fits:
            for rule, bound, below in bounds(gate, series, pins.get(series.name), case.night):
                result = _result(case, series, rule, bound, below)
                found.append(result)
                if result.status == "unconfirmed" and not series.last.fresh:
                    more = max(more, case.config.blocks)
    return found, more


def _is_of(gate: Gate, series: Series) -> bool:
    point = series.point
    return (
        fnmatchcase(point.metric, gate.metric)
        and gate.variant in (None, point.variant)
        and gate.load in (None, point.load)
    )


def bounds(
    gate: Gate, series: Series, pin: Pin | None, night: str
) -> list[tuple[str, float | None, bool]]:
    """The gate's rules for a series: in words, the limit, and whether values below it break it.

    A limit is None where the baseline that it is relative to is missing.
    """
    found: list[tuple[str, float | None, bool]] = []
    if gate.min is not None:
        found.append((f"{gate.metric} >= {gate.min:g}", gate.min, True))
    if gate.max is not None:
        found.append((f"{gate.metric} <= {gate.max:g}", gate.max, False))
    if gate.tolerance is not None:
        told = f"{gate.metric} within {gate.tolerance:g} of the baseline"
        value = None if pin is None else pin.value
        sides = {"higher": (True,), "lower": (False,), None: (True, False)}[series.better]
        for below in sides:
            share = -gate.tolerance if below else gate.tolerance
            found.append((told, None if value is None else value + share * abs(value), below))
    return found


def _result(case: Case, series: Series, rule: str, bound: float | None, below: bool) -> GateResult:
    value = series.last.value

    def breaks(one: float) -> bool:
        return bound is not None and (one < bound if below else one > bound)

    status: GateStatus = "pass"
    why = ""
    if value is None:
        status, why = "unknown", "it was not measured"
    elif bound is None:
        status, why = "no_baseline", "there was no baseline yet"
    elif breaks(value):
        status, why = _broken(case, series, breaks)
    side = "below" if below else "above"
    text = (
        f"{series.name}: {words.number(value, 4)} {series.point.unit}, {rule}"
        if status in ("pass", "unknown", "no_baseline")
        else f"{series.name}: {words.number(value, 4)} {series.point.unit} is {side} "
        f"{words.number(bound, 4)} ({rule})"
    )
    return GateResult(
        series=series.name,
        entry=case.entry,
        rule=rule,
        value=value,
        bound=bound,
        status=status,
        text=f"{text}; {why}." if why else f"{text}.",
    )


def _broken(case: Case, series: Series, breaks: Callable[[float], bool]) -> tuple[GateStatus, str]:
    """What a breach is worth: known, failed, refuted by fresh blocks, or not decided."""
    record = accepting.known_bad(case.accepted, series.name, case.night)
    if record is not None:
        return "known", f"known: {words.one_line(record.reason, 200)}"
    fresh = series.last.fresh
    if not fresh:
        return "unconfirmed", "not confirmed on fresh blocks"
    mean = fmean(fresh)
    told = f"{words.plural(len(fresh), 'fresh block')} gave {words.number(mean, 4)}"
    return ("fail", f"{told} too") if breaks(mean) else ("refuted", told)


def _unknown(case: Case, gate: Gate) -> GateResult:
    known = sorted({s.metric for s in case.current})
    near = hint(gate.metric, known) if gate.metric not in known and known else ""
    where = "/".join((case.entry, "*", gate.variant or "*", gate.load or "*", gate.metric))
    return GateResult(
        series=where,
        entry=case.entry,
        rule=gate.metric,
        value=None,
        bound=None,
        status="unknown",
        text=f"{where}: no such figure was measured{near}.",
    )
