"""A series that is too young for its own history: tonight against the pinned baseline.

Until a series has the nights that `detect` learns from, the nights since the baseline are its
level. How far they scatter counts, and where they are few, how far the starts of one run do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import TYPE_CHECKING

from harness.analyse.series.confirm import confirm
from harness.analyse.series.records import Change, Config
from harness.analyse.statistics import t_p_value, t_quantile
from harness.findings import Interval
from harness.nightly import accepted as accepting
from harness.nightly.folders import night_order
from harness.nightly.pins import Pin
from harness.nightly.places import places_of
from harness.nightly.records import Finding, FindingStatus
from harness.nightly.series import Reading, Series
from harness.nightly.telling import finding_of

if TYPE_CHECKING:
    from harness.nightly.judge import Case

LEAST = 0.03
"""A smaller difference to a young baseline is not worth a fresh run."""
SUSPECT = 0.05
"""Two-sided p-value of a difference that is worth one."""
OPEN = ("confirmed", "unconfirmed", "known")


def differences(case: Case, series: Series, pin: Pin | None) -> tuple[list[Finding], int]:
    """The difference to the baseline, if tonight shows one, and the fresh blocks wanted for it."""
    if pin is None or pin.value <= 0 or pin.night == case.night or not series.last.value:
        return [], 0
    change = compared(series, pin, _nights_open(case, series), case.config)
    if change is None:
        return [], 0
    places = places_of(series)
    record = accepting.known_bad(case.accepted, series.name, case.night)
    if record is not None:
        return [finding_of(series, places, change, source="baseline", known=record.reason)], 0
    if change.direction == "better":
        found = finding_of(series, places, change, source="baseline", status="unconfirmed")
        return [found], 0
    if _stood(case, series):
        told = "it stands since an earlier night"
        found = finding_of(series, places, change, source="baseline", status="confirmed", why=told)
        return [found], 0
    last = series.last
    said = confirm(
        change,
        last.fresh,
        reference=last.control or None,
        better=series.better,
        config=case.config,
    )
    status: FindingStatus = "unconfirmed" if said.verdict == "undecided" else said.verdict
    why = said.why if last.fresh else None
    found = finding_of(series, places, change, source="baseline", status=status, why=why)
    return [found], said.more


def compared(series: Series, pin: Pin, bad: int, config: Config) -> Change | None:
    """Tonight, with the `bad` nights before it, against the nights since the baseline.

    None where nothing is shown. Student's t on logarithms; with a single good night the starts of
    the runs give the error.
    """
    begun = night_order(pin.night)
    values = [
        r for r in series.readings if r.value and r.value > 0 and night_order(r.night) >= begun
    ]
    if not values:
        return None
    cut = max(len(values) - 1 - bad, 0)
    good, new = values[:cut], values[cut:]
    level_logs = [math.log(r.value) for r in good if r.value]
    if not any(r.night == pin.night for r in good):
        level_logs.append(math.log(pin.value))
    new_logs = [math.log(r.value) for r in new if r.value]
    error, degrees = _error(good, new, level_logs, new_logs)
    level, now = fmean(level_logs), fmean(new_logs)
    loss = now - level
    wide = t_quantile(0.5 + config.confidence / 2, degrees)
    if error is None or abs(math.expm1(loss)) < max(LEAST, config.least):
        return None
    p_value = t_p_value(loss, error, degrees)
    if p_value >= SUSPECT:
        return None
    places = places_of(series)
    last = len(places.values) - 1
    begin = places.at[new[0].night]
    worse = (loss < 0) == (series.better == "higher")
    half = wide * error
    return Change(
        at=begin,
        found=last,
        good=max(begin - 1, 0),
        kind="step",
        direction="worse" if worse else "better",
        before=Interval(value=math.exp(level)),
        after=Interval(value=math.exp(now)),
        difference=math.exp(now) - math.exp(level),
        effect=Interval(
            value=math.exp(loss), ci_low=math.exp(loss - half), ci_high=math.exp(loss + half)
        ),
        noise=error,
        p_value=p_value,
        certain=False,
    )


def _error(
    good: Sequence[Reading], new: Sequence[Reading], level: list[float], now: list[float]
) -> tuple[float | None, int]:
    """Standard error of the difference, relative, and its degrees of freedom.

    Nights scatter at least as their own starts do: the larger of the two counts.
    """
    inside = [(r.error / r.value) ** 2 for r in (*good, *new) if r.error is not None and r.value]
    within = fmean(inside) if inside else None
    degrees = len(level) - 1 + len(now) - 1
    if degrees >= 1:
        squares = sum(variance(part) * (len(part) - 1) for part in (level, now) if len(part) > 1)
        night = max(squares / degrees, within or 0.0)
    elif within is None:
        return None, 1
    else:
        night, degrees = within, 2 * max(len(inside), 1)
    return math.sqrt(night * (1 / len(level) + 1 / len(now))), max(degrees, 1)


def _nights_open(case: Case, series: Series) -> int:
    """How many nights right before tonight were worse than the baseline already."""
    measured = [r.night for r in series.readings if r.value is not None][:-1]
    bad = {n.night for n in case.nights if _open_in(n.findings, series.name)}
    count = 0
    for night in reversed(measured):
        if night not in bad:
            break
        count += 1
    return count


def _open_in(findings: Sequence[Finding], series: str) -> bool:
    return any(
        f.series == series
        and f.source == "baseline"
        and f.direction == "worse"
        and f.status in OPEN
        for f in findings
    )


def _stood(case: Case, series: Series) -> bool:
    """Whether the last night confirmed the difference already."""
    for night in reversed(case.nights):
        own = [f for f in night.findings if f.series == series.name and f.source == "baseline"]
        if any(e.name == series.entry and e.status == "done" for e in night.entries):
            return any(f.status == "confirmed" and f.direction == "worse" for f in own)
    return False
