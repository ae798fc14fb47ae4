"""Figures of speed by load: the ratios, figures against load, the speed-up, and the frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from harness.records import VARIANTS, LoadPoint, Variant
from harness.report import style, view, words
from harness.report.style import Plot
from harness.report.view import Group, MetricRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEED = "output_tokens_per_s"
WIDEST = 8.0
"""Ratios beyond this, and below its inverse, are drawn at the edge."""
MOST_ROWS = 24
LONGEST_OF_TWO = 22
"""Letters of a name that leave room for another beside it."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One engine's loads that differ in concurrency or rate alone, in rising order."""

    engine: str
    mode: str
    groups: tuple[Group, ...]

    @property
    def unit(self) -> str:
        return "concurrency" if self.mode == "closed" else "requests/s"

    @property
    def at(self) -> list[float]:
        return [load_value(group.load) or 0.0 for group in self.groups]


def load_value(load: LoadPoint) -> float | None:
    """The load as one number: its concurrency or its rate; None where it is neither."""
    return load.concurrency if load.mode == "closed" else load.request_rate


def series_of(groups: Sequence[Group]) -> list[Series]:
    """The groups that a line may join; loads of no number, and single ones too, are left out."""
    lines: dict[tuple[str, LoadPoint], dict[float, Group]] = {}
    for group in groups:
        value = load_value(group.load)
        if value is not None:
            alike = msgspec.structs.replace(
                group.load,
                concurrency=None,
                request_rate=None,
                num_requests=None,
                num_output_tokens=None,
                duration_s=None,
            )
            lines.setdefault((group.engine, alike), {}).setdefault(value, group)
    return [
        Series(
            engine=engine,
            mode=alike.mode,
            groups=tuple(group for _, group in sorted(own.items())),
        )
        for (engine, alike), own in lines.items()
        if len(own) > 1
    ]


def load_plots(groups: Sequence[Group], gpus: Mapping[str, int | None]) -> list[Plot]:
    """Everything against load; nothing where no engine was measured at several loads.

    `gpus`: on how many GPUs each engine ran; None where that is not known.
    """
    series = series_of(groups)
    found: list[Plot | None] = [speedup(series), frontier(series, gpus)]
    found += [against_load(one, i) for i, one in enumerate(series)]
    return [plot for plot in found if plot is not None]


def effects(groups: Sequence[Group]) -> Plot | None:
    """The ratio of every metric at every load beside break-even, coloured by its verdict."""
    known = [g for g in groups if any(not words.missing(r.ratio) for r in g.rows)][:MOST_ROWS]
    if not known:
        return None
    figure, axes = style.new_figure(1, len(view.METRICS), (9.6, 1.5 + 0.42 * len(known)))
    said: list[str] = []
    for ax, spec in zip(axes, view.METRICS, strict=True):
        rows = [group.row(spec.key) for group in known]
        for y, row in enumerate(rows):
            if row is not None and not words.missing(row.ratio):
                _effect(ax, y, row)
                said.append(
                    f"{spec.label.split(',')[0]}, {known[y].name}: "
                    f"{words.ratio(row.ratio, row.ci_low, row.ci_high)}, "
                    f"{row.verdict or 'no verdict'}"
                )
        _effect_axis(ax, spec.label.split(",")[0], rows, more_is_better=spec.key == SPEED)
        ax.set_ylim(len(known) - 0.35, -0.65)
    several = len({group.engine for group in known}) > 1
    names = [style.plain(g.name if several else words.load_words(g.load)) for g in known]
    axes[0].set_yticks(range(len(known)), names)
    for ax in axes[1:]:
        ax.set_yticks(range(len(known)), [])
    _name_verdicts(figure, known)
    return style.finished(
        figure,
        "effects",
        "speed",
        title="What the drafter changes",
        alt="Ratios of speculative over baseline. " + "; ".join(said) + ".",
        caption="Each mark is a ratio with its interval; where several comparisons were made the "
        "thin line is the corrected interval, which the verdict is drawn from. The shaded side of "
        "1, which is break-even, is the better one: more tokens a second, less latency.",
        wide=True,
    )


