"""Several runs on one page, side by side: engines, drafters, k, or the same at other times.

Nothing is claimed between runs, which are not paired: that is for `python -m harness compare`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from harness.errors import UsageError
from harness.records import Manifest
from harness.report import html, style, sweep, view, words
from harness.report.page import Sorted, load_key, sort_figure, sort_key, sort_text, speculation
from harness.report.plot_acceptance import acceptance, by_category, tokens_per_step
from harness.report.plot_latency import latencies_side_by_side
from harness.report.plot_loads import effects, load_plots
from harness.report.plot_startup import all_starts
from harness.report.plots import gpus_of_engines, throughput
from harness.report.repeat import flat
from harness.report.run_data import RunData, read_run
from harness.report.startup import STARTUP_NOTE, Start, side_by_side
from harness.report.style import Plot
from harness.report.templating import page_templates, write_plots, write_whole
from harness.report.verdict import standing, verdict_sentence
from harness.report.view import Group

MOST_DRAWN = 12
CHANGES_ALWAYS = ("load_average", "memory_free_bytes", "disk_free_bytes")
"""Of the environment: differs from run to run and says little."""

COLUMNS = (
    "run", "engine", "drafter", "k", "load", "baseline, tokens/s", "speculative, tokens/s",
    "ratio (interval)", "verdict", "TTFT, ratio", "TPOT, ratio", "accepted", "length", "identical",
)  # fmt: skip
SETTINGS = ("engine", "drafter", "k")
"""Columns that are told once, above the table, where all runs have the same."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run: what it is called beside the others, its folder, and what was read of it."""

    label: str
    folder: Path
    run: RunData

    def name(self, engine: str) -> str:
        """One of its engines; the run's own name where it has one alone."""
        several = len({cell.engine for cell in self.run.summary.cells}) > 1
        named = engine in self.label.split(", ")
        return f"{self.label}, {engine}" if several and not named else self.label

    def groups(self) -> list[Group]:
        """Its engines and loads, called as they are here."""
        return [
            replace(g, engine=self.name(g.engine)) for g in view.groups_to_draw(self.run.summary)
        ]


def write_page(folders: Sequence[Path], out: Path | None) -> Path:
    """A run's or a sweep's report into its own folder; of several runs one page, into `out`.

    Returns the page's path. Raises `UsageError` where a folder is no run's, or `out` does not fit.
    """
    folders = list(dict.fromkeys(folders))
    if len(folders) == 1:
        (folder,) = folders
        if out is not None:
            raise UsageError(
                f"--out {out}: one run's report goes into its own folder; leave it out"
            )
        return (sweep if (folder / sweep.SWEEP).is_file() else html).write_report(folder)
    if out is None:
        raise UsageError(f"{len(folders)} runs: say with --out DIR where their page is written")
    for name in ("manifest.json", "summary.json", sweep.SWEEP):
        if (out / name).exists():
            raise UsageError(f"--out {out}: holds a run's {name}; give a folder of its own")
    return write_side_by_side(folders, out)


def write_side_by_side(folders: Sequence[Path], out: Path) -> Path:
    """Write `report.html` and `plots` of several runs into `out`. Raises `UsageError`."""
    runs = [read_run(folder) for folder in folders]
    labels = labels_of(runs, folders)
    sides = [
        Side(label=label, folder=folder, run=run)
        for label, folder, run in zip(labels, folders, runs, strict=True)
    ]
    drawn = plots_of(sides)
    out.mkdir(parents=True, exist_ok=True)
    write_plots(out / "plots", drawn)
    starts = [
        replace(s, engine=side.name(s.engine)) for side in sides for s in all_starts(side.run)
    ]
    write_whole(out / "report.html", _page(sides, drawn, starts, out))
    return out / "report.html"


