"""The content of a report's page as plain strings, the same for HTML and Markdown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from harness.analyse.frontier import Capacity
from harness.findings import Acceptance, Caution, CellSummary, Integrity, Speed
from harness.records import LoadPoint
from harness.report import intervals, speed, style, view, words
from harness.report.acceptance import acceptance_tables
from harness.report.definitions import DEFINITIONS
from harness.report.frontier import ProbeTable, paragraphs, tables
from harness.report.output import OUTPUT_COLUMNS, output_rows
from harness.report.plot_startup import all_starts
from harness.report.pooled import PooledAcceptance
from harness.report.repeat import Repeat, repeat_of
from harness.report.rows import (
    category_table,
    how_pooled,
    side_rows,
    sides,
    window_rules,
)
from harness.report.run_data import RunData
from harness.report.startup import (
    PHASE_COLUMNS,
    STARTUP_NOTE,
    first_of_each_side,
    phase_table,
    side_by_side,
)
from harness.report.style import Plot
from harness.report.telemetry import missing_words
from harness.report.verdict import standing, verdict_sentences
from harness.report.view import Group, MetricRow

MOST_ERRORS_SHOWN = 5
LEADING = ("effects", "frontier")
"""Figures that stand above everything else where they come first."""

Sorted = tuple[str, str]
"""What a column is sorted by, and what it shows."""

OVERVIEW_COLUMNS = (
    "engine",
    "load",
    "baseline, tokens/s",
    "speculative, tokens/s",
    "ratio (interval)",
    "verdict",
    "accepted",
    "length",
    "identical",
)

CELL_COLUMNS = (
    "cell",
    "engine",
    "variant",
    "load",
    "repeat, block",
    "status",
    "answered",
    "failed",
    "output tokens/s",
    "TTFT p50, ms",
    "TTFT p99, ms",
    "TPOT p50, ms",
    "E2E p50, ms",
    "accepted",
    "length",
    "identical",
)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report's content: strings only, neither escaped nor marked up."""

    title: str
    run_id: str
    schema: str
    meta: str
    standing: str
    verdict: list[str]
    probes: list[ProbeTable]
    sections: list[tuple[str, str]]
    failures: list[str]
    cautions: list[dict[str, str]]
    groups: list[dict[str, Any]]
    overview_columns: tuple[str, ...]
    overview: list[list[Sorted]]
    pooled: str
    output_columns: tuple[str, ...]
    output: list[tuple[str, str, str]]
    plots: list[Plot]
    lead: list[Plot]
    themes: list[tuple[str, list[Plot]]]
    startup_plots: list[Plot]
    startup_note: str
    startup_columns: tuple[str, ...]
    startup: list[tuple[str, ...]]
    phase_columns: tuple[str, ...]
    phases: list[tuple[str, list[tuple[str, ...]]]]
    cell_columns: tuple[str, ...]
    cells: list[list[Sorted]]
    repeat: Repeat | None
    definitions: tuple[tuple[str, str], ...]


def make_page(run: RunData, plots: list[Plot], found: Capacity | None = None) -> Page:
    """Everything a report says of `run`; `found`: the answer of a capacity search, told first."""
    summary, manifest = run.summary, run.manifest
    groups = view.groups(summary)
    failures = [*map(words.one_line, summary.failures), *_request_failures(run)]
    cautions = [*map(_placed, view.cautions(summary)), *map(_note, run.notes)]
    void = summary.void is not None
    output = output_rows(summary)
    probes = found is not None and any(side.probes for side in found.variants)
    columns = _overview_columns(groups)
    measured = {cell.variant for cell in summary.cells}
    starts = all_starts(run)
    startup_columns, startup = side_by_side(starts) if starts else ((), [])
    hidden = 3 if measured == {"baseline"} else 1 if measured == {"speculative"} else 0
    return Page(
        title=words.one_line(summary.title or summary.run_id, 120).lstrip("/"),
        run_id=words.one_line(summary.run_id, 120),
        schema=words.one_line(summary.schema_version, 20),
        meta=_meta(run),
        standing="capacity" if found else standing(summary),
        verdict=paragraphs(found) if found else verdict_sentences(summary),
        probes=tables(found) if found else [],
        sections=_sections(
            probes, len(failures), len(cautions), output=bool(output), startup=bool(starts)
        ),
        failures=failures,
        cautions=cautions,
        groups=[
            {
                **_group(group, void=void),
                "speed": _speed(speed.of_group(summary, group.engine, group.load)),
                "acceptance": acceptance_tables(summary, group),
            }
            for group in groups
        ],
        overview_columns=tuple(OVERVIEW_COLUMNS[i] for i in columns),
        overview=_picked([_overview_row(g, void=void) for g in groups], columns),
        pooled=" ".join(
            filter(None, (how_pooled(groups), window_rules(groups), missing_words(summary)))
        ),
        output_columns=OUTPUT_COLUMNS,
        output=output,
        plots=plots,
        lead=plots[:1] if plots and plots[0].name in LEADING else [],
        themes=_themes(plots, starts=bool(starts)),
        startup_plots=[plot for plot in plots if plot.theme == "start"] if starts else [],
        startup_note=STARTUP_NOTE,
        startup_columns=startup_columns,
        startup=startup,
        phase_columns=PHASE_COLUMNS,
        phases=[(name, phase_table(s)) for name, s in first_of_each_side(starts).items()],
        cell_columns=CELL_COLUMNS[: len(CELL_COLUMNS) - hidden],
        cells=[_cell_row(cell)[: len(CELL_COLUMNS) - hidden] for cell in summary.cells],
        repeat=repeat_of(manifest, run.launches) if manifest else None,
        definitions=DEFINITIONS,
    )


