"""Figures of one engine, variant and load over a run's cells, each with its interval.

Starts are the units, as everywhere (`docs/statistics.md`): the blocks of a start are one value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Literal

import msgspec

from harness.analyse.estimates import pooled_ratio
from harness.analyse.statistics import log_mean
from harness.findings import CellSummary, Distribution, GpuFigures, Metrics
from harness.measure.definitions import DEFINITIONS
from harness.measure.metrics import per_position_conditional, pool
from harness.records import DraftCounts, Phase, Record

Better = Literal["higher", "lower"]
Units = Sequence[tuple[int, float | None]]
"""Values, each with the start (`repeat`) that it is of."""
CONFIDENCE = 0.95
PARTS = ("mean", "p50", "p90", "p99")
LATENCIES = (
    *("ttft_s", "tpot_s", "icl_s", "itl_s", "e2el_s", "ttft_from_due_s", "e2el_from_due_s"),
    *("time_to_first_answer_s", "time_to_first_reasoning_s"),
)
LAGS = ("send_lag_s", "connect_s")
"""Distributions whose values may be nothing, or below: no logarithm is taken of them."""
RATES = ("output_tokens_per_s", "requests_per_s", "request_rate_achieved", "goodput_per_s")
SHARES = ("goodput_share", "task_accuracy")


class Figure(Record, frozen=True, kw_only=True):
    """One scalar of a run, before it is known whose."""

    metric: str
    value: float | None
    unit: str
    better: Better | None
    ci_low: float | None = None
    ci_high: float | None = None
    n: int | None = None


def finite(value: float | None) -> float | None:
    """None for what is no number."""
    return float(value) if value is not None and math.isfinite(value) else None


def defined(metric: str, value: float | None) -> Figure:
    """A figure without an interval, of the unit and direction that `measure.definitions` tells.

    A name that is not defined there, as of another version, has neither.
    """
    known = DEFINITIONS.get(metric.partition(".")[0])
    unit, better = (known.unit, known.better) if known else ("", None)
    return Figure(metric=metric, value=finite(value), unit=unit, better=better)


def cell_figures(cells: Sequence[CellSummary]) -> Iterator[Figure]:
    """All figures of cells of one engine, variant and load; what no cell knows is left out."""
    usable = whole(cells)
    for name in LATENCIES:
        yield from _parts(name, usable, log=True)
    for name in LAGS:
        yield from _parts(name, usable, log=False)
    for name in (*RATES, *SHARES):
        values = _values(usable, lambda m, name=name: getattr(m, name))  # type: ignore[misc]
        yield from over_starts(defined(name, None), values, log=name in RATES)
    yield from _requests(cells)
    yield from _acceptance(usable)
    yield from _degenerate(usable)
    yield from _telemetry(usable)


def whole(cells: Sequence[CellSummary]) -> list[CellSummary]:
    """Those that ran to their end without a failure; where there is none, the partial ones.

    A cell cut short is of fewer requests, begun in an emptier server: another figure.
    """
    ended = [c for c in cells if c.status == "ok" and c.metrics is not None]
    return ended or [c for c in cells if c.status == "partial" and c.metrics is not None]


def over_starts(figure: Figure, values: Units, *, log: bool) -> Iterator[Figure]:
    """`figure` with the mean over starts, and Student's t interval where there are two or more.

    `log`: on the logarithmic scale, as `analyse.estimates` does; values not above 0 are left out.
    """
    starts: dict[int, list[float]] = defaultdict(list)
    for start, value in values:
        if value is not None and math.isfinite(value) and (value > 0 or not log):
            starts[start].append(math.log(value) if log else value)
    if not starts:
        return
    found = log_mean([fmean(own) for own in starts.values()])
    value = math.exp(found.mean) if log else found.mean
    ends = found.interval(CONFIDENCE) if log else found.ends(CONFIDENCE)
    low, high = ends or (None, None)
    if not log:  # none of these figures can be below 0, and no share above 1
        low = None if low is None else max(0.0, low)
        high = min(1.0, high) if high is not None and figure.unit == "fraction" else high
    yield msgspec.structs.replace(figure, value=value, ci_low=low, ci_high=high, n=found.units)


def _values(cells: Iterable[CellSummary], take: Callable[[Metrics], float | None]) -> Units:
    return [(c.repeat, take(c.metrics)) for c in cells if c.metrics is not None]


def _parts(name: str, cells: Sequence[CellSummary], *, log: bool) -> Iterator[Figure]:
    told: list[tuple[int, Distribution]] = []
    for cell in cells:
        found = getattr(cell.metrics, name)
        if found is not None:
            told.append((cell.repeat, found))
    for part in PARTS:
        values = [(start, getattr(found, part)) for start, found in told]
        yield from over_starts(defined(f"{name}.{part}", None), values, log=log)


def _requests(cells: Sequence[CellSummary]) -> Iterator[Figure]:
    """Of every cell, those that failed as well."""
    told = [c.metrics for c in cells if c.metrics is not None]
    if not told:
        return
    failed, ok = sum(m.requests_failed for m in told), sum(m.requests_ok for m in told)
    yield Figure(
        metric="requests_failed_share",
        value=failed / (failed + ok) if failed + ok else None,
        unit="fraction",
        better="lower",
        n=failed + ok,
    )
    yield defined("requests_dropped", sum(m.requests_dropped for m in told))
    late = [m.requests_late for m in told if m.requests_late is not None]
    if late:
        yield defined("requests_late", sum(late))


def _acceptance(cells: Sequence[CellSummary]) -> Iterator[Figure]:
    """Counts are pooled, ratios never averaged."""
    told = [c for c in cells if c.acceptance is not None]
    counts = [_counts(c) for c in told]
    pooled = pool(counts) if counts else None
    if pooled is None or not pooled.drafts:
        return
    starts = [pool([_counts(c) for c in own]) for own in _by_start(told)]
    parts = [s for s in starts if s is not None]
    yield _ratio("acceptance_length", [(s.accepted, s.drafts) for s in parts], plus=1)
    if pooled.drafted:
        yield _ratio("acceptance_rate", [(s.accepted, s.drafted or 0) for s in parts])
    for i in range(len(pooled.per_position or ())):
        reached = [((s.per_position or ())[i:][:1], s.drafts) for s in parts]
        yield _ratio(f"per_position.{i}", [(own[0] if own else 0, n) for own, n in reached])
    for i, share in enumerate(per_position_conditional(pooled) or ()):
        if share is not None:
            yield defined(f"per_position_conditional.{i}", share)


def _by_start(cells: Sequence[CellSummary]) -> list[list[CellSummary]]:
    starts: dict[int, list[CellSummary]] = defaultdict(list)
    for cell in cells:
        starts[cell.repeat].append(cell)
    return list(starts.values())


def _ratio(metric: str, parts: Sequence[tuple[float, float]], *, plus: float = 0) -> Figure:
    """Counts pooled over starts, and the jackknife's interval over them."""
    figure = defined(metric, None)
    found = pooled_ratio(parts, CONFIDENCE)
    if found is None:
        return figure
    value, half = found
    return Figure(
        metric=metric,
        value=plus + value,
        unit=figure.unit,
        better=figure.better,
        ci_low=None if half is None else plus + max(0.0, value - half),
        ci_high=None if half is None else plus + value + half,
        n=len(parts),
    )