def _page(sides: Sequence[Side], drawn: list[Plot], starts: Sequence[Start], out: Path) -> str:
    lead = [plot for plot in drawn if plot.name == "effects"]
    rest = [plot for plot in drawn if plot.name != "effects"]
    columns, rows = side_by_side(starts) if starts else ((), [])
    shared, result_columns, results = results_of(sides)
    return (
        page_templates()
        .get_template("side.html.j2")
        .render(
            title=f"{len(sides)} runs side by side",
            sides=[
                {
                    "label": side.label,
                    "run": words.one_line(side.run.summary.run_id, 120),
                    "standing": standing(side.run.summary),
                    "sentence": verdict_sentence(side.run.summary),
                    "link": _link(side.folder / "report.html", out),
                    "cautions": len(view.cautions(side.run.summary)) + len(side.run.notes),
                    "failures": len(side.run.summary.failures),
                }
                for side in sides
            ],
            lead=lead,
            shared=shared,
            columns=result_columns,
            rows=results,
            differences=differences(sides),
            themes=[
                (title, own)
                for theme, title in style.THEMES.items()
                if (own := [plot for plot in rest if plot.theme == theme])
            ],
            sections=[
                *(("results", "Results"), ("differences", "What differs"), ("figures", "Figures")),
                *([("startup", "Start-up")] if rows else []),
            ],
            startup_columns=columns,
            startup=rows,
            startup_note=STARTUP_NOTE,
        )
    )


def _link(page: Path, out: Path) -> str | None:
    """The way from `out` to a run's own page; None where it has none."""
    return PurePath(os.path.relpath(page, out)).as_posix() if page.is_file() else None


