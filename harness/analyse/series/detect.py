"""Where a nightly series left its level.

The series is replayed night by night. On each night the likeliest change of all shapes (see
`templates`) is set against a level, a noise, a memory and weekdays that are estimated robustly from
the nights before. What was found on a night stays found when more nights come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from harness.analyse.series.records import DEFAULT, Change, Config, Decision
from harness.analyse.series.templates import Floats, Template
from harness.analyse.series.watch import Scan, Watch, direction_of
from harness.findings import Interval
from harness.measure.metrics import Better

MARGIN = 7
"""Where a change began is uncertain by some nights: a good version is taken from before them."""
LARGEST, LARGEST_LOG = 1e100, 700.0
"""Beyond these the scale has no numbers left: values to leave out, ends of an interval to cut."""
NONE_YET: Mapping[int, Decision] = {}


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """From a metric's values to where lower is worse and differences are relative, and back.

    Logarithms where all values are positive. Else (counts that may be 0) plain differences in
    units of `unit`, the typical size of the first nights.
    """

    sign: float
    unit: float | None

    def into(self, values: Floats) -> Floats:
        """NaN stays NaN, and what is too large for the scale becomes it."""
        with np.errstate(over="ignore"):
            placed = np.log(values) if self.unit is None else values / self.unit
        return np.where(np.abs(placed) < LARGEST, self.sign * placed, np.nan)

    def errors_into(self, errors: Floats, values: Floats) -> Floats:
        """Standard errors on the scale; a missing one is NaN."""
        own = errors / (np.abs(values) if self.unit is None else self.unit)
        return np.where(np.isfinite(own) & (own >= 0), own, np.nan)

    def back(self, place: float, half: float) -> Interval:
        """A place on the scale, give or take `half`, in the metric's unit."""
        ends = sorted(self._back(place + side * half) for side in (-1, 1))
        return Interval(value=self._back(place), ci_low=ends[0], ci_high=ends[1])

    def _back(self, place: float) -> float:
        if self.unit is None:
            return math.exp(min(self.sign * place, LARGEST_LOG))
        return self.sign * place * self.unit

    def ratio(self, loss: float, half: float) -> Interval | None:
        """After over before, with its interval; None where differences are not ratios."""
        return self.back(loss, half) if self.unit is None else None


def scale_of(values: Floats, better: Better | None, learn: int) -> Scale:
    """The scale of a series; without a better side lower counts as worse."""
    known = values[np.isfinite(values)]
    sign = -1.0 if better == "lower" else 1.0
    if (known > 0).all():
        return Scale(sign=sign, unit=None)
    typical = float(np.median(np.abs(known[:learn])))
    return Scale(sign=sign, unit=typical or float(np.abs(known).max()) or 1.0)


def detect(
    values: Sequence[float | None],
    *,
    errors: Sequence[float | None] | None = None,
    better: Better | None = "higher",
    config: Config = DEFAULT,
    decisions: Mapping[int, Decision] = NONE_YET,
) -> list[Change]:
    """Every change of a series by the night it was found; a suspicion of the last night is last.

    `values`: one for each calendar night, oldest first, None where nothing was measured; `errors`:
    the standard error of each by its own blocks, where known. `decisions`: what became of earlier
    suspicions, by the night they were found on: `confirmed` and `accepted` begin a new level (and
    are listed), `refuted` takes what was seen up to that night out of the evidence, `machine` lets
    the level follow once the loss has lasted three nights (and is not listed). A suspicion
    without a decision is not listed unless it is `certain` or the last night's. What is better
    than before is listed when it is certain. Values that are no finite numbers count as None.
    """
    numbers = _floats(values)
    if not np.isfinite(numbers).any():
        return []
    scale = scale_of(numbers, better, config.learn)
    own = None if errors is None else scale.errors_into(_floats(errors), numbers)[None]
    watch = Watch(scale.into(numbers)[None], own, config)
    changes: list[Change] = []
    last = len(numbers) - 1
    for night in range(len(numbers)):
        decision = decisions.get(night)
        if night < config.learn:
            watch.start[0] = night if decision in ("confirmed", "accepted") else watch.start[0]
            continue
        scan = watch.scan(night)
        if decision is None and not (scan.is_suspect(config) | scan.is_certain(config))[0]:
            continue
        template, change = told(watch, scan, 0, scale)
        stands = change is not None and change.certain
        if decide(watch, 0, scan, template, decision, certain=stands):
            if change is not None and decision != "machine":
                changes.append(msgspec.structs.replace(change, certain=True))
        elif change is not None and decision is None and night == last:
            changes.append(change)
    return changes


def decide(
    watch: Watch,
    row: int,
    scan: Scan,
    template: Template,
    decision: Decision | None,
    *,
    certain: bool,
) -> bool:
    """Apply what became of a night's suspicion; whether a new level begins."""
    if decision == "refuted":
        watch.dismiss(row, scan.night)
        return False
    if decision == "machine" and template.nights < 3:
        return False
    if decision is None and not certain:
        return False
    loss = float(scan.found.loss[row])
    watch.follow(row, scan.night, template, loss if math.isfinite(loss) else 0.0)
    return True


def told(watch: Watch, scan: Scan, row: int, scale: Scale) -> tuple[Template, Change | None]:
    """The likeliest change of one series on a night; no Change where nothing can be told."""
    template = watch.shape(scan, row)
    loss = float(scan.found.loss[row])
    if not math.isfinite(loss):
        return Template(kind="step", nights=1), None
    level, sigma = float(scan.found.level[row]), float(scan.noise.sigma[row])
    wide = watch.quantile(scan.noise, row)
    half, level_half = (wide * float(e[row]) for e in (scan.found.error, scan.found.level_error))
    before, after = scale.back(level, level_half), scale.back(level + loss, half)
    at = scan.night - template.nights + 1
    change = Change(
        at=at,
        found=scan.night,
        good=_good(watch, row, at),
        kind=template.kind,
        direction=direction_of(loss),
        before=before,
        after=after,
        difference=after.value - before.value,
        effect=scale.ratio(loss, half),
        noise=sigma if scale.unit is None else sigma * scale.unit,
        p_value=float(scan.p[row]),
        certain=bool(scan.is_certain(watch.config)[row]),
    )
    return template, change


def _good(watch: Watch, row: int, at: int) -> int:
    """A measured night of the level, MARGIN nights before `at` if the level is as old."""
    first = int(watch.start[row])
    known = np.flatnonzero(np.isfinite(watch.values[row, first:at])) + first
    surely = known[known <= at - MARGIN]
    return int(surely[-1] if len(surely) else known[0])


def _floats(values: Sequence[float | None]) -> Floats:
    """Numbers, NaN for what is missing or no finite number."""
    numbers = np.array([math.nan if v is None else float(v) for v in values], dtype=float)
    return np.where(np.isfinite(numbers), numbers, math.nan)