def _counts(cell: CellSummary) -> DraftCounts | None:
    told = cell.acceptance
    assert told is not None
    own = told.sources.get(told.source)
    if own is not None and own.per_position is not None:
        return own
    # Positions may be those of the next best source; drafts and accepted are of the best.
    return DraftCounts(drafts=told.drafts, drafted=told.drafted, accepted=told.accepted)


def _degenerate(cells: Sequence[CellSummary]) -> Iterator[Figure]:
    told = [c.degenerate for c in cells if c.degenerate is not None]
    judged = sum(d.judged for d in told)
    if judged:
        share = sum(d.degenerate for d in told) / judged
        yield Figure(
            metric="degenerate_share", value=share, unit="fraction", better="lower", n=judged
        )


def start_figures(starts: Sequence[tuple[int, tuple[Phase, ...]]]) -> Iterator[Figure]:
    """What starts took: in all, phase by phase, and of memory. Of starts that came to their end."""
    ended = [(s, phases) for s, phases in starts if phases and phases[-1].end_s is not None]
    whole_s = [(start, phases[-1].end_s) for start, phases in ended]
    yield from over_starts(_seconds("startup_s"), whole_s, log=True)
    names = dict.fromkeys(p.phase for _, phases in ended for p in phases)
    for name in names:
        values = [(start, _took(phases, name)) for start, phases in ended]
        yield from over_starts(_seconds(f"startup_s.{name}"), values, log=False)
    for field in ("rss_bytes", "gpu_bytes"):
        most = [
            (s, max((v for p in phases if (v := getattr(p, field)) is not None), default=None))
            for s, phases in ended
        ]
        figure = Figure(metric=f"startup_{field}", value=None, unit="bytes", better="lower")
        yield from over_starts(figure, most, log=True)