def _themes(plots: list[Plot], *, starts: bool) -> list[tuple[str, list[Plot]]]:
    """The figures by theme, without what leads the page and what stands with the start-ups."""
    rest = plots[1:] if plots and plots[0].name in LEADING else plots
    parts = {
        theme: [plot for plot in rest if plot.theme == theme]
        for theme in style.THEMES
        if not (starts and theme == "start")
    }
    return [(style.THEMES[theme], own) for theme, own in parts.items() if own]


def _sections(
    probes: bool, failures: int, cautions: int, *, output: bool, startup: bool
) -> list[tuple[str, str]]:
    """Anchor and heading of each part of the page that there is."""
    return [
        *([("probes", "Probes")] if probes else []),
        *([("failures", f"Failures ({failures})")] if failures else []),
        *([("cautions", f"Cautions ({cautions})")] if cautions else []),
        ("results", "Results"),
        *([("output", "Output")] if output else []),
        ("figures", "Figures"),
        *([("startup", "Start-up")] if startup else []),
        ("cells", "Cells"),
        ("repeat", "To repeat it"),
        ("words", "Definitions"),
    ]


def _meta(run: RunData) -> str:
    parts = [f"run {run.summary.run_id}"]
    workloads = dict.fromkeys(map(_workload, run.summary.cells))
    if workloads:
        parts.append("workload " + ", ".join(workloads))
    if run.manifest is not None:
        parts.append(f"made {run.manifest.created}")
        if run.manifest.git_commit:
            parts.append(f"commit {run.manifest.git_commit[:12]}")
    return words.one_line(" · ".join(parts), 400)


def _workload(cell: CellSummary) -> str:
    """The data set; beside a trace the trace's name too, which may bring prompts of its own."""
    trace = cell.load.trace
    if trace is None or trace == cell.workload:
        return cell.workload
    return f"trace {PurePath(trace).name} (if it has no prompts: {cell.workload})"


def _placed(item: view.PlacedCaution) -> dict[str, str]:
    cells = item.cells
    more = f" and {len(cells) - 4} more" if len(cells) > 4 else ""
    return _note(item.caution, words.one_line(", ".join(cells[:4]) + more))


def _note(caution: Caution, cells: str = "") -> dict[str, str]:
    return {
        "title": words.one_line(caution.code, 60).replace("_", " ").replace("-", " ").capitalize(),
        "text": words.one_line(caution.text, 600),
        "advice": words.one_line(caution.advice, 600),
        "cells": cells,
    }


def _request_failures(run: RunData) -> list[str]:
    """The commonest messages of failed requests, with their counts."""
    errors: Counter[str] = Counter()
    total = 0
    for cell in run.cells:
        if cell.samples is not None:
            errors.update(cell.samples.errors)
            total += cell.samples.requests
    failed = sum(errors.values())
    shown = [
        f"{words.plural(n, 'request')} of {total:,d} failed: {words.one_line(text)}"
        for text, n in errors.most_common(MOST_ERRORS_SHOWN)
    ]
    rest = failed - sum(n for _, n in errors.most_common(MOST_ERRORS_SHOWN))
    return [*shown, f"{words.plural(rest, 'request')} failed otherwise"] if rest else shown


def _group(group: Group, *, void: bool) -> dict[str, Any]:
    blocks = ", ".join(
        f"{words.plural(group.blocks[variant], 'block')} {variant}" for variant in sides(group)
    )
    category_columns, categories = category_table(group)
    answered = sum(ok for ok, _ in group.requests.values())
    return {
        "name": words.one_line(group.name, 120),
        "basis": f"{blocks}; {words.plural(answered, 'answered request')}{intervals.basis(group)}",
        "rows": [_metric(group, row, void=void) for row in group.rows],
        "sides": sides(group),
        "paired": len(sides(group)) > 1,
        "corrected": intervals.shows_corrected(group),
        "more": [
            (label.strip(), *_with_interval(group, label, values))
            for label, values in side_rows(group)
        ],
        "category_columns": category_columns,
        "categories": categories,
    }


