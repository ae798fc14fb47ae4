"""Speculative against baseline at each load, over paired, interleaved blocks."""

from __future__ import annotations

from pathlib import PurePath
from statistics import geometric_mean

import msgspec

from harness.analyse.data import CellData, RunData, pairs
from harness.analyse.statistics import paired_ratio, verdict
from harness.errors import one_line
from harness.measure.metrics import DEFINITIONS
from harness.records import Comparison, LoadPoint, Metrics

DASH = "\N{EN DASH}"
COMPARED = ("output_tokens_per_s", "ttft_s", "tpot_s", "e2el_s")
"""Latencies are compared by their means over a block's requests."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One metric in a baseline block and in its speculative partner."""

    repeat: int
    baseline: float
    candidate: float


def value_of(metrics: Metrics, name: str) -> float | None:
    """A figure of a cell as one number: distributions by their mean."""
    value = getattr(metrics, name)
    return value if value is None or isinstance(value, float) else value.mean


def compare(run: RunData, metrics: dict[str, Metrics]) -> list[Comparison]:
    """Every engine's comparisons; `metrics` are the cells' own, by cell id."""
    found: list[Comparison] = []
    for engine in run.engines():
        compare_plan = run.plan(engine)["compare"]
        for load in run.loads(engine):
            cells = [c for c in run.select(engine, load=load) if c.timeline.interrupted is None]
            partners = pairs(cells)
            withheld = any(c.many_failed for both in partners for c in both)
            for name in COMPARED:
                comparison = compare_metric(name, partners, metrics, compare_plan)
                if comparison is not None and withheld:
                    comparison = msgspec.structs.replace(comparison, verdict="undecided")
                if comparison is not None:
                    found.append(comparison)
    return found


def compare_metric(
    name: str,
    cells: list[tuple[CellData, CellData]],
    metrics: dict[str, Metrics],
    compare_plan: dict[str, float],
) -> Comparison | None:
    """One metric over the paired cells of one load; None where no pair has it."""
    blocks: list[Pair] = []
    for base, cand in cells:
        b = value_of(metrics[base.cell.cell_id], name)
        c = value_of(metrics[cand.cell.cell_id], name)
        if b is not None and c is not None and b > 0 and c > 0:
            blocks.append(Pair(repeat=base.cell.repeat, baseline=b, candidate=c))
    units, unit = independent_units(blocks)
    estimate = paired_ratio(units, confidence=compare_plan["confidence"])
    if estimate is None:
        return None
    better = DEFINITIONS[name].better
    assert better is not None
    turns = len({p.repeat for p in blocks})
    decided = verdict(
        estimate.ratio,
        estimate.ci_low if turns > 1 else None,
        estimate.ci_high if turns > 1 else None,
        better=better,
        min_effect=compare_plan["min_effect"],
    )
    cell = cells[0][0].cell
    return Comparison(
        metric=name,
        engine=cell.engine,
        load=cell.load,
        baseline=geometric_mean([b for b, _ in units]),
        candidate=geometric_mean([c for _, c in units]),
        ratio=estimate.ratio,
        ci_low=estimate.ci_low,
        ci_high=estimate.ci_high,
        pairs=estimate.pairs,
        method=(
            f"geometric mean of the ratio over {estimate.pairs} {unit}, "
            f"{compare_plan['confidence']:.0%} t interval on the log scale"
        ),
        verdict=decided,
    )


def independent_units(blocks: list[Pair]) -> tuple[list[tuple[float, float]], str]:
    """The pairs the interval is taken over, and what they are.

    Blocks of one start share whatever that start brought with it, so that with three starts or
    more the starts are the units. With fewer the blocks stand in for them; a caution says so.
    """
    repeats = sorted({p.repeat for p in blocks})
    if len(repeats) < 3:
        return [(p.baseline, p.candidate) for p in blocks], "paired blocks"
    units = []
    for repeat in repeats:
        own = [p for p in blocks if p.repeat == repeat]
        units.append(
            (
                geometric_mean(p.baseline for p in own),
                geometric_mean(p.candidate for p in own),
            )
        )
    return units, "paired starts"


def load_words(load: LoadPoint) -> str:
    """A load in the reader's words, for sentences and tables: `concurrency 4`, `2.5 requests/s`."""
    if load.mode == "closed":
        words = [f"concurrency {DASH if load.concurrency is None else load.concurrency}"]
        if load.think_time_s:
            about = "about " if load.think_time == "exponential" else ""
            words.append(f"think time {about}{load.think_time_s:g} s")
        if load.max_request_rate is not None:
            words.append(f"at most {load.max_request_rate:g} requests/s")
        return ", ".join(words)
    words = [_arrival_words(load)]
    if load.max_concurrency is not None:
        words.append(f"at most {load.max_concurrency} under way")
    return ", ".join(words)


def _arrival_words(load: LoadPoint) -> str:
    if load.arrival == "burst":
        return f"{DASH if load.num_requests is None else load.num_requests} requests at once"
    if load.arrival == "schedule":
        segments = load.schedule or ()
        ends = [rate for _, first, last in segments for rate in (first, last)]
        rates = [f"{r:g}" for i, r in enumerate(ends) if i == 0 or r != ends[i - 1]]
        shown = rates if len(rates) <= 6 else [*rates[:3], "…", *rates[-2:]]
        return f"{', '.join(shown)} requests/s over {sum(s for s, _, _ in segments):g} s"
    if load.arrival == "trace":
        scale = "" if load.time_scale is None else f", time scale {load.time_scale:g}"
        return f"trace {one_line(PurePath(load.trace or DASH).name, 60)}{scale}"
    rate = f"{DASH if load.request_rate is None else format(load.request_rate, 'g')} requests/s"
    if load.arrival == "constant":
        return f"{rate} evenly spaced"
    if load.arrival == "gamma" and load.burstiness is not None:
        return f"{rate} of burstiness {load.burstiness:g}"
    return rate
