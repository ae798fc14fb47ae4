"""Speculative against baseline at each load, over paired, interleaved blocks."""

from __future__ import annotations

import math
from statistics import geometric_mean
from typing import Any

import msgspec

from harness.analyse.bootstrap import BOOTSTRAP_STARTS, Floats, figures, hierarchical, pair_sums
from harness.analyse.data import CellData, RunData, by_repeat, pairs
from harness.analyse.statistics import LogMean, holm, judged, log_mean, percent_of
from harness.analyse.stopping import first_look, stopped_confidence
from harness.analyse.words import load_words
from harness.findings import Comparison, Metrics
from harness.measure.metrics import DEFINITIONS

PRIMARY = "output_tokens_per_s"
COMPARED = (PRIMARY, "ttft_s", "tpot_s", "e2el_s")
"""Latencies are compared by their means over a block's requests."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One metric in a baseline block and in its speculative partner, and the two cells."""

    repeat: int
    baseline: float
    candidate: float
    cells: tuple[CellData, CellData]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One metric at one load before its verdict; `primary`: the question the run was made for."""

    comparison: Comparison
    found: LogMean
    alpha: float
    min_effect: float
    primary: bool
    withheld: bool


def value_of(metrics: Metrics, name: str) -> float | None:
    """A figure of a cell as one number: distributions by their mean."""
    value = getattr(metrics, name)
    return value if value is None or isinstance(value, float) else value.mean


def compare(run: RunData, metrics: dict[str, Metrics]) -> list[Comparison]:
    """Every engine's comparisons; `metrics` are the cells' own, by cell id."""
    measured: list[Measured] = []
    rows: dict[str, Floats] = {}
    for engine in run.engines():
        plan = run.plan(engine)["compare"]
        confidence = interval_confidence(run, engine)
        for load in run.loads(engine):
            cells = [c for c in run.select(engine, load=load) if c.to_its_end]
            partners = pairs(cells)
            failed = any(data.many_failed for both in partners for data in both)
            for name in COMPARED:
                blocks = _blocks(name, partners, metrics)
                if blocks:
                    found, how = _log_mean(name, blocks, plan, rows)
                    comparison = _comparison(name, blocks, found, how, confidence, plan)
                    measured.append(
                        Measured(
                            comparison=comparison,
                            found=found,
                            alpha=1 - confidence,
                            min_effect=plan["min_effect"],
                            primary=name == plan.get("metric", PRIMARY),
                            withheld=failed or len(starts_of(blocks)) < 2,
                        )
                    )
    return decided(measured)


def interval_confidence(run: RunData, engine: str) -> float:
    """The plan's confidence, raised where the run stopped as soon as it was precise enough."""
    plan = run.plan(engine)["compare"]
    confidence: float = plan["confidence"]
    if plan.get("precision") is None:
        return confidence
    most = plan["max_launches"] * (plan["blocks"] if run.attached else 1)
    return stopped_confidence(confidence, first_look(plan["launches"]), most)


def _blocks(
    name: str, cells: list[tuple[CellData, CellData]], metrics: dict[str, Metrics]
) -> list[Pair]:
    """The paired blocks of one load that have the metric on both sides."""
    blocks: list[Pair] = []
    for base, cand in cells:
        b = value_of(metrics[base.cell.cell_id], name)
        c = value_of(metrics[cand.cell.cell_id], name)
        if b is not None and c is not None and b > 0 and c > 0:
            blocks.append(
                Pair(repeat=base.cell.repeat, baseline=b, candidate=c, cells=(base, cand))
            )
    return blocks


def starts_of(blocks: list[Pair]) -> list[list[Pair]]:
    """The blocks, grouped by the start of the engine that they share."""
    return by_repeat(blocks, lambda p: p.repeat)