def _effect(ax: Axes, y: int, row: MetricRow) -> None:
    verdict = row.verdict or "undecided"
    colour, ratio = style.VERDICT[verdict], _cut(row.ratio or 1.0)
    if row.corrected is not None:
        low, high = row.corrected
        ax.hlines(y, _cut(low), _cut(high), color=colour, linewidth=1)
    if row.ci_low is not None and row.ci_high is not None:
        ax.hlines(y, _cut(row.ci_low), _cut(row.ci_high), color=colour, linewidth=3.2)
    ax.plot(
        [ratio], [y], color=colour, marker=style.VERDICT_MARKERS[verdict], markersize=7,
        markeredgecolor=style.INK, markeredgewidth=0.6,
    )  # fmt: skip
    ax.annotate(
        f"{row.ratio:.2f}x", (ratio, y), xytext=(0, 7), textcoords="offset points", ha="center",
        fontsize=8.5,
    )  # fmt: skip


def _cut(value: float) -> float:
    return min(max(value, 1 / WIDEST), WIDEST)


def _effect_axis(
    ax: Axes, title: str, rows: Sequence[MetricRow | None], *, more_is_better: bool
) -> None:
    """Equally far to both sides of 1, so that a look tells better from worse."""
    ends = [
        abs(math.log(_cut(end)))
        for row in rows
        if row is not None
        for end in (row.ratio, row.ci_low, row.ci_high, *(row.corrected or ()))
        if end is not None and not words.missing(end) and end > 0
    ]
    reach = math.exp(max([math.log(1.25), *ends]) * 1.12)
    ax.set_xscale("log")
    ax.set_xlim(1 / reach, reach)
    better = (1, reach) if more_is_better else (1 / reach, 1)
    ax.axvspan(*better, color=style.VERDICT["better"], alpha=0.09, linewidth=0)
    ax.axvline(1, color=style.INK, alpha=0.6, linewidth=0.9)
    _ratio_ticks(ax, reach)
    ax.set_title(title)
    pairs = [row.pairs for row in rows if row is not None and row.pairs]
    told = words.plural(max(pairs, default=0), "pair")
    most = "" if len(set(pairs)) < 2 else " at most"
    ax.set_xlabel(f"ratio (n = {told}{most})")
    ax.grid(axis="y", visible=False)


