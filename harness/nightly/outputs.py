"""Writes what a night found: the page, Markdown, JUnit XML, JSON, a step summary, a message."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.measure.store import write_atomic
from harness.nightly.folders import NightFolder
from harness.nightly.junit import to_junit
from harness.nightly.records import Night
from harness.nightly.series import Series
from harness.nightly.spark import sparkline
from harness.nightly.trends import chosen, plots
from harness.nightly.view import (
    ENTRY_COLUMNS,
    GATE_COLUMNS,
    SERIES_COLUMNS,
    View,
    series_rows,
    view_of,
)
from harness.report import words
from harness.report.markdown import escape
from harness.report.templating import page_templates, write_plots, write_whole

MARKDOWN, JUNIT, FINDINGS = "night.md", "junit.xml", "findings.json"
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
LISTS = (
    ("doubts", "In doubt", ""),
    ("known", "Known", "even"),
    ("better", "Better than before", "good"),
    ("refuted", "Not shown again by fresh blocks", "even"),
    ("left_out", "Left out", ""),
    ("notes", "Notes", ""),
)
CHANGED = "What changed between the last good and the first bad run:"
MOST_LINES = 40
"""Of each list in the Markdown; the page has them all."""


def write_outputs(
    folder: NightFolder,
    night: Night,
    series: Sequence[Series],
    baselines: Mapping[str, float | None],
    watched: Sequence[str],
    runs: Mapping[str, Path],
) -> View:
    """Write every file of the night's folder but `night.json`; returns what they say.

    `runs`: each entry's run folder, for the links.
    """
    links = {
        name: os.path.relpath(run / "report.html", folder.path)
        for name, run in runs.items()
        if (run / "report.html").exists()
    }
    view = view_of(night, links)
    write_atomic(folder.path / JUNIT, to_junit(night).encode())
    write_whole(folder.path / MARKDOWN, render_markdown(view))
    told = findings_of(night, view)
    write_atomic(folder.path / FINDINGS, msgspec.json.format(msgspec.json.encode(told), indent=2))
    drawn = plots(night, chosen(night, series, watched), baselines)
    write_plots(folder.path / "plots", drawn)
    write_whole(folder.index, render_html(night, view, drawn, series_rows(series, baselines)))
    return view


def render_html(
    night: Night, view: View, drawn: Sequence[Any], rows: Sequence[dict[str, Any]]
) -> str:
    """The page as one HTML document that asks nothing of the network."""
    lists = [(key, heading, kind, getattr(view, key)) for key, heading, kind in LISTS]
    sections = [("alarms", "Regressions and gates")] if view.alarms else []
    sections += [(key, heading) for key, heading, _, lines in lists if lines]
    sections += [("entries", "Entries")]
    sections += [("gates", "Gates")] if view.gates else []
    sections += [("trends", "Trends")] if drawn else []
    sections += [("series", "All series")]
    for row in rows:
        row["spark"] = sparkline(row["values"], f"{row['name']} through the nights")
    return (
        page_templates()
        .get_template("nightly.html.j2")
        .render(
            view=view,
            lists=lists,
            changed=CHANGED,
            sections=sections,
            entry_columns=ENTRY_COLUMNS,
            gate_columns=GATE_COLUMNS,
            series_columns=SERIES_COLUMNS,
            plots=drawn,
            rows=rows,
            schema=night.schema_version,
        )
    )


def render_markdown(view: View) -> str:
    """The night as Markdown, for a pull request or a step summary."""
    lines = [f"# {escape(view.title)}: {view.badge}", ""]
    lines += [f"**{escape(' '.join(view.verdict))}**", "", escape(view.meta)]
    if view.alarms:
        lines += ["", "## Regressions and gates", ""]
        for alarm in view.alarms:
            lines += [f"- {escape(text)}" for text in alarm.texts[:MOST_LINES]]
            if len(alarm.texts) > MOST_LINES:
                lines.append(f"- and {len(alarm.texts) - MOST_LINES} more, see the page")
            if alarm.changed:
                lines += ["", CHANGED, "", *(f"- {escape(c)}" for c in alarm.changed), ""]
    for key, heading, _ in LISTS:
        told = getattr(view, key)
        if told:
            lines += ["", f"## {heading}", ""]
            lines += [f"- {escape(line)}" for line in told[:MOST_LINES]]
            if len(told) > MOST_LINES:
                lines.append(f"- and {len(told) - MOST_LINES} more, see the page")
    lines += _table("Entries", ENTRY_COLUMNS, view.entries)
    if view.gates:
        lines += _table("Gates", GATE_COLUMNS, view.gates)
    return "\n".join(lines) + "\n"


def _table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["", f"## {heading}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return lines + [f"| {' | '.join(escape(text) for text in row)} |" for row in rows]


def findings_of(night: Night, view: View) -> dict[str, Any]:
    """The night for a machine: the body of the generic webhook, and `findings.json`."""
    return {
        "schema_version": night.schema_version,
        "suite": night.suite,
        "night": night.night,
        "exit_code": night.exit_code,
        "verdict": list(view.verdict),
        "entries": [
            {"name": e.name, "status": e.status, "run": e.attempt.run if e.attempt else None}
            for e in night.entries
        ],
        "findings": msgspec.to_builtins(night.findings),
        "gates": msgspec.to_builtins(night.gates),
        "notes": list(night.notes),
    }


def message_of(view: View) -> str:
    """The night as a chat's message."""
    lines = [f"{view.title}: {view.badge}", *view.verdict]
    for alarm in view.alarms[:6]:
        lines += [f"• {text}" for text in alarm.texts[:6]]
        if len(alarm.texts) > 6:
            lines.append(f"• and {len(alarm.texts) - 6} more")
        lines += [f"    {words.one_line(line, 200)}" for line in alarm.changed[:6]]
    return "\n".join(lines)


def append_step_summary(view: View, environment: Mapping[str, str] | None = None) -> str | None:
    """Append to GitHub's step summary where there is one; a line where that fails."""
    known = os.environ if environment is None else environment
    place = known.get(STEP_SUMMARY)
    if not place:
        return None
    try:
        with open(place, "a", encoding="utf-8") as file:
            file.write(render_markdown(view))
    except OSError as error:
        return f"step summary: not written: {error.strerror}"
    return None
