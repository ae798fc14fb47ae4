"""From the cells of a capacity search to `capacity.json`. The same cells give the same answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from harness.analyse.bracket import By, Judged, Look, Point, Search, bracket, next_value, points
from harness.analyse.data import CellData, RunData
from harness.analyse.statistics import autocorrelation_time, wilson
from harness.findings import Metrics
from harness.measure.metrics import cell_metrics
from harness.measure.slo import Slo, attained, meets, slo_of, strain
from harness.measure.steady import ended_ns, placed_ns
from harness.measure.table import RequestTable
from harness.records import (
    SCHEMA_VERSION,
    VARIANTS,
    LaunchRecord,
    Record,
    RequestRecord,
    Variant,
)


class Figures(Record, frozen=True, kw_only=True):
    """A probe's figures, means over its blocks; None where undefined.

    `tokens_per_s_user`: one over the mean TPOT. `tokens_per_s_gpu`: of the whole server where it
    has no GPU, or none that is known.
    """

    ttft_mean_s: float | None
    ttft_p99_s: float | None
    tpot_mean_s: float | None
    tpot_p99_s: float | None
    e2el_mean_s: float | None
    output_tokens_per_s: float | None
    tokens_per_s_user: float | None
    tokens_per_s_gpu: float | None
    request_rate_achieved: float | None
    goodput_per_s: float | None


class Probe(Record, frozen=True, kw_only=True):
    """One load that was tried: `met` of `requests` met the levels, `low` to `high` the interval.

    `failed`: requests of its cells that failed; those in the steady window count as missed.

    `independent`: how many independent requests they count for, as they share a queue.
    `overloaded`: it had no steady state, or the server refused so much that the cell was given up.
    """

    value: float
    cells: tuple[str, ...]
    requests: int
    met: int
    independent: float
    share: float | None
    low: float
    high: float
    judged: Judged
    overloaded: bool
    figures: Figures
    failed: int = 0


class VariantCapacity(Record, frozen=True, kw_only=True):
    """One variant's answer. `highest_met` None: no load was shown to hold the levels.

    `lowest_missed` None: no load was shown to break them. `undecided` loads lie between.
    `finished` False: the search was cut short, and would have looked at `next_load`.
    """

    engine: str
    variant: Variant
    highest_met: float | None
    lowest_missed: float | None
    undecided: tuple[float, ...]
    probes: tuple[Probe, ...]
    finished: bool = True
    next_load: float | None = None


class Capacity(Record, frozen=True, kw_only=True):
    """`capacity.json`. Loads are requests per second, or a concurrency, as `by` says."""

    schema_version: str
    run_id: str
    by: By
    slo: dict[str, float | None]
    slo_words: str
    attain: float
    confidence: float
    resolution: float
    gpus: dict[str, int | None]
    variants: tuple[VariantCapacity, ...]


def look_of(data: CellData, slo: Slo, search: Search) -> Look:
    """One cell as the search sees it: the requests of its steady window."""
    load = data.cell.load
    value = load.request_rate if search.by == "rate" else load.concurrency
    window = data.window()
    inside = data.records if window is None else data.records.where(window.has(data.records))
    met, of = attained(inside, slo)
    growing = window is not None and window.growing
    return Look(
        value=float(value or 0),
        met=met,
        of=of,
        overloaded=growing or data.timeline.given_up,
        tau=tau_of(inside, slo),
        hopeless=wilson(*attained(alone(data.records), slo), search.z)[1] < search.attain,
    )


def alone(records: Sequence[RequestRecord]) -> RequestTable:
    """The requests that had the server to themselves: no other was under way with them."""
    table = RequestTable.of(records)
    begins, ends = placed_ns(table), ended_ns(table)
    rows = np.flatnonzero(begins.known & ends.known)
    rows = rows[np.lexsort((ends.values[rows], begins.values[rows]))]
    begin, end = begins.values[rows], ends.values[rows]
    before = np.maximum.accumulate(end)[:-1] <= begin[1:]
    after = end[:-1] <= begin[1:]
    free = np.concatenate(([True], before)) & np.concatenate((after, [True]))
    return table.take(rows[free[: len(rows)]])


UNANSWERED = 2.0
"""The strain of a request that was not answered: beyond the levels."""


def tau_of(records: Sequence[RequestRecord], slo: Slo) -> float:
    """Over how many requests, in the order of sending, the strain on the levels is alike.

    It is taken from the figures and not from whether they met their bounds: near the capacity a
    queue comes and goes slowly, also while all requests still meet the levels.
    """
    table = RequestTable.of(records)
    placed = placed_ns(table)
    at = np.where(placed.known, placed.values, 0)
    strains = strain(table, slo)[np.lexsort((table.ints("index").values, at))]
    told = np.where(np.isnan(strains), UNANSWERED, np.minimum(strains, 4.0))
    return autocorrelation_time(told.tolist())


def capacity_of(run: RunData, search: Search) -> Capacity:
    """The answer that the saved cells give."""
    slo = slo_of(run.plan(run.engines()[0]))
    sides = dict.fromkeys([*_searched(run), *((c.cell.engine, c.cell.variant) for c in run.cells)])
    return Capacity(
        schema_version=SCHEMA_VERSION,
        run_id=run.manifest.run_id,
        by=search.by,
        slo=msgspec.to_builtins(slo),
        slo_words=slo.words(),
        attain=search.attain,
        confidence=search.confidence,
        resolution=search.resolution,
        gpus={engine: gpus_of(run, engine) for engine in run.engines()},
        variants=tuple(_variant(run, engine, variant, search) for engine, variant in sides),
    )


SEARCHED = "searched"
"""The key of a manifest's plan that tells each engine's variants to be searched."""


def _searched(run: RunData) -> list[tuple[str, Variant]]:
    """The variants that the search was to look at, also those it did not come to."""
    told = run.manifest.plan.get(SEARCHED, {})
    return [(engine, v) for engine, its in told.items() for v in VARIANTS if v in its]


def gpus_of(run: RunData, engine: str) -> int | None:
    """How many GPUs serve; None for a CPU, and for a server that someone else started."""
    return gpus_told(run.plan(engine), run.launches, engine)


def gpus_told(plan: dict[str, Any], launches: Iterable[LaunchRecord], engine: str) -> int | None:
    """The same from an engine's plan and the starts of the run."""
    told = plan.get("engine", {})
    launched = any(launch.argv for launch in launches if launch.engine == engine)
    known = launched and told.get("device", "cpu") != "cpu" and told.get("tensor_parallel")
    return int(told["tensor_parallel"]) if known else None


