"""Whether the blocks of a run are what the intervals take them for: alike but for chance.

Each check asks one thing of one engine's blocks at one load, in the order they were measured, and
tells what it found with advice. Nothing is ever left out of a figure for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import msgspec
import numpy as np

from harness.analyse.compare import PRIMARY, value_of
from harness.analyse.data import CellData, RunData
from harness.analyse.statistics import log_mean, t_p_value
from harness.analyse.words import load_words, metric_words
from harness.findings import Caution, Metrics
from harness.measure.metrics import tpot_s
from harness.measure.table import RequestTable
from harness.records import LoadPoint

RARE = 0.01
"""A check speaks where chance would make it speak less often than so."""
FEWEST_SERIES = 10
EARLY, EARLY_LEAST, EARLY_MOST, LATER_MOST = 0.1, 3, 200, 2000
"""The first tenth of a cell's requests, at least and at most so many, against those after it."""
WARM = 0.05
FAR = ((3, 30.0), (4, 13.0), (5, 10.4), (6, 8.2), (8, 6.8), (12, 5.6), (20, 4.8), (40, 4.5))
"""Blocks a variant, and the robust deviation that the farthest of all passes once in 100 runs.

From 20,000 simulated runs each of normal values; the usual 3.5 is for many values, not for few.
"""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One cell's value on the log scale; `at`: its place in the order of measuring, from 0."""

    data: CellData
    value: float
    at: int


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's blocks of one metric at one load, in the order they were measured."""

    engine: str
    load: LoadPoint
    metric: str
    min_effect: float
    blocks: tuple[Block, ...]

    @property
    def where(self) -> str:
        """The engine and the load in the reader's words."""
        return f"{self.engine} at {load_words(self.load)}"

    def own(self, variant: str) -> list[Block]:
        """One variant's blocks."""
        return [b for b in self.blocks if b.data.cell.variant == variant]


def drift_cautions(run: RunData, engine: str, metrics: dict[str, Metrics]) -> list[Caution]:
    """Everything odd about an engine's blocks over the run."""
    found: list[Caution | None] = []
    for load in run.loads(engine):
        series = series_of(run, engine, load, metrics)
        found += [order_effect(series), trend(series), alike(series), outliers(series)]
        found.append(warming([b.data for b in series.blocks], metrics, series))
    return [c for c in found if c is not None]


def series_of(run: RunData, engine: str, load: LoadPoint, metrics: dict[str, Metrics]) -> Series:
    """The whole blocks of the plan's metric; the manifest's order is the order of measuring."""
    plan = run.plan(engine)["compare"]
    metric = plan.get("metric", PRIMARY)
    saved = {c.cell.cell_id: c for c in run.select(engine, load=load)}
    blocks: list[Block] = []
    for cell in run.manifest.cells:
        data = saved.get(cell.cell_id)
        if data is None or not data.to_its_end:
            continue
        value = value_of(metrics[cell.cell_id], metric)
        if value is not None and value > 0:
            blocks.append(Block(data=data, value=math.log(value), at=len(blocks)))
    return Series(
        engine=engine,
        load=load,
        metric=metric,
        min_effect=plan["min_effect"],
        blocks=tuple(blocks),
    )


def order_effect(series: Series) -> Caution | None:
    """Whether what comes second in a pair of starts fares otherwise than what comes first."""
    second: dict[bool, list[float]] = {True: [], False: []}
    for repeat in sorted({b.data.cell.repeat for b in series.blocks}):
        base, cand = (
            [b for b in series.own(v) if b.data.cell.repeat == repeat]
            for v in ("baseline", "speculative")
        )
        if base and cand:
            difference = fmean(b.value for b in cand) - fmean(b.value for b in base)
            second[cand[0].at > base[0].at].append(difference)
    last, first = second[True], second[False]
    if min(len(last), len(first)) < 2:
        return None
    effect = (fmean(last) - fmean(first)) / 2
    freedom = len(last) + len(first) - 2
    squares = sum((x - fmean(own)) ** 2 for own in (last, first) for x in own)
    error = math.sqrt(squares / freedom * (1 / len(last) + 1 / len(first))) / 2
    if t_p_value(effect, error, freedom) >= RARE or abs(effect) < series.min_effect / 2:
        return None
    left = effect * (len(last) - len(first)) / (len(last) + len(first)) or 0.0  # not -0.0
    return Caution(
        code="order_effect",
        text=(
            f"{series.where}: of two starts the second has {_percent(effect)} "
            f"{metric_words(series.metric)}, "
            f"whichever variant it is; the order ABBA leaves {_percent(left)} of it in the ratio"
        ),
        advice=(
            "The machine is not the same after a start (heat, caches, memory): let it rest between "
            "starts, and take an even number of compare.launches, in which it cancels."
        ),
    )


