"""A value with its interval against a pinned baseline: pass, fail, or not known yet."""

from __future__ import annotations

import math
from typing import Literal

from harness.analyse.series.records import GateResult
from harness.findings import Interval
from harness.measure.metrics import Better

Verdict = Literal["pass", "fail", "undecided"]


def gate(
    value: Interval | None,
    baseline: Interval,
    *,
    better: Better | None,
    tolerance: float,
    absolute: bool = False,
    exact: bool = False,
) -> GateResult:
    """Fail where the change is surely beyond the tolerance, pass where it surely is not.

    `tolerance`: of the change to the worse side that is let pass, relative to the baseline, or in
    the metric's unit with `absolute`; to either side where `better` is None. The baseline without
    an interval is a number that was agreed. The value without one decides nothing, unless it is
    `exact` (a count, a size). Intervals are taken for independent; that of a difference is by the
    method of variance estimates recovery (G. Y. Zou and A. Donner, Statistics in Medicine 27,
    2008, 1693), on the log scale for a ratio. A ratio needs a positive baseline and a value that is
    not negative; else ValueError.
    """
    if tolerance < 0 or not math.isfinite(tolerance):
        raise ValueError(f"tolerance {tolerance:g}: a gate needs one of 0 or more")
    limit = tolerance if better == "lower" else -tolerance
    if value is None or not math.isfinite(value.value):
        return _unknown(limit, absolute, "there is no value tonight")
    if not absolute and (baseline.value <= 0 or value.value < 0):
        raise ValueError(
            f"{value.value:g} against {baseline.value:g} is no ratio: make the gate absolute"
        )
    low, high = _ends(value)
    if exact:
        low = high = value.value
    change = _difference(value.value, (low, high), baseline, absolute)
    verdict = _verdict(change, better, tolerance)
    return GateResult(
        verdict=verdict,
        change=change,
        limit=limit,
        absolute=absolute,
        why=_why(verdict, change, better, tolerance, absolute),
    )


def _difference(
    value: float, ends: tuple[float | None, float | None], baseline: Interval, absolute: bool
) -> Interval:
    """The change and where it may lie; without an interval of the value, none."""

    def on(place: float) -> float:
        return place if absolute else math.log(place) if place > 0 else -math.inf

    def off(place: float) -> float:
        return place if absolute else math.expm1(place)

    middle = on(value) - on(baseline.value)
    low, high = ends
    if low is None or high is None:
        return Interval(value=off(middle))
    base_low, base_high = (baseline.value if e is None else e for e in _ends(baseline))
    # -inf - -inf would be NaN: an end at nothing is no distance from a value at nothing
    below, above = _gap(on(value), on(low)), _gap(on(high), on(value))
    base_below, base_above = (
        _gap(on(baseline.value), on(base_low)),
        _gap(on(base_high), on(baseline.value)),
    )
    return Interval(
        value=off(middle),
        ci_low=off(middle - math.hypot(below, base_above)),
        ci_high=off(middle + math.hypot(above, base_below))
        if math.isfinite(middle)
        else off(middle),
    )


def _gap(high: float, low: float) -> float:
    return 0.0 if high == low else high - low


def _ends(value: Interval) -> tuple[float | None, float | None]:
    """The interval's ends; none where one is missing or no number."""
    ends = (value.ci_low, value.ci_high)
    if any(e is None or not math.isfinite(e) for e in ends):
        return None, None
    return ends


def _verdict(change: Interval, better: Better | None, tolerance: float) -> Verdict:
    low, high = change.ci_low, change.ci_high
    if low is None or high is None:
        return "undecided"
    # a ratio that went through logarithms equals its limit only up to rounding
    room = tolerance + 1e-12
    fails = (better != "lower" and high < -room) or (better != "higher" and low > room)
    passes = (better == "lower" or low >= -room) and (better == "higher" or high <= room)
    return "fail" if fails else "pass" if passes else "undecided"


def _unknown(limit: float, absolute: bool, why: str) -> GateResult:
    return GateResult(verdict="undecided", change=None, limit=limit, absolute=absolute, why=why)


def _why(
    verdict: Verdict, change: Interval, better: Better | None, tolerance: float, absolute: bool
) -> str:
    def told(number: float) -> str:
        return f"{number:+.4g}" if absolute else f"{number:+.1%}"

    side = {"higher": told(-tolerance), "lower": told(tolerance)}.get(
        better or "", told(tolerance).replace("+", "±")
    )
    if change.ci_low is None or change.ci_high is None:
        return f"{told(change.value)} has no interval: it decides nothing against {side}"
    said = {
        "pass": "within what is let pass",
        "fail": "surely beyond what is let pass",
        "undecided": "may lie on either side of what is let pass",
    }[verdict]
    return f"{told(change.value)} ({told(change.ci_low)} to {told(change.ci_high)}), {said}, {side}"
