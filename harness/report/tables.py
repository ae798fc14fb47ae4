"""The summary as a table for the terminal, colour only where there is one.

100 columns wide; in fewer the rows without a ratio get a table of their own, and names are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.findings import Summary
from harness.records import VARIANTS, Variant
from harness.report import speed, view, words
from harness.report.rows import (
    category_table,
    how_pooled,
    identical,
    side_rows,
    sides,
    window_rules,
)
from harness.report.startup import Start, side_by_side, starts_of
from harness.report.verdict import Standing, standing, verdict_sentence
from harness.report.view import Group, MetricRow
from harness.report.width import WIDTH, output_width

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

DASH = words.DASH
MOST_CATEGORIES = 12
"""With more the terminal shows no table of them; the page does."""

VERDICT_STYLE: dict[str, str] = {"better": "green", "worse": "red", "same": "cyan"}
STANDING_STYLE: dict[Standing, str] = {
    "better": "bold green",
    "worse": "bold red",
    "same": "bold cyan",
    "undecided": "bold yellow",
    "mixed": "bold yellow",
    "void": "bold red",
    "failed": "bold red",
}


def render_summary(summary: Summary, width: int = WIDTH) -> RenderableType:
    """The verdict, one table for each engine and load, then failures and cautions with advice."""
    from rich.console import Group as Stack
    from rich.text import Text

    groups = view.groups(summary)
    parts: list[RenderableType] = [
        Text(verdict_sentence(summary), style=STANDING_STYLE[standing(summary)]),
        Text(""),
    ]
    narrow = width < WIDTH
    if len(groups) > 1:
        parts.append(_overview(groups, narrow=narrow))
    for group in groups:
        parts.extend(_group_tables(group, void=summary.void is not None, narrow=narrow))
        if 0 < len(group.categories) <= MOST_CATEGORIES:
            parts.append(_category_table(group, narrow=narrow))
        found = speed.of_group(summary, group.engine, group.load)
        if found is not None:
            parts += [Text(speed.sentence(found)), Text("")]
    if groups:
        parts.append(Text(how_pooled(groups), style="dim"))
        parts.append(Text(window_rules(groups), style="dim"))
    starts = starts_of(summary)
    if starts:
        parts.append(_startup_table(starts, narrow=narrow))
    parts.extend(_notes(summary))
    return Stack(*parts)


def render_text(summary: Summary, width: int = WIDTH) -> str:
    """The same as plain text of at most `width` columns, without colour or control codes."""
    import io

    from rich.console import Console

    sink = io.StringIO()
    console = Console(file=sink, width=width, color_system=None, force_terminal=False)
    console.print(render_summary(summary, width))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()) + "\n"


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Print to stdout: in colour on a terminal, else as plain text, `output_width` wide."""
    import sys

    from rich.console import Console

    if console is None and not sys.stdout.isatty():
        sys.stdout.write(render_text(summary, output_width()))
        return
    console = console or Console()
    width = min(WIDTH, console.width)
    console.print(render_summary(summary, width), width=width)


def _overview(groups: tuple[Group, ...], *, narrow: bool) -> Table:
    both = {variant for group in groups for variant in sides(group)}
    table = _table("All engines and loads", narrow)
    table.add_column("engine, load", overflow="fold", ratio=1)
    names: dict[Variant, str] = {
        "baseline": "baseline",
        "speculative": "spec." if narrow else "spec. tok/s",
    }
    for variant in VARIANTS:
        if variant in both:
            table.add_column(names[variant], justify="right", no_wrap=True)
    rest = ["ratio (interval)"] if len(both) > 1 else []
    rest += ["accepted"] if "speculative" in both else []
    rest += ["identical"] if len(both) > 1 else []
    for name in rest:
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups:
        tokens = group.row("output_tokens_per_s")
        accepted = None if group.acceptance is None else group.acceptance.rate
        shown = {
            "ratio (interval)": DASH if tokens is None else _ratio(tokens),
            "accepted": words.percent(accepted),
            "identical": identical(group),
        }
        speeds: dict[Variant, str] = {
            "baseline": words.number(tokens.baseline if tokens else None),
            "speculative": words.number(tokens.speculative if tokens else None),
        }
        table.add_row(
            _plain(group.name),
            *(speeds[v] for v in VARIANTS if v in both),
            *(shown[name] for name in rest),
        )
    return table


