"""A sweep's answer as text for the terminal, and as a page with a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness.analyse.statistics import percent_of
from harness.analyse.sweep import NO_DRAFTER, Best, Outlook, Point, Sweep
from harness.errors import UsageError
from harness.report import speed, style, words
from harness.report.style import Plot
from harness.report.templating import page_templates, write_plots, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SWEEP = "sweep.json"
LONGEST_PART = 32
"""Characters of one part of a setting's name that are kept on a line; longer ones are folded."""
K = "speculative.k"
COLUMNS = (
    "setting", "load", "speed-up (interval)", "tokens/s", "length", "step cost", "decode",
)  # fmt: skip


def read(folder: Path) -> Sweep:
    """A folder's `sweep.json`. Raises `UsageError`."""
    try:
        return msgspec.json.decode((folder / SWEEP).read_bytes(), type=Sweep)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder / SWEEP}: cannot be read: {error}") from None


def render_text(found: Sweep, width: int = 100) -> str:
    """The best settings in words, then every point, as plain text of at most `width` columns."""
    import io

    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    sink = io.StringIO()
    console = Console(file=sink, width=width, color_system=None, force_terminal=False)
    for line in sentences(found):
        console.print(escape(line), highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown = rows(found)
    for i, column in enumerate(COLUMNS):
        # A setting may take several lines, but none of its parts (`forced_length=none`) is broken.
        parts = [] if i else " ".join(row[0] for row in shown).split()
        least = min(LONGEST_PART, max(map(len, parts), default=0))
        table.add_column(
            column, justify="right" if i > 1 else "left", overflow="fold", min_width=least
        )
    for row in shown:
        table.add_row(*map(escape, row))
    console.print(table)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()) + "\n"


def sentences(found: Sweep) -> list[str]:
    """The best setting under every condition and load, failures, and why it is void."""
    told = [best_sentence(best) for best in found.best]
    told += [line for outlook in found.outlooks if (line := outlook_sentence(outlook))]
    told += [f"Failed: {words.one_line(text, 300)}" for text in found.failures]
    if found.void is not None:
        told.append(f"Void, and not among the best: {words.one_line(found.void, 600)}")
    return told or ["Nothing was measured that could be compared."]


def best_sentence(best: Best) -> str:
    """Who is best, by how much, and among how many; or between whom it stays undecided."""
    where = ", ".join(
        [words.one_line(best.engine, 60), *map(_short, best.condition), words.load_words(best.load)]
    )
    gain = speed.ratio(best.speedup)
    among = (
        f"{words.plural(best.compared, 'candidate')}, each pair compared at "
        f"{percent_of(best.each)} over {words.plural(best.starts, 'start')}"
    )
    if best.named is None:
        commas = any("," in option for option in best.undecided)
        options = ("; " if commas else ", ").join(best.undecided)
        return f"{where}: undecided between {options} ({among})."
    if best.named == NO_DRAFTER:
        return f"{where}: fastest without a drafter, by {speed.ratio(best.lead)} ({among})."
    lead = "" if best.lead is None else f", {speed.ratio(best.lead)} over the next"
    return f"{where}: best is {best.named}, {gain} the baseline{lead} ({among})."


def outlook_sentence(outlook: Outlook) -> str | None:
    """Which k the decode phase would gain more from than from every k that was measured, if any."""
    known = [p for p in outlook.predictions if p.speedup is not None]
    best = max(known, key=lambda p: p.speedup or 0.0, default=None)
    if best is None or best.basis == "measured":
        return None
    return (
        f"{_outlook_name(outlook)}: k = {best.k} may be faster still, predicted "
        f"{words.ratio(best.speedup, best.low, best.high)} in the decode phase; measure it."
    )


def _short(item: str) -> str:
    """`sampling.temperature=0.7` as `temperature=0.7`."""
    key, _, value = item.partition("=")
    return words.one_line(f"{key.rpartition('.')[2]}={value}", 80)


def rows(found: Sweep) -> list[list[str]]:
    """One row a setting and load, by `COLUMNS`."""
    several = len({p.engine for p in found.points}) > 1
    return [
        [
            words.one_line(f"{p.engine}, {p.setting}" if several else p.setting, 80),
            words.load_words(p.load),
            "void" if p.void is not None else speed.ratio(p.speedup),
            words.number(p.output_tokens_per_s),
            _forced(p),
            speed.ratio(p.relative_step_cost).rstrip("x"),
            speed.ratio(p.decode),
        ]
        for p in found.points
    ]


def _forced(point: Point) -> str:
    told = words.fixed(point.acceptance_length)
    return told if point.forced_length is None else f"{told} (forced)"


def outlook_tables(found: Sweep) -> list[dict[str, Any]]:
    """Predictions at other k, a table for each group of settings and load."""
    return [
        {
            "name": _outlook_name(outlook),
            "rows": speed.prediction_rows(outlook.predictions),
        }
        for outlook in found.outlooks
    ]