def _speed(found: Speed | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "sentence": speed.sentence(found),
        "columns": speed.FACTOR_COLUMNS,
        "rows": speed.factor_rows(found),
        "notes": speed.notes(found),
        "prediction_columns": speed.PREDICTION_COLUMNS,
        "predictions": speed.prediction_rows(found.predictions),
    }


def _with_interval(group: Group, label: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """The row of the acceptance length with its interval, every other as it is."""
    if label != "acceptance length":
        return values
    return (*values[:-1], values[-1] + intervals.acceptance_length(group))


def _metric(group: Group, row: MetricRow, *, void: bool) -> dict[str, str]:
    return {
        "label": row.spec.label,
        "baseline": intervals.figure(group, row, "baseline"),
        "speculative": intervals.figure(group, row, "speculative"),
        "ratio": words.ratio(row.ratio, row.ci_low, row.ci_high),
        "corrected": intervals.corrected(row),
        "verdict": _verdict(row, void=void),
    }


def _verdict(row: MetricRow, *, void: bool) -> str:
    return words.DASH if row.verdict is None else "withheld" if void else row.verdict


def _overview_row(group: Group, *, void: bool) -> list[tuple[str, str]]:
    """Each column's sort key and text for one engine and load."""
    row = group.rows[0]
    return [
        sort_text(group.engine),
        load_key(group.load),
        sort_figure(row.baseline),
        sort_figure(row.speculative),
        (sort_key(row.ratio), words.ratio(row.ratio, row.ci_low, row.ci_high)),
        sort_text(_verdict(row, void=void)),
        *speculation(group.acceptance, group.integrity),
    ]


ONE_SIDED = {
    "baseline": (2, 4, 5, 8),
    "speculative": (3, 4, 5, 6, 7, 8),
}
"""The columns of the overview that say nothing where that variant was not measured."""


def _overview_columns(groups: tuple[Group, ...]) -> list[int]:
    measured = {variant for group in groups for variant in sides(group)}
    empty = {i for v, dropped in ONE_SIDED.items() if v not in measured for i in dropped}
    return [i for i in range(len(OVERVIEW_COLUMNS)) if i not in empty]


def _picked(rows: list[list[Sorted]], columns: list[int]) -> list[list[Sorted]]:
    """Those columns of the rows; no overview where there is one row alone."""
    return [[row[i] for i in columns] for row in rows] if len(rows) > 1 else []


def _cell_row(cell: CellSummary) -> list[tuple[str, str]]:
    """Each column's sort key and text. A missing number sorts last: its key is empty."""
    m = cell.metrics
    return [
        sort_text(cell.cell_id),
        sort_text(cell.engine),
        sort_text(cell.variant),
        load_key(cell.load),
        (f"{cell.repeat}.{cell.block:06d}", f"{cell.repeat}, {cell.block}"),
        sort_text(cell.status),
        (sort_key(m and m.requests_ok), words.count(m.requests_ok if m else None)),
        (sort_key(m and m.requests_failed), words.count(m.requests_failed if m else None)),
        sort_figure(m.output_tokens_per_s if m else None),
        sort_figure(m.ttft_s.p50 if m else None, 1e3),
        sort_figure(m.ttft_s.p99 if m else None, 1e3),
        sort_figure(m.tpot_s.p50 if m else None, 1e3),
        sort_figure(m.e2el_s.p50 if m else None, 1e3),
        *speculation(cell.acceptance, cell.integrity),
    ]


def load_key(load: LoadPoint) -> Sorted:
    """A load, sorted by its concurrency or rate."""
    key = load.concurrency if load.mode == "closed" else load.request_rate
    return sort_key(key), words.load_words(load)


def speculation(a: Acceptance | PooledAcceptance | None, i: Integrity | None) -> list[Sorted]:
    """The columns accepted, length and identical."""
    return [
        (sort_key(a and a.rate), words.percent(a.rate if a else None)),
        (sort_key(a and a.length), words.fixed(a.length if a else None)),
        (sort_key(i and i.identical), words.share(i.identical, i.compared) if i else words.DASH),
    ]


def sort_text(value: str) -> Sorted:
    """A text, sorted by itself."""
    flat = words.one_line(value, 80)
    return flat, flat


def sort_figure(value: float | None, scale: float = 1.0) -> Sorted:
    """A number, sorted by its value."""
    scaled = None if value is None else value * scale
    return sort_key(scaled), words.number(scaled)


def sort_key(value: Any) -> str:
    """What a number is sorted by; empty where it is missing, which sorts last."""
    return "" if value is None or words.missing(value) else repr(value)