def _seconds(metric: str) -> Figure:
    return Figure(metric=metric, value=None, unit="s", better="lower")


def _took(phases: Iterable[Phase], name: str) -> float | None:
    """A phase may come several times; nothing where it did not come in this start."""
    own = [p.end_s - p.start_s for p in phases if p.phase == name and p.end_s is not None]
    return sum(own) if own else None


def _telemetry(cells: Sequence[CellSummary]) -> Iterator[Figure]:
    told = [(c.repeat, c.telemetry) for c in cells if c.telemetry is not None]
    preempted = [t.preemptions for _, t in told if t.preemptions is not None]
    if preempted:
        total = float(sum(preempted))
        yield Figure(metric="preemptions", value=total, unit="preemptions", better="lower")
    plain: tuple[tuple[str, str, Better], ...] = (
        ("prefix_hit_rate", "fraction", "higher"),
        ("joules_per_output_token", "J/token", "lower"),
    )
    for name, unit, better in plain:
        values = [(start, getattr(t, name)) for start, t in told]
        figure = Figure(metric=name, value=None, unit=unit, better=better)
        yield from over_starts(figure, values, log=False)
    for where, name, part, unit, wanted in GAUGES:
        found: list[tuple[int, float | None]] = []
        for start, t in told:
            if where == "gpu":
                found.append((start, _of_gpus(t.gpus, name, part)))
            else:
                gauge = (t.engine if where == "engine" else t.host).get(name)
                found.append((start, None if gauge is None else getattr(gauge, part)))
        figure = Figure(metric=f"{where}.{name}.{part}", value=None, unit=unit, better=wanted)
        yield from over_starts(figure, found, log=False)


GAUGES: tuple[tuple[str, str, str, str, Better | None], ...] = (
    ("engine", "kv_usage", "most", "fraction", None),
    ("engine", "running", "mean", "requests", None),
    ("engine", "waiting", "mean", "requests", None),
    ("host", "cpu_share", "mean", "fraction", None),
    ("host", "memory_used_bytes", "most", "bytes", "lower"),
    ("gpu", "memory_used_bytes", "most", "bytes", "lower"),
    ("gpu", "power_w", "mean", "W", None),
    ("gpu", "sm_clock_mhz", "mean", "MHz", None),
    ("gpu", "temperature_c", "most", "degrees C", None),
)
"""Gauges that are followed: where, which, the part of it, unit, direction."""


def _of_gpus(gpus: Iterable[GpuFigures], name: str, part: str) -> float | None:
    """Over the engine's GPUs: the most of the most, the mean of the means."""
    own = [
        getattr(g.gauges[name], part) for g in gpus if g.engine is not False and name in g.gauges
    ]
    if not own:
        return None
    return max(own) if part == "most" else fmean(own)