def _group_tables(group: Group, *, void: bool, narrow: bool) -> list[Table]:
    """The rows with a ratio, and in a table of their own those without: they take its room."""
    shown = sides(group)
    paired = len(shown) > 1
    table = _side_table(_plain(group.name), shown, narrow)
    if paired:
        table.add_column("ratio (interval)", justify="right", no_wrap=True, min_width=17)
        table.add_column("verdict", no_wrap=True, min_width=9)
    for row in group.rows:
        verdict = DASH if row.verdict is None else "withheld" if void else row.verdict
        figures: dict[Variant, float | None] = {
            "baseline": row.baseline,
            "speculative": row.speculative,
        }
        table.add_row(
            row.spec.label,
            *(words.number(_scaled(row, figures[v])) for v in shown),
            *((_ratio(row), _styled(verdict)) if paired else ()),
        )
    second = _side_table(None, shown, narrow) if paired else table
    for label, values in side_rows(group):
        second.add_row(label, *values)
    return [table, second] if paired else [table]


def _side_table(title: str | None, shown: tuple[Variant, ...], narrow: bool) -> Table:
    table = _table(title, narrow)
    table.expand = len(shown) > 1  # one column of figures stands beside its labels
    table.add_column("", no_wrap=True, min_width=22)
    for variant in shown:
        table.add_column(variant, justify="right", overflow="fold")
    return table


def _category_table(group: Group, *, narrow: bool) -> Table:
    names, rows = category_table(group)
    table = _table("By category (TPOT in ms)" if narrow else "By category", narrow)
    for i, name in enumerate(names):
        short = SHORT_COLUMNS.get(name, name) if narrow else name
        # The widest figure or word; a name that is longer still is folded.
        least = min(22, max(map(len, (*short.split(), *(row[i] for row in rows)))))
        table.add_column(short, justify="right" if i else "left", overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


def _startup_table(starts: Sequence[Start], *, narrow: bool) -> Table:
    columns, rows = side_by_side(starts)
    table = _table("Start-up, seconds by stage", narrow)
    for i, name in enumerate(columns):
        table.add_column(_plain(name), justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


SHORT_COLUMNS = {
    "answered": "ok",
    "TPOT, ms, baseline": "TPOT\nbase",
    "TPOT, ms, speculative": "TPOT\nspec.",
    "right, baseline": "right\nbase",
    "right, speculative": "right\nspec.",
}
"""Of `CATEGORY_COLUMNS`, where the terminal is narrow."""


def _ratio(row: MetricRow) -> str:
    return words.ratio(row.ratio, row.ci_low, row.ci_high)


def _scaled(row: MetricRow, value: float | None) -> float | None:
    return None if value is None else value * row.spec.scale


def _styled(verdict: str) -> str:
    style = VERDICT_STYLE.get(verdict)
    return f"[{style}]{verdict}[/{style}]" if style else verdict


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(words.one_line(text, 80))


def _table(title: str | None, narrow: bool) -> Table:
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        expand=True,
        pad_edge=False,
        padding=(0, 1, 0, 0) if narrow else (0, 1),
    )


def _notes(summary: Summary) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = []
    if summary.failures:
        parts.append(Text("Failures", style="bold red"))
        for failure in summary.failures:
            parts.append(Padding(Text(words.one_line(failure, 600)), (0, 0, 0, 2)))
    placed = view.cautions(summary)
    if placed:
        parts.append(Text("Cautions", style="bold yellow"))
    for item in placed:
        first = "".join(item.cells[:1])
        more = f" and {len(item.cells) - 1} more" if len(item.cells) > 1 else ""
        known = not first or item.caution.text.startswith(first)  # the text may name it itself
        where = "" if known else f" [{first}{more}]"
        text = f"{item.caution.code}: {item.caution.text}{where}"
        parts.append(Padding(Text(words.one_line(text, 600)), (0, 0, 0, 2)))
        if item.caution.advice:
            advice = words.one_line(item.caution.advice, 600)
            parts.append(Padding(Text(f"Do: {advice}", style="dim"), (0, 0, 0, 4)))
    return parts
