"""Gates: limits that a figure of an entry has to keep, absolute or relative to the baseline.

A gate that tonight's run does not keep is measured again: only what the fresh blocks do not keep
either has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from harness.analyse.series.gate import gate
from harness.analyse.statistics import log_mean
from harness.findings import Interval
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
    for one in case.gates:
        fits = [s for s in case.current if _is_of(one, s)]
        if not fits:
            found.append(_unknown(case, one))
        for series in fits:
            for rule, bound, below in bounds(one, series, pins.get(series.name), case.night):
                result, asked = _result(case, series, rule, bound, below)
                found.append(result)
                more = max(more, asked)
    return found, more


def _is_of(wanted: Gate, series: Series) -> bool:
    point = series.point
    return (
        fnmatchcase(point.metric, wanted.metric)
        and wanted.variant in (None, point.variant)
        and wanted.load in (None, point.load)
    )


def bounds(
    wanted: Gate, series: Series, pin: Pin | None, night: str
) -> list[tuple[str, float | None, bool]]:
    """The gate's rules for a series: in words, the limit, and whether values below it break it.

    A limit is None where the baseline that it is relative to is missing.
    """
    found: list[tuple[str, float | None, bool]] = []
    if wanted.min is not None:
        found.append((f"{wanted.metric} >= {wanted.min:g}", wanted.min, True))
    if wanted.max is not None:
        found.append((f"{wanted.metric} <= {wanted.max:g}", wanted.max, False))
    if wanted.tolerance is not None:
        told = f"{wanted.metric} within {wanted.tolerance:g} of the baseline"
        value = None if pin is None else pin.value
        sides = {"higher": (True,), "lower": (False,), None: (True, False)}[series.better]
        for below in sides:
            share = -wanted.tolerance if below else wanted.tolerance
            found.append((told, None if value is None else value + share * abs(value), below))
    return found


def _result(
    case: Case, series: Series, rule: str, bound: float | None, below: bool
) -> tuple[GateResult, int]:
    """What a rule says of a series tonight, and how many fresh blocks are wanted for it."""
    value = series.last.value
    status: GateStatus = "pass"
    why, more = "", 0
    if value is None:
        status, why = "unknown", "it was not measured"
    elif bound is None:
        status, why = "no_baseline", "there was no baseline yet"
    elif value < bound if below else value > bound:
        status, why, more = _broken(case, series, bound, below)
    side = "below" if below else "above"
    told = f"{series.name}: {words.number(value, 4)} {series.point.unit}"
    broken = status not in ("pass", "unknown", "no_baseline")
    text = f"{told} is {side} {words.number(bound, 4)} ({rule})" if broken else f"{told}, {rule}"
    result = GateResult(
        series=series.name,
        entry=case.entry,
        rule=rule,
        value=value,
        bound=bound,
        status=status,
        text=f"{text}; {why}." if why else f"{text}.",
    )
    return result, more


def _broken(case: Case, series: Series, bound: float, below: bool) -> tuple[GateStatus, str, int]:
    """What a breach is worth: known, failed, refuted by fresh blocks, or not decided yet.

    The fresh blocks' interval decides; where all that may be measured leaves it open, their mean.
    """
    record = accepting.known_bad(case.accepted, series.name, case.night)
    if record is not None:
        return "known", f"known: {words.one_line(record.reason, 200)}", 0
    fresh, config = series.last.fresh, case.config
    if not fresh:
        return "unconfirmed", "not confirmed on fresh blocks", config.blocks
    found = interval_of(fresh, config.confidence)
    side: Literal["higher", "lower"] = "higher" if below else "lower"
    said = gate(found, Interval(value=bound), better=side, tolerance=0.0, absolute=True).verdict
    told = f"{words.plural(len(fresh), 'fresh block')} gave {words.number(found.value, 4)}"
    if said == "undecided" and len(fresh) < config.looks * config.blocks:
        return "unconfirmed", f"{told}, which decides nothing yet", config.blocks
    kept = found.value >= bound if below else found.value <= bound
    if said == "pass" or (said == "undecided" and kept):
        return "refuted", told, 0
    return "fail", f"{told} too", 0


def interval_of(values: Sequence[float], confidence: float) -> Interval:
    """The mean of blocks with Student's t interval; none of a single block."""
    found = log_mean(values)  # on the values' own scale
    low, high = found.ends(confidence) or (None, None)
    return Interval(value=found.mean, ci_low=low, ci_high=high)


def _unknown(case: Case, wanted: Gate) -> GateResult:
    known = sorted({s.metric for s in case.current})
    near = hint(wanted.metric, known) if wanted.metric not in known and known else ""
    where = "/".join((case.entry, "*", wanted.variant or "*", wanted.load or "*", wanted.metric))
    return GateResult(
        series=where,
        entry=case.entry,
        rule=wanted.metric,
        value=None,
        bound=None,
        status="unknown",
        text=f"{where}: no such figure was measured{near}.",
    )
