"""The figures of a run's report, each drawn from what is there and left out where nothing is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from harness.records import VARIANTS, Variant
from harness.report import style, view, words
from harness.report.plot_startup import startup
from harness.report.run_data import CellData, RunData
from harness.report.style import Plot
from harness.report.telemetry import telemetry_plots
from harness.report.view import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from harness.report.samples import Floats

MOST_GROUPS_DRAWN = 8
MOST_CURVE_POINTS = 400


def make_plots(run: RunData) -> list[Plot]:
    """All figures that the run has data for, in reading order."""
    groups = view.groups(run.summary)
    drawn = groups[:MOST_GROUPS_DRAWN]
    with style.drawing():
        found: list[Plot | None] = [throughput(groups), acceptance(drawn)]
        for group in drawn:
            found.append(latency(group, _of(run, group)))
        for group in drawn:
            found.append(gaps(group, _of(run, group)))
        for group in drawn:
            found.extend(telemetry_plots(group, _of(run, group)))
        found.append(startup(run))
    return [plot for plot in found if plot is not None]


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
    return Plot(
        name="throughput",
        title="Output throughput",
        svg=style.to_svg(figure, "throughput"),
        alt="Output tokens per second by load. " + " ".join(_said(g) for g in groups),
        caption="Each small mark is one block, the bar its variant's mean; a line joins the two "
        "blocks of a pair. Above: the ratio of the paired blocks with its interval.",
        wide=len(groups) > 3,
    )


def _tick(group: Group, several: bool) -> str:
    load = words.load_words(group.load)
    return f"{style.plain(group.engine)}\n{load}" if several else load


def _throughput_at(axes: Axes, x: int, group: Group) -> None:
    offset = {"baseline": x - 0.17, "speculative": x + 0.17}
    blocks = {variant: _blocks(group, variant) for variant in VARIANTS}
    for pair in blocks["baseline"].keys() & blocks["speculative"].keys():
        ends = [blocks[v][pair] for v in VARIANTS]
        axes.plot(list(offset.values()), ends, color=style.INK, alpha=0.3, linewidth=0.8)
    for variant in VARIANTS:
        values = list(blocks[variant].values())
        if not values:
            continue
        colour = style.COLOUR[variant]
        mean = sum(values) / len(values)
        axes.bar(offset[variant], mean, width=0.3, color=colour, alpha=0.28)
        axes.hlines(mean, offset[variant] - 0.15, offset[variant] + 0.15, color=colour, lw=2)
        axes.scatter(
            [offset[variant]] * len(values),
            values,
            s=24,
            color=colour,
            marker=style.MARKER[variant],
            zorder=3,
        )
    row = group.row("output_tokens_per_s")
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


def acceptance(groups: Sequence[Group]) -> Plot | None:
    """Acceptance by position: of all drafts, and of those accepted at the position before."""
    known = [(g, g.acceptance) for g in groups if g.acceptance and g.acceptance.per_position]
    if not known:
        return None
    figure, axes = style.new_figure(1, 2, (9.6, 3.3))
    titles = ("Accepted at least to position", "Accepted, given the one before")
    for i, (group, pooled) in enumerate(known):
        colour = style.SERIES[i % len(style.SERIES)]
        marker = style.SERIES_MARKERS[i % len(style.SERIES_MARKERS)]
        for ax, values in zip(axes, (pooled.per_position, pooled.conditional), strict=True):
            shown = [(i, v * 100) for i, v in enumerate(values) if v is not None]
            xs, ys = [x for x, _ in shown], [y for _, y in shown]
            ax.plot(xs, ys, color=colour, marker=marker, label=style.plain(group.name))
            if len(known) == 1:
                _write_beside(ax, shown)
    deepest = max(len(pooled.per_position) for _, pooled in known)
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
        ax.set_ylim(0, 108)
        ax.set_yticks(range(0, 101, 20))
        ax.set_xticks(range(deepest))
        ax.set_xlim(-0.4, deepest - 0.6)
        ax.set_xlabel("draft position, from 0")
    drafts = sum(pooled.drafts for _, pooled in known)
    axes[0].set_ylabel(f"% of drafts (n = {drafts:,d})")
    axes[1].set_ylabel("% of drafts that got there")
    if len(known) > 1:
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=min(len(known), 3),
        )
    alts = [
        f"{g.name}: marginal {_list(p.per_position)}, conditional {_list(p.conditional)}, "
        f"of {p.drafts:,d} drafts."
        for g, p in known
    ]
    return Plot(
        name="acceptance",
        title="Acceptance by position",
        svg=style.to_svg(figure, "acceptance"),
        alt="Acceptance by draft position. " + " ".join(alts),
        caption="Left falls by its nature; right tells whether the drafter is worse at later "
        "positions. A first position far below the training accuracy points at the engine or the "
        "layers served, a falling right-hand line at training.",
        wide=True,
    )


def _write_beside(ax: Axes, points: Sequence[tuple[int, float]]) -> None:
    """Each point's height in figures above it."""
    place: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
    for x, y in points:
        ax.annotate(f"{y:.1f}", (x, y), fontsize=8.5, **place)


def _list(values: Iterable[float | None]) -> str:
    return ", ".join(words.percent(value) for value in values)