def _log_mean(
    name: str, blocks: list[Pair], plan: dict[str, Any], rows: dict[str, Floats]
) -> tuple[LogMean, str]:
    """The mean log ratio over independent units, and how its interval is made.

    Blocks of one start share whatever that start brought with it, so that the starts are the
    units. Of one start the blocks stand in for them, and no verdict is drawn. A run that stopped
    by its precision has the interval that its correction is worked out for.
    """
    starts = starts_of(blocks)
    if len(starts) == 1:
        found = log_mean([math.log(p.candidate / p.baseline) for p in blocks])
        if len(blocks) == 1:
            return found, "one pair of blocks, which has no interval"
        return found, f"{len(blocks)} paired blocks of one start, {{}} t interval on the log scale"
    if len(starts) < BOOTSTRAP_STARTS or plan.get("precision") is not None:
        logs = [log_mean([math.log(p.candidate / p.baseline) for p in own]).mean for own in starts]
        return log_mean(logs), f"{len(starts)} paired starts, {{}} t interval on the log scale"
    sums = []
    for own in starts:
        for p in own:
            for data in p.cells:
                rows.setdefault(data.cell.cell_id, figures(data.records))
        sums.append([_sums(name, p, rows) for p in own])
    seed = f"{name} {blocks[0].cells[0].cell.engine} {load_words(blocks[0].cells[0].cell.load)}"
    how = f"{len(starts)} paired starts, {{}} hierarchical bootstrap-t interval (starts, requests)"
    return hierarchical(sums, name=seed), how


def _sums(name: str, pair: Pair, rows: dict[str, Floats]) -> Any:
    base, cand = pair.cells
    return pair_sums(
        math.log(pair.candidate / pair.baseline),
        rows[base.cell.cell_id],
        rows[cand.cell.cell_id],
        metric=name,
        load=base.cell.load,
    )


def _comparison(
    name: str,
    blocks: list[Pair],
    found: LogMean,
    how: str,
    confidence: float,
    plan: dict[str, Any],
) -> Comparison:
    cell = blocks[0].cells[0].cell
    low, high = found.interval(confidence) or (None, None)
    said = percent_of(plan["confidence"])
    if confidence != plan["confidence"]:
        said += f" (at every look {percent_of(confidence)}, as it stopped by its width)"
    baseline = geometric_mean(
        [geometric_mean([p.baseline for p in own]) for own in starts_of(blocks)]
    )
    return Comparison(
        metric=name,
        engine=cell.engine,
        load=cell.load,
        baseline=baseline,
        candidate=baseline * math.exp(found.mean),
        ratio=math.exp(found.mean),
        ci_low=low,
        ci_high=high,
        pairs=found.units,
        method=f"geometric mean of the ratio over {how.format(said)}",
        verdict="undecided",
        confidence=confidence,
        p_value=found.p_value(),
    )


def decided(measured: list[Measured]) -> list[Comparison]:
    """Verdicts by Holm's correction, within the run's question and within all that is beside it.

    The question is named in the plan, before anything is measured: what else is looked at takes
    nothing from it. A comparison that cannot have a verdict counts in no family.
    """
    told: dict[int, Comparison] = {}
    for primary in (True, False):
        family = [
            i
            for i, m in enumerate(measured)
            if m.primary is primary and not m.withheld and m.comparison.p_value is not None
        ]
        levels = holm(
            [measured[i].comparison.p_value or 0.0 for i in family],
            [measured[i].alpha for i in family],
        )
        for i, level in zip(family, levels, strict=True):
            told[i] = _judged(measured[i], level, len(family))
    return [told.get(i, m.comparison) for i, m in enumerate(measured)]


def _judged(measured: Measured, level: float, family: int) -> Comparison:
    """The comparison with its verdict. `same` needs the whole correction, a difference Holm's."""
    comparison = measured.comparison
    better = DEFINITIONS[comparison.metric].better
    assert better is not None
    told = judged(
        measured.found,
        level=level,
        strict=measured.alpha / family,
        better=better,
        min_effect=measured.min_effect,
    )
    correction = f"; verdicts by Holm's correction for {family} comparisons" if family > 1 else ""
    return msgspec.structs.replace(
        comparison,
        verdict=told.verdict,
        family=family,
        corrected_low=told.low,
        corrected_high=told.high,
        corrected_confidence=told.confidence,
        method=comparison.method + correction,
    )