def _variant(run: RunData, engine: str, variant: Variant, search: Search) -> VariantCapacity:
    slo, gpus = slo_of(run.plan(engine)), gpus_of(run, engine)
    cells = run.select(engine, variant)
    looks = [look_of(c, slo, search) for c in cells]
    found = bracket(looks, search)
    coming = next_value(looks, search)
    by_value: dict[float, list[CellData]] = {}
    for look, data in zip(looks, cells, strict=True):
        by_value.setdefault(look.value, []).append(data)
    return VariantCapacity(
        engine=engine,
        variant=variant,
        highest_met=found.highest_met,
        lowest_missed=found.lowest_missed,
        undecided=found.undecided,
        probes=tuple(_probe(p, by_value[p.value], slo, gpus) for p in points(looks, search)),
        finished=coming is None,
        next_load=coming,
    )


def _probe(point: Point, cells: list[CellData], slo: Slo, gpus: int | None) -> Probe:
    figures = [cell_metrics(c.records, c.window(), meets=partial(meets, slo=slo)) for c in cells]
    return Probe(
        value=point.value,
        cells=tuple(c.cell.cell_id for c in cells),
        requests=point.of,
        met=point.met,
        independent=point.independent,
        share=point.met / point.of if point.of else None,
        low=point.low,
        high=point.high,
        judged=point.judged,
        overloaded=point.overloaded,
        figures=_figures(figures, gpus),
        failed=sum(c.failed_share[0] for c in cells),
    )


def _figures(blocks: list[Metrics], gpus: int | None) -> Figures:
    def mean(values: list[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return fmean(known) if known else None

    tpot = mean([m.tpot_s.mean for m in blocks])
    speed = mean([m.output_tokens_per_s for m in blocks])
    due = [m.ttft_from_due_s or m.ttft_s for m in blocks]
    return Figures(
        ttft_mean_s=mean([d.mean for d in due]),
        ttft_p99_s=mean([d.p99 for d in due]),
        tpot_mean_s=tpot,
        tpot_p99_s=mean([m.tpot_s.p99 for m in blocks]),
        e2el_mean_s=mean([(m.e2el_from_due_s or m.e2el_s).mean for m in blocks]),
        output_tokens_per_s=speed,
        tokens_per_s_user=1 / tpot if tpot else None,
        tokens_per_s_gpu=None if speed is None else speed / (gpus or 1),
        request_rate_achieved=mean([m.request_rate_achieved for m in blocks]),
        goodput_per_s=mean([m.goodput_per_s for m in blocks]),
    )


def load_unit(by: By) -> str:
    """What loads are counted in, as the head of a column."""
    return "requests/s" if by == "rate" else "concurrency"


def at_load(by: By, value: float) -> str:
    """A load in words, for sentences."""
    return f"{value:g} requests/s" if by == "rate" else f"concurrency {value:g}"