def latency(group: Group, cells: Sequence[CellData]) -> Plot | None:
    """TTFT, TPOT and E2E latency of both variants: the share of requests at or below."""
    columns = {key: _pooled(cells, lambda s, key=key: getattr(s, key)) for key, _ in view.LATENCIES}
    if not any(len(v) for by in columns.values() for v in by.values()):
        return None
    figure, axes = style.new_figure(1, 3, (9.6, 3.3))
    notes = []
    for ax, (key, label) in zip(axes, view.LATENCIES, strict=True):
        for variant, values in columns[key].items():
            if not len(values):
                continue
            xs, ys = _ecdf(values)
            ax.step(
                xs * 1e3,
                ys * 100,
                where="post",
                color=style.COLOUR[variant],
                linestyle=style.DASHES[variant],
            )
            notes.append(f"{label} {variant} median {_median(values)} ms (n = {len(values):,d})")
        _latency_axis(ax, label, [len(v) for v in columns[key].values() if len(v)])
    seen = [v for v in VARIANTS if any(len(by[v]) for by in columns.values())]
    style.name_variants(figure, variants=seen)
    axes[0].set_ylabel("% of requests at or below")
    _name_load(figure, group)
    name = words.slug("latency", group.name)
    return Plot(
        name=name,
        title=f"Latency: {group.name}",
        svg=style.to_svg(figure, name),
        alt=f"Cumulative distributions of latency, {group.name}. " + "; ".join(notes) + ".",
        caption="All answered requests of all blocks. The further left, the faster.",
        wide=True,
    )


def _latency_axis(ax: Axes, label: str, sizes: Sequence[int]) -> None:
    n = " and ".join(f"{size:,d}" for size in sizes)
    ax.set_title(f"{label} (n = {n})" if n else label)
    ax.set_ylim(0, 101)
    ax.set_xlim(left=0)
    ax.set_xlabel(f"{label}, ms")
    if not ax.lines:
        ax.text(0.5, 0.5, "undefined", transform=ax.transAxes, ha="center", alpha=0.6)


def _ecdf(values: Floats) -> tuple[Floats, Floats]:
    """Sorted values and the share at or below each; thinned, since no eye sees 200,000 steps."""
    import numpy as np

    ordered = np.sort(values)
    n = len(ordered)
    keep = np.unique(np.linspace(0, n - 1, min(n, MOST_CURVE_POINTS)).astype(int))
    return np.concatenate((ordered[:1], ordered[keep])), np.concatenate(([0.0], (keep + 1) / n))


def _median(values: Floats) -> str:
    import numpy as np

    return words.milliseconds(float(np.median(values)))


def _pooled(cells: Sequence[CellData], read: Callable[..., Floats]) -> dict[Variant, Floats]:
    """One array a variant, over all its blocks."""
    import numpy as np

    pooled: dict[Variant, Floats] = {}
    for variant in VARIANTS:
        parts = [read(c.samples) for c in cells if c.variant == variant and c.samples is not None]
        pooled[variant] = np.concatenate(parts) if parts else np.empty(0)
    return pooled


def gaps(group: Group, cells: Sequence[CellData]) -> Plot | None:
    """Distribution of the time between chunks, on a logarithmic axis."""
    import numpy as np

    pooled = {v: x[x > 0] for v, x in _pooled(cells, lambda s: s.gaps_s).items()}
    every = np.concatenate(list(pooled.values()))
    if len(every) < 2:
        return None
    low, high = np.percentile(every, [0.1, 99.9]) * 1e3
    edges = np.geomspace(max(low * 0.9, 1e-3), max(high * 1.1, low * 1.5, 2e-3), 61)
    figure, (ax,) = style.new_figure(1, 1, (4.8, 3.4))
    notes = []
    for variant, values in pooled.items():
        if not len(values):
            continue
        heights, _ = np.histogram(np.clip(values * 1e3, edges[0], edges[-1]), edges)
        colour, dashes = style.COLOUR[variant], style.DASHES[variant]
        share = heights * 100 / len(values)
        ax.stairs(share, edges, color=colour, linestyle=dashes, lw=1.6)
        ax.stairs(share, edges, color=colour, alpha=0.14, fill=True)
        ax.axvline(float(np.median(values)) * 1e3, color=colour, linestyle=dashes, lw=1)
        p99 = words.milliseconds(float(np.percentile(values, 99)))
        notes.append(f"{variant} median {_median(values)} ms, p99 {p99} ms, n = {len(values):,d}")
    ax.set_xscale("log")
    _plain_log_ticks(ax)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("gap between chunks, ms (logarithmic)")
    ax.set_ylabel("% of gaps")
    _name_load(figure, group)
    sizes = " and ".join(f"{len(values):,d}" for values in pooled.values() if len(values))
    ax.set_title(f"Time between chunks (n = {sizes})")
    style.name_variants(figure, variants=[v for v in VARIANTS if len(pooled[v])])
    name = words.slug("gaps", group.name)
    return Plot(
        name=name,
        title=f"Time between chunks: {group.name}",
        svg=style.to_svg(figure, name),
        alt=f"Distribution of the time between chunks, {group.name}: " + "; ".join(notes) + ".",
        caption="With speculation a gap is one verify step, which yields one to "
        "k + 1 tokens; without, it is one token. Thin lines: medians. The extreme 0.1% at either "
        "end are drawn at the edge.",
    )


def _name_load(figure: Figure, group: Group) -> None:
    """Engine and load above the figure, which is also looked at by itself."""
    load = words.load_words(group.load)
    name = f"{style.plain(group.engine)}, {load}"
    figure.suptitle(name, x=0.01, ha="left", fontsize=9.5)


def _plain_log_ticks(ax: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_xlim()
    spans = high / max(low, 1e-9)
    subs: tuple[float, ...] = (1.0,)
    if spans < 2000:
        subs = (1.0, 2.0, 5.0) if spans > 10 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    ax.xaxis.set_major_locator(LogLocator(base=10, subs=subs))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
