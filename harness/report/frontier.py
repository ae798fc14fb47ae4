"""A capacity search's answer as a table for the terminal, and its two figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.analyse.bracket import By
from harness.analyse.frontier import Capacity, Figures, Probe, VariantCapacity, at_load, load_unit
from harness.report import style, words
from harness.report.style import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAPACITY = "capacity.json"
MARKS = {"met": "full", "missed": "none", "undecided": "left"}
"""How much of a probe's mark is filled."""
BESIDE = {"baseline": 0.985, "speculative": 1.015}
"""Marks of both variants at one load are drawn side by side."""


def read(run_dir: Path) -> Capacity | None:
    """The folder's answer; None where it has none, or none that can be read."""
    try:
        return msgspec.json.decode((run_dir / CAPACITY).read_bytes(), type=Capacity)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def render_text(found: Capacity, width: int = 100) -> str:
    """The answer in words, then every probe, as plain text of at most `width` columns."""
    import io

    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    sink = io.StringIO()
    console = Console(file=sink, width=width, color_system=None, force_terminal=False)
    for sentence in sentences(found):
        console.print(escape(sentence), highlight=False)
    for side in found.variants:
        name = words.one_line(f"{side.engine}, {side.variant}", 80)
        table = Table(title=escape(name), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in (load_unit(found.by), *COLUMNS):
            table.add_column(column, justify="right", overflow="fold")
        for probe in side.probes:
            table.add_row(*_row(probe))
        if side.probes:
            console.print(table)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()) + "\n"


COLUMNS = (
    "met the levels", "interval", "verdict", "TTFT p99, ms", "TPOT mean, ms", "tokens/s a user",
    "tokens/s",
)  # fmt: skip


def _row(probe: Probe) -> list[str]:
    figures = probe.figures
    return [
        f"{probe.value:g}",
        words.share(probe.met, probe.requests),
        f"{words.percent(probe.low, 0)}{words.DASH}{words.percent(probe.high, 0)}",
        probe.judged + (" (no steady state)" if probe.overloaded else ""),
        words.milliseconds(figures.ttft_p99_s),
        words.milliseconds(figures.tpot_mean_s),
        words.number(figures.tokens_per_s_user),
        words.number(figures.output_tokens_per_s),
    ]


@dataclass(frozen=True, kw_only=True)
class ProbeTable:
    """The loads that one variant was tried at, as plain strings."""

    name: str
    columns: tuple[str, ...]
    rows: list[list[str]]


def tables(found: Capacity) -> list[ProbeTable]:
    """A table for each variant that was looked at."""
    return [
        ProbeTable(
            name=words.one_line(f"{side.engine}, {side.variant}", 80),
            columns=(load_unit(found.by), *COLUMNS),
            rows=[_row(probe) for probe in side.probes],
        )
        for side in found.variants
        if side.probes
    ]


def sentences(found: Capacity) -> list[str]:
    """The answer: what is held, up to where, and how the variants compare."""
    told = [
        f"At least {found.attain:.0%} of the requests meet {found.slo_words}, "
        f"with {found.confidence:.0%} confidence:"
    ]
    for side in found.variants:
        name = words.one_line(f"{side.engine} {side.variant}", 80)
        told.append(f"  {name}: {_up_to(side, found.by)}")
    if not found.variants:
        told.append("  No load was looked at yet.")
    for engine in dict.fromkeys(side.engine for side in found.variants):
        told.extend(_compared(engine, [s for s in found.variants if s.engine == engine]))
    if not all(side.finished for side in found.variants) or not found.variants:
        told.append("The search was cut short: `python -m harness resume RUN` goes on with it.")
    failed = sum(probe.failed for side in found.variants for probe in side.probes)
    if failed:
        told.append(
            f"{words.plural(failed, 'request')} failed; a failed request is not within the levels. "
            "The report's cautions say why they failed."
        )
    return told


def paragraphs(found: Capacity) -> list[str]:
    """The same sentences for a page, each with its end."""
    each = [sentence.strip() for sentence in sentences(found)]
    return [s if s.endswith((".", ":")) else f"{s}." for s in each]


def _compared(engine: str, sides: Sequence[VariantCapacity]) -> list[str]:
    """What the drafter changes: from the ends of both brackets, since each is all that is known."""
    by = {side.variant: side for side in sides}
    base, spec = by.get("baseline"), by.get("speculative")
    if base is None or spec is None or not base.highest_met or not spec.highest_met:
        return []
    name = words.one_line(engine, 80)
    if base.lowest_missed is None:
        return []
    low = spec.highest_met / base.lowest_missed
    if spec.lowest_missed is None:
        return [f"  {name}: the drafter multiplies the load that is held by at least {low:.2f}"]
    high = spec.lowest_missed / base.highest_met
    return [
        f"  {name}: the drafter multiplies the load that is held by {low:.2f} to {high:.2f} "
        "(one start each)"
    ]


