"""Each variant's own figures with their intervals, the acceptance length among them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.analyse.compare import COMPARED, interval_confidence, value_of
from harness.analyse.data import CellData, RunData, by_repeat
from harness.analyse.statistics import log_mean, percent_of, t_quantile
from harness.findings import Metrics, VariantEstimate
from harness.measure.columns import Drafts
from harness.measure.metrics import pool
from harness.records import VARIANTS, DraftCounts

ACCEPTANCE = "acceptance_length"


def estimates(
    run: RunData, metrics: dict[str, Metrics], counts: dict[str, DraftCounts | None]
) -> list[VariantEstimate]:
    """Of every engine, load and variant. `counts`: each speculative cell's drafts, by its id."""
    found: list[VariantEstimate | None] = []
    for engine in run.engines():
        confidence = interval_confidence(run, engine)
        for load in run.loads(engine):
            for variant in VARIANTS:
                cells = [c for c in run.select(engine, variant, load) if c.to_its_end and c.ok]
                found += [_figure(name, cells, metrics, confidence) for name in COMPARED]
                found.append(_acceptance(cells, counts, confidence))
    return [f for f in found if f is not None]


def _starts(cells: Sequence[CellData]) -> list[list[CellData]]:
    return by_repeat(cells, lambda c: c.cell.repeat)


def _figure(
    name: str, cells: Sequence[CellData], metrics: dict[str, Metrics], confidence: float
) -> VariantEstimate | None:
    logs = []
    for own in _starts(cells):
        values = [value_of(metrics[c.cell.cell_id], name) for c in own]
        known = [math.log(v) for v in values if v is not None and v > 0]
        if known:
            logs.append(sum(known) / len(known))
    if not logs:
        return None
    mean = log_mean(logs)
    low, high = mean.interval(confidence) or (None, None)
    interval = f"{percent_of(confidence)} t interval on the log scale"
    method = f"geometric mean over {len(logs)} starts, {interval}"
    return _estimate(name, cells[0], (math.exp(mean.mean), low, high), len(logs), method)


def _acceptance(
    cells: Sequence[CellData], counts: dict[str, DraftCounts | None], confidence: float
) -> VariantEstimate | None:
    """1 + accepted / drafts. Starts are the units; of a single one its requests stand in."""
    pooled = [pool([counts.get(c.cell.cell_id) for c in own]) for own in _starts(cells)]
    parts = [(p.accepted, p.drafts) for p in pooled if p is not None and p.drafts]
    what = "starts"
    if len(parts) == 1:
        own = Drafts.join([c.ok.drafts for c in cells])
        if len(own.told) > 1 and (own.drafts > 0).all():
            parts = list(zip(own.accepted.tolist(), own.drafts.tolist(), strict=True))
            what = "requests of one start"
    found = pooled_ratio(parts, confidence)
    if found is None:
        return None
    value, half = found
    ends = (None, None) if half is None else (1 + max(0.0, value - half), 1 + value + half)
    interval = f"{percent_of(confidence)} t interval"
    method = f"1 + accepted / drafts pooled over {len(parts)} {what}, {interval}"
    return _estimate(ACCEPTANCE, cells[0], (1 + value, *ends), len(parts), method)


def pooled_ratio(
    parts: Sequence[tuple[float, float]], confidence: float
) -> tuple[float, float | None] | None:
    """Sum of the first over sum of the second, and half its interval's width.

    The jackknife: how far the ratio moves when each unit is left out in turn (R. G. Miller,
    Biometrika 61, 1974). Where units differ in size it holds better than the usual linearisation.
    """
    n = len(parts)
    above, below = sum(a for a, _ in parts), sum(b for _, b in parts)
    if n == 0 or below <= 0:
        return None
    ratio = above / below
    if n < 2 or any(b >= below for _, b in parts):
        return ratio, None
    without = [(above - a) / (below - b) for a, b in parts]
    mean = sum(without) / n
    variance = (n - 1) / n * sum((w - mean) ** 2 for w in without)
    return ratio, t_quantile(0.5 + confidence / 2, n - 1) * math.sqrt(variance)


def _estimate(
    name: str,
    data: CellData,
    told: tuple[float, float | None, float | None],
    units: int,
    method: str,
) -> VariantEstimate:
    value, low, high = told
    return VariantEstimate(
        metric=name,
        engine=data.cell.engine,
        variant=data.cell.variant,
        load=data.cell.load,
        value=value,
        ci_low=low,
        ci_high=high,
        units=units,
        method=method,
    )