def _ratio_ticks(ax: Axes, reach: float) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    step = next((s for s in (1.1, 1.2, 1.5, 2.0, 4.0) if s**2 > reach), 4.0)
    ticks = [t for t in (1 / step, 1.0, step) if 1 / reach <= t <= reach]
    ax.set_xticks(ticks, [f"{t:.2g}" for t in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())


def _name_verdicts(figure: Figure, groups: Sequence[Group]) -> None:
    from matplotlib.lines import Line2D

    seen = {row.verdict or "undecided" for g in groups for row in g.rows if row.ratio is not None}
    handles = [
        Line2D([], [], color=colour, marker=style.VERDICT_MARKERS[verdict], label=verdict, lw=3.2,
               markeredgecolor=style.INK, markeredgewidth=0.6, markersize=7)
        for verdict, colour in style.VERDICT.items()
        if verdict in seen
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def speedup(series: Sequence[Series]) -> Plot | None:
    """Speed-up of output tokens/s against load, with the line of break-even."""
    drawn = [(one, _ratios(one)) for one in series]
    drawn = [(one, points) for one, points in drawn if len(points) > 1]
    if not drawn:
        return None
    figure, (ax,) = style.new_figure(1, 1, (4.8, 3.5))
    said, lowest, highest = [], 0.9, 1.1
    for i, (one, points) in enumerate(drawn):
        colour = style.SERIES[i % len(style.SERIES)]
        marker = style.SERIES_MARKERS[i % len(style.SERIES_MARKERS)]
        xs, ys = [x for x, _ in points], [row.ratio or 1.0 for _, row in points]
        ax.plot(xs, ys, color=colour, marker=marker, label=style.plain(one.engine))
        ends = [(row.ci_low, row.ci_high) for _, row in points]
        if all(low is not None and high is not None for low, high in ends):
            lows, highs = ([_cut(e or 1.0) for e in side] for side in zip(*ends, strict=True))
            ax.fill_between(xs, lows, highs, color=colour, alpha=0.16, linewidth=0)
            near = [e for e in (*lows, *highs) if min(ys) / 1.6 < e < max(ys) * 1.6]
            lowest, highest = min([lowest, *near]), max([highest, *near])
        lowest, highest = min([lowest, *ys]), max([highest, *ys])
        told = "; ".join(f"{words.ratio(r.ratio, r.ci_low, r.ci_high)} at {x:g}" for x, r in points)
        said.append(f"{one.engine}: {told}.")
    ax.axhline(1, color=style.INK, alpha=0.7, linewidth=1, linestyle=":")
    below = sum((row.ratio or 1) > 1 for _, points in drawn for _, row in points) * 2 >= len(drawn)
    ax.annotate(
        "break-even", (0, 1), xycoords=("axes fraction", "data"), xytext=(4, -11 if below else 4),
        textcoords="offset points", fontsize=8.5, alpha=0.8,
    )  # fmt: skip
    room = (highest - lowest) * 0.12
    ax.set_ylim(max(0.0, lowest - room), highest + room)
    pairs = max(row.pairs for _, points in drawn for _, row in points)
    _load_axis(ax, [one for one, _ in drawn], f"n = {words.plural(pairs, 'pair')} of blocks a load")
    ax.set_ylabel("speed-up, output tokens/s")
    ax.set_title("Speed-up by load")
    if len(drawn) > 1:
        _name_below(figure, ax)
    return style.finished(
        figure,
        "speedup",
        "speed",
        title="Speed-up by load",
        alt="Speed-up of output tokens per second by load. " + " ".join(said),
        caption="Speculative over baseline in paired blocks; bands are intervals, each load's by "
        "itself. Where the band comes down to the dotted line the drafter no longer pays.",
    )


def _name_below(figure: Figure, ax: Axes) -> None:
    """The lines' names below the figure, which grows for them; long ones one a row."""
    handles, names = ax.get_legend_handles_labels()
    columns = 2 if max(map(len, names)) <= LONGEST_OF_TWO else 1
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(names) / columns))
    figure.legend(handles, names, loc="outside lower center", ncols=columns)


def _ratios(one: Series) -> list[tuple[float, MetricRow]]:
    rows = [(x, group.row(SPEED)) for x, group in zip(one.at, one.groups, strict=True)]
    return [(x, row) for x, row in rows if row is not None and not words.missing(row.ratio)]


def _load_axis(ax: Axes, series: Sequence[Series], basis: str) -> None:
    """Loads in powers of two where they spread so far; the numbers that were measured."""
    from matplotlib.ticker import NullLocator

    ticks = sorted({x for one in series for x in one.at})
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= 8:
        ax.set_xscale("log", base=2)
    units = dict.fromkeys(one.unit for one in series)
    if len(ticks) <= 12:
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(f"{' or '.join(units)} ({basis})")


def against_load(one: Series, number: int) -> Plot | None:
    """Throughput and the mean latencies of both variants against load, with bands."""
    figure, axes = style.new_figure(2, 2, (9.6, 5.8))
    said: list[str] = []
    for ax, spec in zip(axes, view.METRICS, strict=True):
        tops = [_against(ax, one, spec, variant, said) for variant in VARIANTS]
        ax.set_title(spec.label)
        ax.set_ylim(0, max(tops) * 1.06 or 1.0)
        ax.set_ylabel(spec.label.rpartition(", ")[2])
    if not said:
        return None
    for ax in axes:
        _load_axis(ax, [one], f"n = {_blocks(one)}")
    figure.suptitle(style.plain(one.engine), x=0.01, ha="left", fontsize=9.5)
    style.name_variants(figure, list(VARIANTS))
    name = words.slug("by-load", one.engine, one.mode, str(number) if number else "")
    return style.finished(
        figure,
        name,
        "speed",
        title=f"By load: {words.one_line(one.engine, 60)}",
        alt=f"Figures by {one.unit}, {words.one_line(one.engine, 60)}. " + "; ".join(said) + ".",
        caption="Both variants at every load that was measured; bands are the intervals over "
        "starts of the engine, and where there is one start alone there is none.",
        wide=True,
    )


