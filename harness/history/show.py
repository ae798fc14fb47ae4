"""What the history answers, as a table, JSON or CSV: the list of runs, or series of a metric."""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from harness.history.records import NO_LOAD, Point, SeriesKey
from harness.history.sizes import size_words
from harness.records import Record
from harness.report import words

if TYPE_CHECKING:
    from rich.table import Table

    from harness.history.prune import Going

BARS = "▁▂▃▄▅▆▇█"
MOST_NAME = 40
"""Characters of a run's name that are never broken."""
BAR_WIDTH = 24
DATED = re.compile(r"\d{8}-\d{6}")
SPEED = "output_tokens_per_s"
LENGTH = "acceptance_length"
HEADLINES = (SPEED, LENGTH)
MOST_PROBLEMS = 10
MOST_POINTS = 30
"""So many points of a single series are listed below it."""


class RunRow(Record, frozen=True, kw_only=True):
    """One run's figures at one load, as the list of runs tells them."""

    created: str
    run_id: str
    folder: str | None
    suite: str | None
    profile: str | None
    engine: str
    load: str
    workload: str
    baseline_tokens_per_s: float | None
    speculative_tokens_per_s: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    acceptance_length: float | None
    drafter: str | None
    engine_version: str | None
    git_commit: str | None
    source: str
    void: bool


class SeriesRow(Record, frozen=True, kw_only=True):
    """One series in figures; `change`: the last value by the median of those before it."""

    key: SeriesKey
    unit: str
    better: str | None
    n: int
    first: str
    last: str
    value: float | None
    middle: float | None
    least: float | None
    most: float | None
    change: float | None


def run_rows(runs: Mapping[str, Sequence[Point]]) -> list[RunRow]:
    """A row for each run, engine, workload and load that has a speed; the newest run first.

    A run without any, as where every request failed, has its rows all the same.
    """
    rows = []
    for points in reversed(list(runs.values())):
        groups: dict[tuple[str, str, str], list[Point]] = defaultdict(list)
        fast = [point for point in points if point.metric in HEADLINES]
        loaded = [point for point in points if point.load != NO_LOAD]
        for point in fast or loaded or points:
            groups[point.engine, point.workload, point.load].append(point)
        rows += [_run_row(group) for group in groups.values()]
    return rows


def _run_row(points: Sequence[Point]) -> RunRow:
    told = {(p.variant, p.metric): p for p in points}
    any_of = max(points, key=lambda p: p.drafter is not None or p.drafter_name is not None)
    ratio = told.get(("ratio", SPEED))

    def value(variant: Any, metric: str) -> float | None:
        point = told.get((variant, metric))
        return None if point is None else point.value

    return RunRow(
        created=any_of.created,
        run_id=any_of.run_id,
        folder=any_of.folder,
        suite=any_of.suite,
        profile=any_of.key.profile,
        engine=any_of.engine,
        load=any_of.load,
        workload=any_of.workload,
        baseline_tokens_per_s=value("baseline", SPEED),
        speculative_tokens_per_s=value("speculative", SPEED),
        ratio=None if ratio is None else ratio.value,
        ratio_low=None if ratio is None else ratio.ci_low,
        ratio_high=None if ratio is None else ratio.ci_high,
        acceptance_length=value("speculative", LENGTH),
        drafter=any_of.drafter_name or any_of.drafter,
        engine_version=any_of.engine_version,
        git_commit=any_of.git_commit,
        source=any_of.source,
        void=any_of.void,
    )


def series_rows(series: Mapping[SeriesKey, Sequence[Point]]) -> list[SeriesRow]:
    """A row for each series, in the order of their keys."""
    order = sorted(series, key=lambda key: tuple("" if part is None else part for part in key))
    return [_series_row(key, series[key]) for key in order]


def _series_row(key: SeriesKey, points: Sequence[Point]) -> SeriesRow:
    known = [p.value for p in points if p.value is not None]
    before = known[:-1]
    base = median(before) if before else None
    return SeriesRow(
        key=key,
        unit=points[-1].unit,
        better=points[-1].better,
        n=len(points),
        first=points[0].created,
        last=points[-1].created,
        value=points[-1].value,
        middle=median(known) if known else None,
        least=min(known, default=None),
        most=max(known, default=None),
        change=known[-1] / base - 1 if base else None,
    )