def trend(series: Series) -> Caution | None:
    """Whether blocks become faster or slower over the run."""
    blocks = series.blocks
    rest = _residuals(blocks)
    freedom = len(blocks) - 3
    if freedom < 3:
        return None
    at = np.array([b.at for b in blocks], dtype=float)
    at -= at.mean()
    slope = float(at @ rest / (at @ at))
    error = math.sqrt(float(((rest - slope * at) ** 2).sum()) / freedom / float(at @ at))
    total = slope * (len(blocks) - 1)
    if t_p_value(slope, error, freedom) >= RARE or abs(total) < series.min_effect:
        return None
    return Caution(
        code="drift",
        text=(
            f"{series.where}: {metric_words(series.metric)} drifted by {_percent(total)} from the "
            "first block to "
            f"the last of {len(blocks)}"
        ),
        advice=(
            "The order ABBA keeps a steady drift out of the ratio, not out of each variant's own "
            "figures; look for heat, other load, or a warm-up that is too short."
        ),
    )


def alike(series: Series) -> Caution | None:
    """Whether blocks measured one after the other are alike, beyond a steady drift."""
    n = len(series.blocks)
    if n < FEWEST_SERIES:
        return None
    rest = _residuals(series.blocks)
    at = np.arange(n) - (n - 1) / 2
    rest = rest - at * float(at @ rest / (at @ at))
    whole = float(rest @ rest)
    if whole <= 1e-18:
        return None
    correlation = float(rest[1:] @ rest[:-1]) / whole
    if correlation * math.sqrt(n) < 2.576:
        return None
    return Caution(
        code="autocorrelated",
        text=(
            f"{series.where}: neighbouring blocks are alike (correlation {correlation:.2f} over "
            f"{n} blocks), so that they tell less than as many independent ones"
        ),
        advice=(
            "Something slower than a block moves the machine: make blocks longer, with more "
            "load.num_requests, and pairs shorter than what disturbs them."
        ),
    )


def outliers(series: Series) -> Caution | None:
    """Whether a block lies far from its variant's others, by the median absolute deviation."""
    groups = [own for v in ("baseline", "speculative") if len(own := series.own(v)) >= FAR[0][0]]
    if len(groups) < 2:
        return None
    rest = [(b, b.value - float(np.median([o.value for o in own]))) for own in groups for b in own]
    spread = 1.4826 * float(np.median([abs(r) for _, r in rest]))
    least = min(len(own) for own in groups)
    limit = float(np.interp(least, [n for n, _ in FAR], [far for _, far in FAR]))
    far = [
        (b, r)
        for b, r in rest
        if abs(r) > limit * spread and abs(math.expm1(r)) > series.min_effect
    ]
    if not far:
        return None
    worst, by = max(far, key=lambda item: abs(item[1]))
    times = "" if spread == 0 else f", {abs(by) / spread:.1f} robust deviations"
    return Caution(
        code="outlier_block",
        text=(
            f"{series.where}: {len(far)} of {len(rest)} blocks lie far from the others; "
            f"{worst.data.cell.cell_id} has {_percent(by)} {metric_words(series.metric)} against "
            "the median of "
            f"its variant{times}"
        ),
        advice=(
            "It is counted like any other. See its engine.log and what else ran then; measure "
            "more compare.launches rather than leaving it out."
        ),
    )


def warming(
    cells: Sequence[CellData], metrics: dict[str, Metrics], series: Series
) -> Caution | None:
    """Whether the first requests of cells were slower, token for token, than those after them."""
    logs = [
        slowed
        for data in cells
        if (slowed := _early_log(data.records, metrics[data.cell.cell_id])) is not None
    ]
    if len(logs) < 4:
        return None
    found = log_mean(logs)
    assert found.error is not None
    if found.mean < math.log1p(WARM) or t_p_value(found.mean, found.error, len(logs) - 1) >= RARE:
        return None
    return Caution(
        code="warm_up_short",
        text=(
            f"{series.where}: the first tenth of each cell's requests took {_percent(found.mean)} "
            f"time per token against the rest, over {len(logs)} cells"
        ),
        advice="The engine was still warming up: raise load.warmup_requests.",
    )


def _early_log(records: RequestTable, metrics: Metrics) -> float | None:
    """Log of the early requests' mean TPOT over the later ones', within the steady window."""
    sent = records.ok.where(records.ok.ints("sent_ns").known)
    if not len(sent):
        return None
    at = sent.ints("sent_ns").values
    order = np.argsort(at, kind="stable")
    begin = int(at.min()) + (metrics.steady.begin_s * 1e9 if metrics.steady else 0)
    order = order[at[order] >= math.ceil(begin)]
    size = min(EARLY_MOST, max(EARLY_LEAST, round(EARLY * len(order))))
    early, later = (
        _known(tpot_s(sent.take(rows))) for rows in (order[:size], order[size : size + LATER_MOST])
    )
    if len(early) < EARLY_LEAST or len(later) < 4 * EARLY_LEAST:
        return None
    before, after = fmean(early), fmean(later)
    return math.log(before / after) if before > 0 and after > 0 else None


def _known(values: np.ndarray) -> list[float]:
    known: list[float] = values[np.isfinite(values)].tolist()
    return known


def _residuals(blocks: Sequence[Block]) -> np.ndarray:
    """What is left of each value without its variant's mean."""
    variants = np.array([b.data.cell.variant == "speculative" for b in blocks], dtype=bool)
    values = np.array([b.value for b in blocks], dtype=float)
    for side in (variants, ~variants):
        if side.any():
            values[side] -= values[side].mean()
    return values


def _percent(log: float) -> str:
    return f"{math.expm1(log):+.1%}"