def _blocks(one: Series) -> str:
    most = max(n for group in one.groups for n in group.blocks.values())
    answered = sum(ok for group in one.groups for ok, _ in group.requests.values())
    return f"{words.plural(most, 'block')} each, {words.plural(answered, 'request')}"


def _against(
    ax: Axes, one: Series, spec: view.MetricSpec, variant: Variant, said: list[str]
) -> float:
    """Draw one variant and tell it in `said`; how high the axis must reach for it.

    A band of a few starts may be so wide that nothing else could be seen: it is cut by the axis.
    """
    points = []
    for x, group in zip(one.at, one.groups, strict=True):
        row = group.row(spec.key)
        value = None if row is None else getattr(row, variant)
        if value is not None and not words.missing(value):
            points.append((x, value * spec.scale, group.estimates.get((variant, spec.key))))
    if not points:
        return 0.0
    looks = {"color": style.COLOUR[variant], "linestyle": style.DASHES[variant]}
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    ax.plot(xs, ys, marker=style.MARKER[variant], markersize=5, **looks)
    bands = [
        (x, e.ci_low * spec.scale, e.ci_high * spec.scale)
        for x, _, e in points
        if e is not None and e.ci_low is not None and e.ci_high is not None
    ]
    if bands:
        at, lows, highs = map(list, zip(*bands, strict=True))
        ax.fill_between(at, lows, highs, color=looks["color"], alpha=0.16, linewidth=0)
    shown = ", ".join(f"{words.number(y)} at {x:g}" for x, y in zip(xs, ys, strict=True))
    said.append(f"{spec.label}, {variant}: {shown}")
    return max(max(ys), min(1.6 * max(ys), max((high for _, _, high in bands), default=0.0)))


def frontier(series: Sequence[Series], gpus: Mapping[str, int | None]) -> Plot | None:
    """Speed of one user against throughput of a GPU, one line an engine and variant."""
    per_gpu = all(gpus.get(one.engine) for one in series)
    what = "GPU" if per_gpu else "server"
    figure, (ax,) = style.new_figure(1, 1, (4.8, 3.5))
    said: list[str] = []
    for i, one in enumerate(series):
        for variant in VARIANTS:
            points = _frontier_points(one, variant, (gpus.get(one.engine) or 1) if per_gpu else 1)
            if not points:
                continue
            colour = (
                style.SERIES[i % len(style.SERIES)] if len(series) > 1 else style.COLOUR[variant]
            )
            name = f"{one.engine}, {variant}" if len(series) > 1 else variant
            ax.plot(
                [x for x, _, _ in points], [y for _, y, _ in points], color=colour,
                linestyle=style.DASHES[variant], marker=style.MARKER[variant], markersize=5,
                label=style.plain(name),
            )  # fmt: skip
            for x, y, load in points:
                ax.annotate(f"{load:g}", (x, y), (4, 4), textcoords="offset points", fontsize=7.5)
            told = "; ".join(
                f"{words.number(x)} and {words.number(y)} at {load:g}" for x, y, load in points
            )
            said.append(f"{one.engine}, {variant}: {told}.")
    if not said:
        return None
    answered = sum(
        ok for one in series for group in one.groups for ok, _ in group.requests.values()
    )
    ax.set_xlabel(f"output tokens/s a user, 1 / mean TPOT (n = {answered:,d} requests)")
    ax.set_ylabel(f"output tokens/s a {what}")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_title("Frontier")
    _name_below(figure, ax)
    units = " or ".join(dict.fromkeys(one.unit for one in series))
    return style.finished(
        figure,
        "frontier",
        "speed",
        title="Frontier",
        alt=f"Output tokens per second of a user and of a {what}. " + " ".join(said),
        caption=f"What one user gets against what the {what} gives in all; the {units} stands "
        "beside each mark. Further to the right and further up is better.",
    )


def _frontier_points(one: Series, variant: Variant, gpus: int) -> list[tuple[float, float, float]]:
    points = []
    for x, group in zip(one.at, one.groups, strict=True):
        tpot, speed = group.row("tpot_s"), group.row(SPEED)
        each = None if tpot is None else getattr(tpot, variant)
        every = None if speed is None else getattr(speed, variant)
        if each and every and not words.missing(each) and not words.missing(every):
            points.append((1 / each, every / gpus, x))
    return points