def labels_of(runs: Sequence[RunData], folders: Sequence[Path]) -> list[str]:
    """A name for each run: what it has and others have not, else its folder; all differ."""
    facts = [_facts(run) for run in runs]
    differing = [key for key in facts[0] if len({fact[key] for fact in facts} - {""}) > 1]
    labels = [", ".join(fact[key] for key in differing if fact[key]) for fact in facts]
    return [
        label if label and labels.count(label) == 1 else ", ".join(filter(None, (label, name)))
        for label, name in zip(labels, _names(folders), strict=True)
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, each with as many of its parents as tell it from the others."""
    for parts in range(1, 8):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return [words.one_line(name, 80) for name in names]


def _facts(run: RunData) -> dict[str, str]:
    """What tells runs apart, in words; empty where it is not known."""
    engines = dict.fromkeys(cell.engine for cell in run.summary.cells)
    return {
        "engine": words.one_line("+".join(engines), 60),
        "target": "+".join(dict.fromkeys(_model(run, e, "target") for e in engines)),
        "drafter": "+".join(dict.fromkeys(_model(run, e, "drafter") for e in engines)),
        "k": "+".join(dict.fromkeys(f"k={k}" for e in engines if (k := _k(run, e)))),
    }


def _model(run: RunData, engine: str, kind: str) -> str:
    told = _of_plan(run.manifest, "models", engine, kind)
    return words.one_line(PurePath(told).name, 60) if isinstance(told, str) else ""


def _k(run: RunData, engine: str) -> str:
    told = _of_plan(run.manifest, "engines", engine, "speculative", "k")
    return "" if told is None else words.one_line(str(told), 20)


def _of_plan(manifest: Manifest | None, *path: str) -> Any:
    """A value of the plan by its path; None where there is none, whatever the plan looks like."""
    found: Any = manifest.plan if manifest is not None else None
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def results_of(sides: Sequence[Side]) -> tuple[str, list[str], list[list[Sorted]]]:
    """The big table: what all runs share, in words, the other columns, a row an engine and load."""
    rows = [_row(side, group) for side in sides for group in view.groups(side.run.summary)]
    shared = {
        i: rows[0][i][1]
        for i, name in enumerate(COLUMNS)
        if name in SETTINGS and len({row[i] for row in rows}) == 1
    }
    told = ", ".join(f"{COLUMNS[i]} {text}" for i, text in shared.items() if text != words.DASH)
    kept = [i for i in range(len(COLUMNS)) if i not in shared]
    return told, [COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _row(side: Side, group: Group) -> list[Sorted]:
    speed, ttft, tpot = (group.row(key) for key in ("output_tokens_per_s", "ttft_s", "tpot_s"))
    void = side.run.summary.void is not None
    verdict = speed.verdict if speed is not None and speed.verdict else words.DASH

    def figure(read: Callable[[view.MetricRow], float | None]) -> Sorted:
        return sort_figure(None if speed is None else read(speed))

    def ratio(row: view.MetricRow | None) -> Sorted:
        if row is None:
            return "", words.DASH
        return sort_key(row.ratio), words.ratio(row.ratio, row.ci_low, row.ci_high)

    return [
        sort_text(side.label),
        sort_text(group.engine),
        sort_text(_model(side.run, group.engine, "drafter") or words.DASH),
        (_k(side.run, group.engine), _k(side.run, group.engine) or words.DASH),
        load_key(group.load),
        figure(lambda row: row.baseline),
        figure(lambda row: row.speculative),
        ratio(speed),
        sort_text("withheld" if void and verdict != words.DASH else verdict),
        ratio(ttft),
        ratio(tpot),
        *speculation(group.acceptance, group.integrity),
    ]


def differences(sides: Sequence[Side]) -> list[list[str]]:
    """What the runs' plans, environments and versions differ in: a name, then each run's value."""
    told = [_settings(side.run.manifest) for side in sides]
    names = dict.fromkeys(name for one in told for name in one)
    return [
        [words.one_line(name, 120), *(one.get(name, words.DASH) for one in told)]
        for name in names
        if len({one.get(name) for one in told}) > 1
    ]


def _settings(manifest: Manifest | None) -> dict[str, str]:
    if manifest is None:
        return {}
    environment = {k: v for k, v in manifest.environment.items() if k not in CHANGES_ALWAYS}
    plan = {k: v for k, v in manifest.plan.items() if k != "request"}
    tree = {
        "plan": plan,
        "environment": environment,
        "versions": manifest.versions,
        "engine versions": manifest.engine_versions,
        "digests": manifest.digests,
        "commit": manifest.git_commit,
        "uncommitted changes": manifest.git_diff,
    }
    return {name: words.one_line(value, 200) for name, value in flat(tree)}


def plots_of(sides: Sequence[Side]) -> list[Plot]:
    """The figures that several runs share."""
    groups = [group for side in sides for group in side.groups()]
    drawn = groups[:MOST_DRAWN]
    gpus = {
        side.name(engine): count
        for side in sides
        for engine, count in gpus_of_engines(side.run).items()
    }
    named = [(group.name, group.acceptance) for group in drawn if group.acceptance is not None]
    parted = [
        (f"{side.name(s.engine)}, {words.load_words(s.load)}", s)
        for side in sides
        for s in side.run.summary.splits
    ][:MOST_DRAWN]
    with style.drawing():
        found: list[Plot | None] = [effects(groups), *load_plots(groups, gpus), throughput(drawn)]
        found += _latencies(sides)
        found += [acceptance(named), tokens_per_step(named), by_category(parted)]
    return [plot for plot in found if plot is not None]


def _latencies(sides: Sequence[Side]) -> list[Plot | None]:
    """A figure for each load that several runs were measured at, of their speculative cells."""
    at: dict[str, list[tuple[str, Any]]] = {}
    for side in sides:
        for cell in side.run.cells:
            if cell.variant == "speculative":
                at.setdefault(words.load_words(cell.load), []).append(
                    (side.name(cell.engine), cell)
                )
    return [
        latencies_side_by_side(f"{where}, with the drafter", cells)
        for where, cells in list(at.items())[:MOST_DRAWN]
        if len({name for name, _ in cells}) > 1
    ]
