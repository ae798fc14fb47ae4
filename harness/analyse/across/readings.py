"""A run's figures block by block, as far as they can be compared with another run's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from harness.analyse.across.metrics import COMPARED, GPU_MEMORY, LATENCIES, PARTS, POSITION
from harness.analyse.across.records import Side, Stored
from harness.findings import Acceptance, CategoryFigures, CellSummary, Metrics
from harness.records import LoadPoint

TAIL_NEEDS = 100
"""A p99 is compared from so many requests of a block on: of fewer it is the slowest one."""
Unit = tuple[int, int]
"""Repeat and block."""


class Key(NamedTuple):
    """What a figure is of. `load`: without how long it was driven; None: of a start."""

    engine: str
    side: Side
    load: LoadPoint | None
    category: str | None
    metric: str


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One block's value. Counts are kept apart, so that they can be pooled: offset + above / below.

    `below` None: the value is `above`.
    """

    above: float
    below: float | None = None
    offset: float = 0.0

    @property
    def value(self) -> float:
        """The figure."""
        return pooled([self])


Readings = dict[Key, dict[Unit, Reading]]


def pooled(parts: Sequence[Reading], least: float = 0.0) -> float:
    """Several blocks as one: of counts the ratio of their sums, else the geometric mean.

    `least`: a sum of nothing counts as so much. 0 where a geometric mean has no logarithm to take.
    """
    if all(p.below is not None for p in parts):
        above, offset = sum(p.above for p in parts), parts[0].offset
        above = above if offset else max(least, above)
        return offset + above / sum(p.below or 0.0 for p in parts)
    if any(p.above <= 0 for p in parts):
        return 0.0
    return math.exp(sum(math.log(p.above) for p in parts) / len(parts))


def plain(load: LoadPoint) -> LoadPoint:
    """A load without how long it was driven: so loads of two runs are matched."""
    return msgspec.structs.replace(load, num_requests=None, duration_s=None, num_output_tokens=None)


def ended(stored: Stored) -> list[CellSummary]:
    """The cells that nothing cut short and that measured something."""
    cut = {c.cell.cell_id for c in stored.run.cells if not c.to_its_end}
    return [
        c
        for c in stored.summary.cells
        if c.metrics is not None and c.status != "failed" and c.cell_id not in cut
    ]


def readings(stored: Stored) -> Readings:
    """Every figure that the run's summary holds, by block."""
    found: Readings = {}
    for cell in ended(stored):
        load, unit = plain(cell.load), (cell.repeat, cell.block)
        assert cell.metrics is not None
        told: list[tuple[str | None, str, Reading]] = []
        told += [(None, name, r) for name, r in _figures(cell, cell.metrics)]
        for of, figures in cell.categories.items():
            told += [(of, name, r) for name, r in _of_category(figures)]
        for category, name, reading in told:
            key = Key(cell.engine, cell.variant, load, category, name)
            found.setdefault(key, {})[unit] = reading
        for name, value in _of_start(cell):
            key = Key(cell.engine, cell.variant, None, None, name)
            found.setdefault(key, {}).setdefault((cell.repeat, 0), Reading(above=value))
    return found | _ratios(found)


def _figures(cell: CellSummary, metrics: Metrics) -> Iterator[tuple[str, Reading]]:
    for name in (COMPARED[0], "requests_per_s"):
        value = getattr(metrics, name)
        if value is not None:
            yield name, Reading(above=value)
    if metrics.goodput_per_s is not None and metrics.duration_s:
        met = metrics.goodput_per_s * metrics.duration_s
        yield "goodput_per_s", Reading(above=met, below=metrics.duration_s)
    for name in LATENCIES:
        told = getattr(metrics, name)
        for part in PARTS:
            value = getattr(told, part)
            if value is not None and (part != "p99" or told.n >= TAIL_NEEDS):
                yield f"{name}.{part}", Reading(above=value)
    asked = metrics.requests_ok + metrics.requests_failed + metrics.requests_dropped
    if asked:
        yield "answered", Reading(above=metrics.requests_ok, below=asked)
    if metrics.task_accuracy is not None and metrics.task_n:
        right = metrics.task_accuracy * metrics.task_n
        yield "task_accuracy", Reading(above=right, below=metrics.task_n)
    if cell.integrity is not None and cell.integrity.compared:
        parts = cell.integrity
        yield "identical", Reading(above=parts.identical, below=parts.compared)
    if cell.acceptance is not None and cell.acceptance.drafts:
        yield from _of_acceptance(cell.acceptance)
    memory = _gpu_memory(cell)
    if memory is not None:
        yield GPU_MEMORY, Reading(above=memory)


def _of_acceptance(told: Acceptance) -> Iterator[tuple[str, Reading]]:
    drafts = told.drafts
    yield "acceptance_length", Reading(above=told.accepted, below=drafts, offset=1.0)
    if told.drafted:
        yield "acceptance_rate", Reading(above=told.accepted, below=told.drafted)
    for at, share in enumerate(told.per_position or ()):
        yield f"{POSITION}.{at}", Reading(above=share * drafts, below=drafts)


def _of_category(told: CategoryFigures) -> Iterator[tuple[str, Reading]]:
    for name in ("ttft_s", "tpot_s"):
        value = getattr(told, name)
        if value is not None:
            yield f"{name}.mean", Reading(above=value)
    if told.acceptance is not None and told.acceptance.drafts:
        counts = told.acceptance
        yield "acceptance_length", Reading(above=counts.accepted, below=counts.drafts, offset=1.0)
    if told.task_accuracy is not None and told.task_n:
        yield (
            "task_accuracy",
            Reading(above=told.task_accuracy * told.task_n, below=told.task_n),
        )


def _of_start(cell: CellSummary) -> Iterator[tuple[str, float]]:
    phases = cell.startup
    ends = [p.end_s for p in phases]
    known = [end for end in ends if end is not None]
    if phases and len(known) == len(ends):
        yield "startup_s", max(known)
    for name in ("rss_bytes", "gpu_bytes"):
        most = [value for p in phases if (value := getattr(p, name)) is not None]
        if most and max(most) > 0:
            yield f"startup_{name}", float(max(most))


def _gpu_memory(cell: CellSummary) -> float | None:
    """The most that one of the engine's GPUs held; None where no GPU told it."""
    gpus = cell.telemetry.gpus if cell.telemetry is not None else ()
    gauges = [g.gauges.get("memory_used_bytes") for g in gpus if g.engine is not False]
    return max((g.most for g in gauges if g is not None), default=None)


def _ratios(found: Readings) -> Readings:
    """Speculative over baseline in the blocks that both variants have."""
    names = (COMPARED[0], *(f"{name}.mean" for name in LATENCIES))
    made: Readings = {}
    for key, spec in found.items():
        base = found.get(key._replace(side="baseline"))
        wanted = key.side == "speculative" and key.category is None and key.metric in names
        if base is None or not wanted:
            continue
        shared = {
            unit: Reading(above=reading.value / base[unit].value)
            for unit, reading in spec.items()
            if unit in base and base[unit].value > 0
        }
        if shared:
            made[key._replace(side="ratio")] = shared
    return made
