"""Each figure of each entry followed through the nights, from what the nights have kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from harness.analyse.statistics import t_quantile
from harness.findings import Summary
from harness.history.points import points_of
from harness.history.records import Point
from harness.nightly.records import EntryPoints
from harness.records import Manifest

INTERVAL = 0.975
"""The upper end of a point's two-sided interval: 95%."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One night's value. `error`: its standard error, in the metric's unit; None: not known.

    `fresh`: each block that a suspect was measured again by; `control`: those of a good version.
    """

    night: str
    run: str
    value: float | None
    error: float | None = None
    fresh: tuple[float, ...] = ()
    control: tuple[float, ...] = ()


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one entry: its readings, the oldest first, each of a night of its own."""

    name: str
    entry: str
    point: Point
    """The latest, for what all of them have in common: metric, unit, which way is better."""
    readings: tuple[Reading, ...]

    @property
    def metric(self) -> str:
        """The metric's name."""
        return self.point.metric

    @property
    def better(self) -> Literal["higher", "lower"] | None:
        """Which way is better; None: neither."""
        return self.point.better

    @property
    def last(self) -> Reading:
        """Tonight's, or the last that there is."""
        return self.readings[-1]


def name_of(entry: str, point: Point) -> str:
    """A series' name, as `accept` takes it."""
    return "/".join((entry, point.engine, point.variant, point.load, point.metric))


def error_of(point: Point) -> float | None:
    """The standard error that a point's 95% interval tells, in the metric's unit."""
    if point.ci_low is None or point.ci_high is None:
        return None
    units = point.n
    width = t_quantile(INTERVAL, units - 1) if units is not None and 2 <= units <= 30 else 1.96
    error = (point.ci_high - point.ci_low) / (2 * width)
    return error if math.isfinite(error) and error >= 0 else None


def series_of(entry: str, kept: Sequence[EntryPoints], digest: str | None) -> dict[str, Series]:
    """The entry's series by name. `kept`: its nights, the oldest first.

    Nights that measured another thing under the entry's name (`digest`) are left out, and points
    of void runs.
    """
    found: dict[str, list[Reading]] = {}
    points: dict[str, Point] = {}
    for night in kept:
        if digest is not None and night.digest != digest:
            continue
        for name, point in _by_name(entry, night.points).items():
            points[name] = point
            found.setdefault(name, []).append(
                Reading(
                    night=night.night,
                    run=night.run,
                    value=point.value,
                    error=error_of(point),
                    fresh=night.fresh.get(name, ()),
                    control=night.control.get(name, ()),
                )
            )
    return {
        name: Series(name=name, entry=entry, point=points[name], readings=tuple(readings))
        for name, readings in found.items()
    }


def _by_name(entry: str, points: Iterable[Point]) -> dict[str, Point]:
    return {name_of(entry, p): p for p in points if not p.void}


def blocks_of(entry: str, summary: Summary, manifest: Manifest) -> dict[str, tuple[float, ...]]:
    """A run's figures start by start, by series: what one more start would give another one of.

    A ratio is that of the two variants' starts of one pair.
    """
    found: dict[str, list[float]] = {}
    for repeat in sorted({c.repeat for c in summary.cells}):
        cells = tuple(c for c in summary.cells if c.repeat == repeat)
        alone = msgspec.structs.replace(
            summary, cells=cells, estimates=(), comparisons=(), speed=(), integrity=(), parity=()
        )
        own = [p for p in points_of(alone, manifest) if p.value is not None]
        for point in (*own, *_ratios(own)):
            if point.value is not None:
                found.setdefault(name_of(entry, point), []).append(point.value)
    return {name: tuple(values) for name, values in found.items()}


def _ratios(points: Sequence[Point]) -> list[Point]:
    """Speculative over baseline, of every figure that both have."""
    base = {(p.engine, p.load, p.metric): p.value for p in points if p.variant == "baseline"}
    found = []
    for point in points:
        below = base.get((point.engine, point.load, point.metric))
        if point.variant == "speculative" and point.value is not None and below:
            value = point.value / below
            found.append(msgspec.structs.replace(point, variant="ratio", value=value))
    return found
