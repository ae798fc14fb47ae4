"""The report shows the steady window, goodput, and the figures of each category."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import report_run as made

from harness.findings import CategoryFigures, Steady, Summary
from harness.records import DraftCounts
from harness.report import tables, view
from harness.report.html import write_report
from harness.report.rows import category_rows, quality_rows

RULE = "opens when the first answer at 4 under way has ended"


def figures(*, tpot_s: float, drafts: int | None = None, ok: int = 12) -> CategoryFigures:
    return CategoryFigures(
        requests=12,
        ok=ok,
        output_tokens=120,
        ttft_s=0.05,
        tpot_s=tpot_s,
        acceptance=None if drafts is None else DraftCounts(drafts=drafts, accepted=30),
        acceptance_length=None if drafts is None else 1 + 30 / drafts,
        task_accuracy=0.5,
        task_n=ok,
    )


def summary(names: tuple[str, ...] = ("code", "math"), **more: Any) -> Summary:
    steady = Steady(begin_s=1.0, end_s=9.0, level="steady", rule=RULE, requests=16)
    own = msgspec.structs.replace(made.metrics(), steady=steady, **more)
    told = made.summary()
    cells = tuple(
        msgspec.structs.replace(
            c,
            metrics=own,
            categories={
                name: figures(tpot_s=0.02)
                if c.variant == "baseline"
                else figures(tpot_s=0.01, drafts=10 + 50 * c.repeat)
                for name in names
            },
        )
        for c in told.cells
    )
    return msgspec.structs.replace(told, cells=cells)


def test_the_window_and_its_rule_are_shown() -> None:
    text = tables.render_text(summary(), width=200)
    (row,) = [line for line in text.splitlines() if "in the steady window" in line]
    assert row.split()[-6:] == ["32", "of", "48", "32", "of", "48"]
    assert f"Steady window, which latencies are of: {RULE}." in text
    assert "goodput" not in text
    assert "dropped" not in text


def test_goodput_dropped_and_late_requests_are_shown_where_there_are_any() -> None:
    told = summary(goodput_share=0.875, goodput_per_s=1.5, requests_dropped=3, requests_late=2)
    (group,) = view.groups(told)
    rows = {label: (b, s) for label, b, s in quality_rows(group)}
    assert rows["met the service levels"] == ("87.5%", "87.5%")
    assert rows["goodput, requests/s"] == ("1.50", "1.50")
    assert rows["dropped requests"] == ("6 of 54", "6 of 54")
    assert rows["sent late"] == ("4 of 54", "4 of 54")


def test_categories_pool_counts_and_do_not_average_ratios() -> None:
    (group,) = view.groups(summary())
    assert category_rows(group)[0] == [
        "code", "48 of 48", "20.0", "10.0", "0.50x", "1.86", "50.0%", "50.0%"
    ]  # fmt: skip
    assert "By category" in tables.render_text(summary())


def test_one_category_is_no_split() -> None:
    (group,) = view.groups(summary(("math",)))
    assert group.categories == {}


@pytest.mark.parametrize(("n", "opened"), [(2, True), (20, False)])
def test_the_page_folds_a_long_table_of_categories(tmp_path: Path, n: int, opened: bool) -> None:
    names = tuple(f"kind <{i}>" for i in range(n))
    folder = made.write_run(tmp_path / "run", summary(names))
    write_report(folder)
    page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert f"<details{' open' if opened else ''}><summary>By category" in page
    assert page.count("kind &lt;1&gt;") == 1
    assert "By category" in text
    assert RULE in page
    assert ("By category" in tables.render_text(summary(names))) is opened