def _outlook_name(outlook: Outlook) -> str:
    parts = [outlook.engine, *map(_short, outlook.same), words.load_words(outlook.load)]
    return words.one_line(", ".join(parts), 160)


def plots(found: Sweep) -> list[Plot]:
    """Speed-up by setting, a figure for every engine and condition; none without a figure."""
    groups: dict[tuple[str, tuple[str, ...]], list[Point]] = {}
    for point in found.points:
        if point.speedup is not None and point.void is None:
            groups.setdefault((point.engine, point.condition), []).append(point)
    with style.drawing():
        return [_figure(found, *key, points) for key, points in groups.items()]


def _figure(found: Sweep, engine: str, condition: tuple[str, ...], points: Sequence[Point]) -> Plot:
    figure, (axes,) = style.new_figure(1, 1, (6.4, 4.0))
    name = words.one_line(", ".join([engine, *map(_short, condition)]), 120)
    series = _series(found, points)
    by_k = _k_of(found, points[0]) is not None
    names = list(dict.fromkeys(p.setting for p in points))
    said = []
    for number, (label, members) in enumerate(series.items()):
        at = [
            float(_k_of(found, p) or 0) if by_k else float(names.index(p.setting)) for p in members
        ]
        shift = (number - (len(series) - 1) / 2) * 0.06
        _line(axes, [x + shift for x in at], members, number, label)
        shown = "; ".join(f"{p.setting} {speed.ratio(p.speedup)}" for p in members)
        said.append(f"{label}: {shown}.")
    top = max(p.speedup.value for p in points if p.speedup is not None)
    axes.set_ylim(0, max(1.25, 1.6 * top))
    axes.axhline(1, color=style.INK, alpha=0.5, linewidth=0.9, linestyle=":")
    if by_k:
        axes.set_xticks(sorted({_k_of(found, p) or 0 for p in points}))
        axes.set_xlabel("draft tokens a verify step, k")
    else:
        axes.set_xticks(range(len(names)), [style.plain(n) for n in names])
        axes.set_xlabel("setting")
    pairs = max(p.pairs for p in points)
    axes.set_ylabel(f"speed-up, output tokens/s (n = {words.plural(pairs, 'pair')} of blocks)")
    axes.set_title(style.plain(name))
    axes.legend()
    slug = words.slug("sweep", engine, *condition)
    return style.finished(
        figure,
        slug,
        "speed",
        title=f"Speed-up, {name}",
        alt=f"Speed-up of output tokens per second over the baseline, {name}. " + " ".join(said),
        caption="Speculative by baseline over paired blocks; bars are intervals, each on its own, "
        "cut where they leave the figure. The dotted line is no change.",
    )


def _series(found: Sweep, points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points that a line joins: equal but for k, at one load."""
    choices = {s.name: s.choice for s in found.settings}
    lines: dict[str, list[Point]] = {}
    for point in points:
        rest = [_short(c) for c in choices[point.setting] if not c.startswith(f"{K}=")]
        if _k_of(found, point) is None:
            rest = []
        lines.setdefault(", ".join([words.load_words(point.load), *rest]), []).append(point)
    return lines


def _k_of(found: Sweep, point: Point) -> int | None:
    """The setting's own k; None where k is not swept."""
    choice = next((s.choice for s in found.settings if s.name == point.setting), ())
    told = next((c.partition("=")[2] for c in choice if c.startswith(f"{K}=")), "")
    return int(told) if told.isdecimal() else None


def _line(
    axes: Axes, at: Sequence[float], members: Sequence[Point], number: int, label: str
) -> None:
    colour = style.SERIES[number % len(style.SERIES)]
    marker = style.SERIES_MARKERS[number % len(style.SERIES_MARKERS)]
    values = [p.speedup.value for p in members if p.speedup]
    axes.plot(at, values, color=colour, marker=marker, markersize=5, label=style.plain(label))
    for x, point in zip(at, members, strict=True):
        told = point.speedup
        if told is not None and told.ci_low is not None and told.ci_high is not None:
            axes.vlines(x, told.ci_low, told.ci_high, color=colour, alpha=0.5, linewidth=1.4)


def write_report(folder: Path) -> Path:
    """Write `report.html` and `plots/*.svg` of a sweep; each setting has a page of its own.

    Raises `UsageError` where the folder is no sweep's.
    """
    found = read(folder)
    drawn = plots(found)
    write_plots(folder / "plots", drawn)
    page = (
        page_templates()
        .get_template("sweep.html.j2")
        .render(
            title=words.one_line(found.sweep_id, 120),
            schema=words.one_line(found.schema_version, 20),
            sentences=sentences(found),
            columns=COLUMNS,
            rows=rows(found),
            plots=drawn,
            outlook_columns=speed.PREDICTION_COLUMNS,
            outlooks=outlook_tables(found),
            runs=[(s.name, f"{s.run}/report.html") for s in found.settings],
        )
    )
    write_whole(folder / "report.html", page)
    return folder / "report.html"
