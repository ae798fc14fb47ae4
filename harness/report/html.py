"""Writes a run's report: one self-contained page, its Markdown, and the figures as files."""

from __future__ import annotations

from pathlib import Path

from harness.report import frontier, words
from harness.report.markdown import render_markdown
from harness.report.page import Page, make_page
from harness.report.run_data import read_run
from harness.report.templating import page_templates, write_plots, write_whole


def write_report(run_dir: Path) -> Path:
    """Write `report.html`, `report.md` and `plots/*.svg` and `.png` into a run's folder.

    Returns the page's path. Works on a run that was cut short: what is missing is said on the
    page. Raises `UsageError` where `run_dir` is no run's folder.
    """
    from harness.report.plots import make_plots

    run = read_run(run_dir)
    found = frontier.read(run_dir)
    searched = frontier.plots(found) if found else []
    plots = [*searched, *make_plots(run, with_frontier=not searched)]
    page = make_page(run, plots, found)
    write_plots(run_dir / "plots", plots)
    write_whole(run_dir / "report.md", render_markdown(page))
    write_whole(run_dir / "report.html", render_html(page))
    return run_dir / "report.html"


def render_html(page: Page) -> str:
    """The page as one HTML document that asks nothing of the network."""
    return page_templates().get_template("report.html.j2").render(page=page, dash=words.DASH)