def _up_to(side: VariantCapacity, by: By) -> str:
    missed = "" if side.lowest_missed is None else f"missed at {side.lowest_missed:g}"
    doubt = ", ".join(f"{v:g}" for v in side.undecided)
    rest = "; ".join(part for part in (missed, doubt and f"undecided at {doubt}") if part)
    if not side.probes:
        return "no load was looked at yet"
    if side.highest_met is None and not side.finished:
        return f"shown to hold at no load before the search was cut short ({rest})"
    if side.highest_met is None:
        no_load = "shown to hold at no load" if doubt else "held at no load"
        return f"{no_load} that was tried ({rest or 'nothing was measured'})"
    return f"held up to {at_load(by, side.highest_met)}" + (
        (f" ({rest})" if rest else ", the highest tried")
        + ("" if side.finished else ", before the search was cut short")
    )


def plots(found: Capacity) -> list[Plot]:
    """The frontier, and the share of requests that met the levels by load."""
    if not any(side.probes for side in found.variants):
        return []
    with style.drawing():
        return [_frontier(found), _attainment(found)]


def _frontier(found: Capacity) -> Plot:
    figure, (axes,) = style.new_figure(1, 1, (6.4, 4.0))
    said = []
    per_gpu = all(found.gpus.get(side.engine) for side in found.variants)
    what = "GPU" if per_gpu else "server"

    def height(figures: Figures) -> float | None:
        return figures.tokens_per_s_gpu if per_gpu else figures.output_tokens_per_s

    for side in found.variants:
        known = [
            (x, y, p)
            for p in side.probes
            if (x := p.figures.tokens_per_s_user) is not None
            and (y := height(p.figures)) is not None
        ]
        _line(axes, side, found, known)
        for x, y, p in known:
            axes.annotate(
                f"{p.value:g}", (x, y), (4, 4), textcoords="offset points", fontsize=7.5, alpha=0.8
            )
        shown = "; ".join(
            f"{words.number(x)} and {words.number(y)} at {p.value:g}" for x, y, p in known
        )
        said.append(f"{side.engine} {side.variant}: {shown or 'no figure'}.")
    axes.set_xlabel(f"output tokens/s a user, 1 / mean TPOT (n = {_requests(found)})")
    axes.set_ylabel(f"output tokens/s a {what}")
    axes.set_title("Speed of one user against throughput")
    _finish(axes)
    return style.finished(
        figure,
        "frontier",
        "speed",
        title="Frontier",
        alt=f"Output tokens per second of a user and of a {what}, by load. " + " ".join(said),
        caption=f"Each mark is a load ({load_unit(found.by)} beside it): full where the service "
        "levels were held, empty where they were missed, half where it stayed undecided. Further "
        "to the right and further up is better.",
    )


def _requests(found: Capacity) -> str:
    """How many requests all probes judged."""
    return f"{sum(probe.requests for side in found.variants for probe in side.probes):,d} requests"


def _attainment(found: Capacity) -> Plot:
    from matplotlib.ticker import NullLocator

    figure, (axes,) = style.new_figure(1, 1, (6.4, 4.0))
    said = []
    for side in found.variants:
        aside = BESIDE[side.variant]
        known = [(p.value * aside, p.share * 100, p) for p in side.probes if p.share is not None]
        _line(axes, side, found, known)
        colour = _colour(side, found)
        for x, _, p in known:
            axes.vlines(x, p.low * 100, p.high * 100, color=colour, alpha=0.5, linewidth=1.2)
        shown = ", ".join(f"{words.percent(y / 100)} at {p.value:g}" for _, y, p in known)
        said.append(f"{side.engine} {side.variant}: {shown or 'no figure'}.")
    axes.axhline(found.attain * 100, color=style.INK, alpha=0.5, linewidth=0.9, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 104)
    axes.set_xlabel(load_unit(found.by))
    axes.set_ylabel(f"% of requests that met all levels (n = {_requests(found)})")
    axes.set_title(style.plain(found.slo_words))
    _finish(axes)
    return style.finished(
        figure,
        "attainment",
        "speed",
        title="Service levels by load",
        alt="Share of requests that met the service levels, by load. " + " ".join(said),
        caption=f"Bars are intervals at {found.confidence:.0%}; the dotted line is the share that "
        "must be held.",
    )


def _line(
    axes: Axes,
    side: VariantCapacity,
    found: Capacity,
    known: Sequence[tuple[float, float, Probe]],
) -> None:
    colour = _colour(side, found)
    several = len({s.engine for s in found.variants}) > 1
    name = f"{side.engine}, {side.variant}" if several else side.variant
    axes.plot(
        [x for x, _, _ in known],
        [y for _, y, _ in known],
        color=colour,
        linestyle=style.DASHES[side.variant],
        label=style.plain(name),
    )
    for x, y, probe in known:
        axes.plot(
            [x],
            [y],
            color=colour,
            marker=style.MARKER[side.variant],
            fillstyle=MARKS[probe.judged],
            markersize=6,
            linestyle="none",
        )


def _colour(side: VariantCapacity, found: Capacity) -> str:
    engines = list(dict.fromkeys(s.engine for s in found.variants))
    if len(engines) == 1:
        return style.COLOUR[side.variant]
    return style.SERIES[engines.index(side.engine) % len(style.SERIES)]


def _finish(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.legend()