def sparkline(values: Sequence[float | None], width: int = BAR_WIDTH) -> str:
    """The last `width` values as bars between their least and most; a gap where one is missing."""
    shown = values[-width:]
    known = [v for v in shown if v is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(BARS) - 1

    def bar(value: float | None) -> str:
        if value is None:
            return " "
        return BARS[round((value - low) / span * top) if span > 0 else top // 2]

    return "".join(bar(v) for v in shown)


def runs_table(rows: Sequence[RunRow]) -> Table:
    """The list of runs; a run's name stands before its first load alone.

    What all have in common has no column of its own.
    """
    profiles = {row.profile for row in rows}
    table = _table("run", *(["profile"] if len(profiles) > 1 else []), "engine, load")
    for name in ("base", "spec.", "ratio (interval)", "length"):
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in rows:
        first = row.run_id != before
        before = row.run_id
        ratio = words.ratio(row.ratio, row.ratio_low, row.ratio_high)
        profile = words.one_line(row.profile or words.DASH, 80) if first else ""
        table.add_row(
            _name(row) if first else "",
            *([profile] if len(profiles) > 1 else []),
            words.one_line(f"{row.engine} {row.load}", 40),
            words.number(row.baseline_tokens_per_s),
            words.number(row.speculative_tokens_per_s),
            "void" if row.void else ratio,
            words.fixed(row.acceptance_length),
        )
    return _unbroken(table, 0)


def _name(row: RunRow) -> str:
    """A run's folder; before a name without a date its day."""
    name = words.one_line(row.folder or row.run_id, 120)
    return name if DATED.search(name) else f"{row.created[:10]} {name}"


def series_table(rows: Sequence[SeriesRow], values: Sequence[Sequence[float | None]]) -> Table:
    """A line for each series: its last values as bars, the last one and how far it moved."""
    table = _table("series", "last runs")
    for name in ("runs", "last", "median", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for row, own in zip(rows, values, strict=True):
        table.add_row(
            _series_name(row),
            sparkline(own),
            words.count(row.n),
            words.number(row.value),
            words.number(row.middle),
            words.DASH if row.change is None else f"{100 * row.change:+.1f}%",
        )
    return table


def _series_name(row: SeriesRow) -> str:
    key = row.key
    parts = [key.suite, key.profile, key.engine, key.variant, key.workload, key.load]
    told = " ".join(words.one_line(part, 60) for part in parts if part)
    unit = f" ({row.unit})" if row.unit else ""
    return f"{told}: {words.one_line(key.metric, 60)}{unit}"


def points_table(points: Sequence[Point]) -> Table:
    """A series point by point, the newest first."""
    table = _table("when (UTC)", "run")
    for name in ("value", "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in list(reversed(points))[:MOST_POINTS]:
        low, high = words.number(point.ci_low), words.number(point.ci_high)
        known = point.ci_low is not None and point.ci_high is not None
        table.add_row(
            _minute(point.created),
            words.one_line(point.folder or point.run_id, 80),
            words.number(point.value),
            f"{low}{words.DASH}{high}" if known else "",
        )
    return _unbroken(table, 1)


def prune_table(going: Sequence[Going]) -> Table:
    """What is to go, the oldest first."""
    table = _table("when (UTC)", "folder", "what", "for")
    table.add_column("frees", justify="right", no_wrap=True)
    for one in going:
        name = words.one_line(one.place, 80)
        table.add_row(_minute(one.created), name, one.what, one.why, size_words(one.bytes))
    return _unbroken(table, 1)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _unbroken(table: Table, column: int) -> Table:
    """The table with each name of a column on one line, to be copied; very long ones fold."""
    names = [str(cell) for cell in table.columns[column].cells]
    table.columns[column].min_width = min(MOST_NAME, max(map(len, names), default=0))
    return table


def _minute(created: str) -> str:
    return created[:16].replace("T", " ")


def text_of(tables: Iterable[Table], width: int) -> str:
    """Tables as plain text; nothing in a name is markup."""
    from rich.console import Console

    sink = io.StringIO()
    console = Console(file=sink, width=width, color_system=None, force_terminal=False, markup=False)
    for table in tables:
        console.print(table)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()) + "\n"


def csv_of(rows: Sequence[Point] | Sequence[RunRow]) -> str:
    """Rows with a head of their fields; what is missing is empty."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    if rows:
        writer.writerow(rows[0].__struct_fields__)
    for row in rows:
        writer.writerow("" if v is None else v for v in msgspec.structs.astuple(row))
    return sink.getvalue()


def series_json(series: Mapping[SeriesKey, Sequence[Point]]) -> list[dict[str, Any]]:
    """Each series: what its points have in common, its figures, and its points."""
    return [
        {
            **row.key._asdict(),
            **{k: v for k, v in msgspec.structs.asdict(row).items() if k != "key"},
            "points": [
                {
                    "created": p.created,
                    "run_id": p.run_id,
                    "folder": p.folder,
                    "value": p.value,
                    "ci_low": p.ci_low,
                    "ci_high": p.ci_high,
                    "n": p.n,
                    "git_commit": p.git_commit,
                    "engine_version": p.engine_version,
                    "drafter": p.drafter,
                }
                for p in series[row.key]
            ],
        }
        for row in series_rows(series)
    ]


def problem_lines(root: Path, problems: Sequence[tuple[Path, str]], *, every: bool) -> list[str]:
    """What was skipped and why; beyond `MOST_PROBLEMS` only how many more, unless `every`."""
    shown = problems if every else problems[:MOST_PROBLEMS]
    lines = [f"skipped {_below(path, root)}: {reason}" for path, reason in shown]
    if len(problems) > len(shown):
        lines.append(f"skipped {len(problems) - len(shown)} more; --problems lists all")
    return lines


def _below(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
