"""Writes a run's report: one self-contained page, its Markdown, and the figures as files."""

from __future__ import annotations

from pathlib import Path

from harness.report import frontier, style, words
from harness.report.markdown import render_markdown
from harness.report.page import Page, make_page
from harness.report.run_data import read_run
from harness.report.templating import TEMPLATES, templates, write_whole


def write_report(run_dir: Path) -> Path:
    """Write `report.html`, `report.md` and `plots/*.svg` into a run's folder.

    Returns the page's path. Works on a run that was cut short: what is missing is said on the
    page. Raises `UsageError` where `run_dir` is no run's folder.
    """
    from harness.report.plots import make_plots

    run = read_run(run_dir)
    found = frontier.read(run_dir)
    plots = [*(frontier.plots(found) if found else []), *make_plots(run)]
    page = make_page(run, plots, found)
    folder = run_dir / "plots"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for plot in plots:
        write_whole(folder / f"{plot.name}.svg", style.standalone(plot.svg, plot.alt))
    write_whole(run_dir / "report.md", render_markdown(page))
    write_whole(run_dir / "report.html", render_html(page))
    return run_dir / "report.html"


def render_html(page: Page) -> str:
    """The page as one HTML document that asks nothing of the network."""
    from markupsafe import Markup

    environment = templates(autoescape=True)
    environment.filters["svg"] = Markup
    return environment.get_template("report.html.j2").render(
        page=page,
        dash=words.DASH,
        css=Markup((TEMPLATES / "report.css").read_text("utf-8")),
        js=Markup((TEMPLATES / "sort.js").read_text("utf-8")),
    )
