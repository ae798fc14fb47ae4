"""The report's tables of acceptance: what they say, in HTML and in Markdown."""

from __future__ import annotations

from harness_records import cell, counters, run_of
from test_harness_acceptance import made_of

from harness.analyse.summary import summarise
from harness.findings import Summary
from harness.records import DraftCounts
from harness.report import view
from harness.report.acceptance import acceptance_tables
from harness.report.html import render_html
from harness.report.markdown import render_markdown
from harness.report.page import make_page
from harness.report.run_data import RunData
from harness.report.words import DASH


def summary() -> Summary:
    records = [
        made_of([3, 1, 0, 3], 3, index=0, category="<b>code</b>"),
        made_of([0, 1, 2, 2], index=1, category="chat|x"),
    ]
    counted = counters(DraftCounts(drafts=8, drafted=24, accepted=12, per_position=(6, 4, 2)))
    return summarise(run_of([cell("speculative", 0, records, counted=counted)]))


def test_figures_sources_and_splits_are_told() -> None:
    told = summary()
    (group,) = view.groups(told)
    tables = {t.title: t for t in acceptance_tables(told, group)}
    first = tables["Acceptance with intervals"]
    assert first.columns == ("figure", "value", "95% interval")
    assert first.rows[0][:2] == ["acceptance length, pooled over steps", "2.500"]
    assert first.rows[4][:2] == ["acceptance length, of the output alone", "2.250"]
    assert "2 accepted tokens stood behind an answer's end" in first.note
    assert "0.0% of verify steps came merged" in first.note
    sources = tables["By source"]
    assert sources.note == "believed: the server's counters"
    assert [row[1:] for row in sources.rows] == [
        ["2.500", "8", "24", "12"], ["2.500", "8", "24", "12"], ["2.125", "8", DASH, "9"],
    ]  # fmt: skip
    assert [row[:2] for row in tables["By category"].rows] == [
        ["<b>code</b>", "2.750"], ["chat|x", "2.250"],
    ]  # fmt: skip


def test_names_from_outside_are_escaped_in_both_outputs() -> None:
    page = make_page(RunData(summary=summary(), manifest=None, cells=()), [])
    text, html = render_markdown(page), render_html(page)
    assert "Acceptance in detail" in text and "Acceptance in detail" in html
    assert r"chat\|x" in text and "| chat|x |" not in text
    assert "&lt;b&gt;code" in html and "<b>code" not in html
    assert "| ---" not in text and "\n|---|---:|---:|---:|---:|\n| &lt;b&gt;code" in text


def test_a_run_without_speculation_has_no_tables() -> None:
    told = summarise(run_of([cell("baseline", 0, [made_of([1], acceptance=None)])]))
    (group,) = view.groups(told)
    assert acceptance_tables(told, group) == []
