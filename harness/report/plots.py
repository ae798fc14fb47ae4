"""The figures of a run's report, each drawn from what is there and left out where nothing is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from harness.analyse.frontier import gpus_told
from harness.records import VARIANTS, LoadPoint, Variant
from harness.report import style, view, words
from harness.report.plot_acceptance import acceptance, by_category, tokens_per_step
from harness.report.plot_latency import gaps, latency
from harness.report.plot_loads import effects, load_plots
from harness.report.plot_startup import startup
from harness.report.run_data import CellData, RunData
from harness.report.style import Plot
from harness.report.telemetry import telemetry_plots
from harness.report.view import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_GROUPS_DRAWN = 8
LONGEST_TICK = 16


def make_plots(run: RunData, *, with_frontier: bool = True) -> list[Plot]:
    """All figures that the run has data for, in reading order.

    `with_frontier` False: the page has another one, of a capacity search.
    """
    groups = view.groups_to_draw(run.summary)
    drawn = groups[:MOST_GROUPS_DRAWN]
    with style.drawing():
        found: list[Plot | None] = [effects(groups)]
        found += [
            plot
            for plot in load_plots(groups, gpus_of_engines(run))
            if with_frontier or plot.name != "frontier"
        ]
        found.append(throughput(groups))
        for group in drawn:
            found.append(latency(group, _of(run, group)))
        for group in drawn:
            found.append(gaps(group, _of(run, group)))
        names = short_names(drawn)
        named = [
            (names[group.engine, group.load], group.acceptance)
            for group in drawn
            if group.acceptance is not None
        ]
        parted = [
            (names[s.engine, s.load], s) for s in run.summary.splits if (s.engine, s.load) in names
        ]
        found += [acceptance(named), tokens_per_step(named), by_category(parted)]
        for group in drawn:
            found.extend(telemetry_plots(group, _of(run, group)))
        found.append(startup(run))
    return [plot for plot in found if plot is not None]


def short_names(groups: Sequence[Group]) -> dict[tuple[str, LoadPoint], str]:
    """What each engine and load is called in a legend: its load alone where there is one engine."""
    several = len({group.engine for group in groups}) > 1
    return {
        (group.engine, group.load): group.name if several else words.load_words(group.load)
        for group in groups
    }


def gpus_of_engines(run: RunData) -> dict[str, int | None]:
    """On how many GPUs each engine ran."""
    plans = run.manifest.plan.get("engines") if run.manifest else None
    engines = {cell.engine for cell in run.summary.cells}
    if not isinstance(plans, dict):
        return {}
    return {
        engine: gpus_told(plans[engine], run.launches, engine)
        for engine in engines
        if isinstance(plans.get(engine), dict)
    }


def _of(run: RunData, group: Group) -> list[CellData]:
    return [c for c in run.cells if c.engine == group.engine and c.load == group.load]


def throughput(groups: Sequence[Group]) -> Plot | None:
    """Output tokens/s of both variants by load: each block a point, paired blocks joined."""
    groups = [g for g in groups if any(_blocks(g, v) for v in VARIANTS)]
    if not groups:
        return None
    width = min(9.6, max(4.8, 1.6 + 1.5 * len(groups)))
    figure, (axes,) = style.new_figure(1, 1, (width, 3.6))
    for x, group in enumerate(groups):
        _throughput_at(axes, x, group)
    several = len({group.engine for group in groups}) > 1
    labels = [_tick(group, several) for group in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    tops = [value for g in groups for v in VARIANTS for value in _blocks(g, v).values()]
    axes.set_ylim(0, max(tops) * 1.24 or 1.0)
    axes.set_ylabel("output tokens/s")
    axes.set_xlabel("engine and load" if several else "load")
    most = max(len(_blocks(g, v)) for g in groups for v in VARIANTS)
    axes.set_title(f"Output throughput (n = {words.plural(most, 'block')} a variant)")
    style.name_variants(figure, markers=True, variants=_seen(groups))
    return style.finished(
        figure,
        "throughput",
        "speed",
        title="Output throughput",
        alt="Output tokens per second by load. " + " ".join(_said(g) for g in groups),
        caption="Each small mark is one block, the bar its variant's figure in the table; a line "
        "joins the two blocks of a pair. Above: the ratio of the paired blocks with its interval.",
        wide=len(groups) > 3,
    )


def _tick(group: Group, several: bool) -> str:
    load = words.load_words(group.load)
    return "\n".join([*wrap(style.plain(group.engine), LONGEST_TICK), load]) if several else load


def _throughput_at(axes: Axes, x: int, group: Group) -> None:
    offset = {"baseline": x - 0.17, "speculative": x + 0.17}
    blocks = {variant: _blocks(group, variant) for variant in VARIANTS}
    row = group.row("output_tokens_per_s")
    for pair in blocks["baseline"].keys() & blocks["speculative"].keys():
        ends = [blocks[v][pair] for v in VARIANTS]
        axes.plot(list(offset.values()), ends, color=style.INK, alpha=0.3, linewidth=0.8)
    for variant in VARIANTS:
        values = list(blocks[variant].values())
        if not values:
            continue
        colour = style.COLOUR[variant]
        middle = getattr(row, variant) if row is not None else None
        if middle is not None and not words.missing(middle):
            axes.bar(offset[variant], middle, width=0.3, color=colour, alpha=0.28)
            axes.hlines(middle, offset[variant] - 0.15, offset[variant] + 0.15, color=colour, lw=2)
        axes.scatter(
            [offset[variant]] * len(values),
            values,
            s=24,
            color=colour,
            marker=style.MARKER[variant],
            zorder=3,
        )
    if row is not None and not words.missing(row.ratio):
        top = max((*blocks["baseline"].values(), *blocks["speculative"].values()))
        text = words.ratio(row.ratio, row.ci_low, row.ci_high).replace(" (", "\n(")
        axes.annotate(
            text, (x, top), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8.5
        )


def _blocks(group: Group, variant: Variant) -> dict[tuple[int, int], float]:
    """Output tokens/s by repeat and block, which a pair shares."""
    return {
        (cell.repeat, cell.block): value
        for cell in group.cells
        if cell.variant == variant
        and cell.metrics is not None
        and (value := cell.metrics.output_tokens_per_s) is not None
        and not words.missing(value)
    }


def _seen(groups: Iterable[Group]) -> list[Variant]:
    groups = list(groups)
    return [v for v in VARIANTS if any(_blocks(g, v) for g in groups)]


def _said(group: Group) -> str:
    row = group.row("output_tokens_per_s")
    if row is None:
        return f"{group.name}: no figure."
    return (
        f"{group.name}: baseline {words.number(row.baseline)}, "
        f"speculative {words.number(row.speculative)}, "
        f"ratio {words.ratio(row.ratio, row.ci_low, row.ci_high)}."
    )
