"""What every output of a report shows, worked out once from a `Summary`: no formatting here.

A group is one engine under one load. Its blocks are pooled: throughput and latencies are means
over blocks (the geometric means of the paired comparison where there is one, so that they agree
with its ratio); acceptance, integrity and task accuracy are pooled counts, since an average of
ratios weighs a short block like a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from harness.analyse.integrity import total
from harness.findings import (
    Caution,
    CellSummary,
    Comparison,
    Distribution,
    Integrity,
    Metrics,
    Summary,
    VariantEstimate,
    Verdict,
)
from harness.records import VARIANTS, LoadPoint, Variant
from harness.report import words
from harness.report.pooled import (
    Accuracy,
    CategorySide,
    PooledAcceptance,
    pool_acceptance,
    pool_accuracy,
    pool_category,
)


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One row of the result table. `scale` turns the record's unit into the label's."""

    key: str
    label: str
    scale: float
    read: Callable[[Metrics], float | None]


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """A metric of both variants, in the record's unit (seconds, tokens per second).

    `corrected`: the ratio's interval after the correction for `family` comparisons, which the
    verdict is drawn from; None where there is none.
    """

    spec: MetricSpec
    baseline: float | None
    speculative: float | None
    ratio: float | None
    ci_low: float | None
    ci_high: float | None
    pairs: int
    verdict: Verdict | None
    corrected: tuple[float, float] | None = None
    family: int = 1

    @property
    def corrected_away(self) -> bool:
        """Whether the plain interval lies apart from 1 and the corrected one does not."""
        if self.corrected is None or self.ci_low is None or self.ci_high is None:
            return False
        low, high = self.corrected
        return (self.ci_low > 1 or self.ci_high < 1) and low <= 1 <= high


@dataclass(frozen=True, kw_only=True)
class Window:
    """The steady windows of one variant's cells: how many `requests` they hold, `of` how many."""

    requests: int
    of: int
    rules: tuple[str, ...]
    goodput_share: float | None
    goodput_per_s: float | None
    dropped: int
    late: int
    first_reasoning_s: float | None
    first_answer_s: float | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """One engine under one load: everything a report says of it.

    `quantiles[variant]["p50"]`: TTFT, TPOT and E2E latency in seconds. `method` says how the
    ratios' intervals were made. `estimates`: each variant's own figures, by variant and metric.
    """

    engine: str
    load: LoadPoint
    cells: tuple[CellSummary, ...]
    rows: tuple[MetricRow, ...]
    acceptance: PooledAcceptance | None
    integrity: Integrity | None
    accuracy: dict[str, Accuracy]
    quantiles: dict[str, dict[str, tuple[float | None, ...]]]
    method: str | None
    blocks: dict[str, int]
    requests: dict[str, tuple[int, int]]
    windows: dict[str, Window | None]
    categories: dict[str, dict[str, CategorySide | None]]
    estimates: dict[tuple[Variant, str], VariantEstimate]

    @property
    def name(self) -> str:
        """The engine and its load in the reader's words."""
        return f"{words.one_line(self.engine, 80)}, {words.load_words(self.load)}"

    def row(self, key: str) -> MetricRow | None:
        """The row of metric `key`, or None."""
        return next((row for row in self.rows if row.spec.key == key), None)


@dataclass(frozen=True, kw_only=True)
class PlacedCaution:
    """A caution once, with the cells it was raised for (none: it is about the whole run)."""

    caution: Caution
    cells: tuple[str, ...]


def _mean(name: str) -> Callable[[Metrics], float | None]:
    def read(metrics: Metrics) -> float | None:
        distribution: Distribution | None = getattr(metrics, name)
        return None if distribution is None else distribution.mean

    return read


LATENCIES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2el_s", "E2E latency"))

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        key="output_tokens_per_s",
        label="output tokens/s",
        scale=1.0,
        read=lambda m: m.output_tokens_per_s,
    ),
    *(
        MetricSpec(
            key=key,
            label=f"{label}, mean, ms",
            scale=1e3,
            read=_mean(key),
        )
        for key, label in LATENCIES
    ),
)


def groups(summary: Summary) -> tuple[Group, ...]:
    """The summary's groups, in the order in which their cells first appear."""
    keys: dict[tuple[str, LoadPoint], list[CellSummary]] = {}
    for cell in summary.cells:
        keys.setdefault((cell.engine, cell.load), []).append(cell)
    for comparison in summary.comparisons:
        keys.setdefault((comparison.engine, comparison.load), [])
    return tuple(_group(engine, load, cells, summary) for (engine, load), cells in keys.items())


def groups_to_draw(summary: Summary) -> tuple[Group, ...]:
    """The same for figures: a void run's rows without their verdicts, which are withheld."""
    found = groups(summary)
    if summary.void is None:
        return found
    return tuple(
        replace(group, rows=tuple(replace(row, verdict=None) for row in group.rows))
        for group in found
    )


def _group(engine: str, load: LoadPoint, cells: list[CellSummary], summary: Summary) -> Group:
    mine = {c.metric: c for c in summary.comparisons if (c.engine, c.load) == (engine, load)}
    sides: dict[str, list[CellSummary]] = {
        v: [c for c in cells if c.variant == v] for v in VARIANTS
    }
    speculative = sides["speculative"]
    return Group(
        engine=engine,
        load=load,
        cells=tuple(cells),
        rows=tuple(_row(spec, sides, mine.get(spec.key)) for spec in METRICS),
        acceptance=pool_acceptance([c.acceptance for c in speculative if c.acceptance]),
        integrity=total([c.integrity for c in speculative]),
        accuracy={v: pool_accuracy(side) for v, side in sides.items()},
        quantiles={v: _quantiles(side) for v, side in sides.items()},
        method=next((c.method for c in mine.values()), None),
        blocks={v: sum(c.metrics is not None for c in side) for v, side in sides.items()},
        requests={v: _requests(side) for v, side in sides.items()},
        windows={v: _window(side) for v, side in sides.items()},
        categories=_categories(sides),
        estimates={
            (e.variant, e.metric): e
            for e in summary.estimates
            if (e.engine, e.load) == (engine, load)
        },
    )


def _row(
    spec: MetricSpec, sides: dict[str, list[CellSummary]], found: Comparison | None
) -> MetricRow:
    baseline = _mean_over_blocks(spec, sides["baseline"])
    speculative = _mean_over_blocks(spec, sides["speculative"])
    if found is None:
        return MetricRow(
            spec=spec,
            baseline=baseline,
            speculative=speculative,
            ratio=None,
            ci_low=None,
            ci_high=None,
            pairs=0,
            verdict=None,
        )
    return MetricRow(
        spec=spec,
        baseline=baseline if words.missing(found.baseline) else found.baseline,
        speculative=speculative if words.missing(found.candidate) else found.candidate,
        ratio=found.ratio,
        ci_low=found.ci_low,
        ci_high=found.ci_high,
        pairs=found.pairs,
        verdict=found.verdict,
        corrected=_corrected(found),
        family=found.family,
    )


def _corrected(found: Comparison) -> tuple[float, float] | None:
    low, high = found.corrected_low, found.corrected_high
    return None if low is None or high is None else (low, high)


def _quantiles(cells: Sequence[CellSummary]) -> dict[str, tuple[float | None, ...]]:
    """TTFT, TPOT and E2E latency in seconds, by quantile: means over blocks."""

    def over(name: str, quantile: str) -> float | None:
        known = [cell.metrics for cell in cells if cell.metrics is not None]
        return _mean_of([getattr(getattr(metrics, name), quantile) for metrics in known])

    return {q: tuple(over(name, q) for name, _ in LATENCIES) for q in ("p50", "p99")}


def _mean_over_blocks(spec: MetricSpec, cells: Sequence[CellSummary]) -> float | None:
    return _mean_of([spec.read(cell.metrics) for cell in cells if cell.metrics is not None])


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and not words.missing(value)]
    return fmean(known) if known else None


def _requests(cells: Sequence[CellSummary]) -> tuple[int, int]:
    """Requests answered and requests failed."""
    known = [cell.metrics for cell in cells if cell.metrics is not None]
    return sum(m.requests_ok for m in known), sum(m.requests_failed for m in known)


def _window(cells: Sequence[CellSummary]) -> Window | None:
    known = [m for cell in cells if (m := cell.metrics) is not None and m.steady is not None]
    if not known:
        return None
    return Window(
        requests=sum(m.steady.requests for m in known if m.steady),
        of=sum(m.requests_ok + m.requests_failed + m.requests_dropped for m in known),
        rules=tuple(dict.fromkeys(m.steady.rule for m in known if m.steady)),
        goodput_share=_mean_of([m.goodput_share for m in known]),
        goodput_per_s=_mean_of([m.goodput_per_s for m in known]),
        dropped=sum(m.requests_dropped for m in known),
        late=sum(m.requests_late or 0 for m in known),
        first_reasoning_s=_mean_of([_mean_s(m.time_to_first_reasoning_s) for m in known]),
        first_answer_s=_mean_of([_mean_s(m.time_to_first_answer_s) for m in known]),
    )


def _mean_s(of: Distribution | None) -> float | None:
    return None if of is None else of.mean


def _categories(
    sides: dict[str, list[CellSummary]],
) -> dict[str, dict[str, CategorySide | None]]:
    """By category and variant, in alphabetical order; none where there is one category or less."""
    names = sorted({name for side in sides.values() for cell in side for name in cell.categories})
    if len(names) < 2:
        return {}
    return {
        name: {
            v: pool_category([c.categories[name] for c in side if name in c.categories])
            for v, side in sides.items()
        }
        for name in names
    }


def cautions(summary: Summary) -> tuple[PlacedCaution, ...]:
    """The cautions of the run, then those of its cells: each advice once, with all its cells.

    Where the cells' figures differ the first cell's text stands for all.
    """
    found = [PlacedCaution(caution=c, cells=()) for c in dict.fromkeys(summary.cautions)]
    places: dict[tuple[str, str], list[tuple[str, Caution]]] = {}
    for cell in summary.cells:
        for caution in cell.cautions:
            places.setdefault((caution.code, caution.advice), []).append((cell.cell_id, caution))
    for told in places.values():
        first, caution = told[0]
        if any(other.text != caution.text for _, other in told):
            more = words.plural(len(told) - 1, "more cell")
            text = f"{first}: {caution.text}; the like in {more}"
            caution = Caution(code=caution.code, text=text, advice=caution.advice)
        found.append(PlacedCaution(caution=caution, cells=tuple(cell for cell, _ in told)))
    return tuple(found)


def variants(summary: Summary) -> tuple[Variant, ...]:
    """The variants with figures, baseline first."""
    seen = {cell.variant for cell in summary.cells if cell.metrics is not None}
    return tuple(variant for variant in VARIANTS if variant in seen)
