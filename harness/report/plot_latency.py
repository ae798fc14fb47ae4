"""Figures of latency: its cumulative distributions, and the time between chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from harness.records import VARIANTS, Variant
from harness.report import style, view, words
from harness.report.run_data import CellData
from harness.report.style import Plot
from harness.report.view import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from harness.report.samples import Floats, GapTrack

MOST_CURVE_POINTS = 800
"""Of one curve: it is then off by no more than 1/8 of a percent, less than a pixel is high."""


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
            xs, ys = ecdf(values)
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
    return style.finished(
        figure,
        name,
        "latency",
        title=f"Latency: {group.name}",
        alt=f"Cumulative distributions of latency, {group.name}. " + "; ".join(notes) + ".",
        caption="All answered requests of all blocks. The further left, the faster.",
        wide=True,
    )


def latencies_side_by_side(where: str, named: Sequence[tuple[str, CellData]]) -> Plot | None:
    """TTFT, TPOT and E2E latency of several runs at one load, `where`: a line each.

    `named`: each run's name beside its cells, those of one variant.
    """
    lines: dict[str, list[CellData]] = {}
    for name, cell in named:
        lines.setdefault(name, []).append(cell)
    figure, axes = style.new_figure(1, 3, (9.6, 3.5))
    notes = []
    for ax, (key, label) in zip(axes, view.LATENCIES, strict=True):
        sizes = []
        for i, (name, cells) in enumerate(lines.items()):
            values = _together(cells, lambda s, key=key: getattr(s, key))
            if len(values):
                xs, ys = ecdf(values)
                colour = style.SERIES[i % len(style.SERIES)]
                ax.step(
                    xs * 1e3, ys * 100, where="post", color=colour, label=style.plain(name),
                    linestyle=style.SERIES_DASHES[i % len(style.SERIES_DASHES)],
                )  # fmt: skip
                sizes.append(len(values))
                notes.append(f"{label}, {name} median {_median(values)} ms (n = {len(values):,d})")
        _latency_axis(ax, label, [sum(sizes)] if sizes else [])
    if not notes:
        return None
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(lines), 3))
    axes[0].set_ylabel("% of requests at or below")
    figure.suptitle(style.plain(where), x=0.01, ha="left", fontsize=9.5)
    return style.finished(
        figure,
        words.slug("latency", where),
        "latency",
        title=f"Latency: {where}",
        alt=f"Cumulative distributions of latency, {where}. " + "; ".join(notes) + ".",
        caption="All answered requests of each run. The further left, the faster.",
        wide=True,
    )


def _latency_axis(ax: Axes, label: str, sizes: Sequence[int]) -> None:
    ax.set_title(f"{label} (n = {_sizes(sizes)})" if sizes else label)
    ax.set_ylim(0, 101)
    ax.set_xlim(left=0)
    ax.set_xlabel(f"{label}, ms")
    if not ax.lines:
        ax.text(0.5, 0.5, "undefined", transform=ax.transAxes, ha="center", alpha=0.6)


def ecdf(values: Floats) -> tuple[Floats, Floats]:
    """Sorted values and the share at or below each; thinned, since no eye sees 200,000 steps.

    The first and the last value stay, and of those between as many as a curve needs.
    """
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
    return {v: _together([c for c in cells if c.variant == v], read) for v in VARIANTS}


def _together(cells: Sequence[CellData], read: Callable[..., Floats]) -> Floats:
    """One array over all cells."""
    import numpy as np

    parts = [read(c.samples) for c in cells if c.samples is not None]
    return np.concatenate(parts) if parts else np.empty(0)


def gaps(group: Group, cells: Sequence[CellData]) -> Plot | None:
    """Time between chunks: its distribution on a logarithmic axis, and how it went over time."""
    import numpy as np

    pooled = {v: x[x > 0] for v, x in _pooled(cells, lambda s: s.gaps_s).items()}
    if sum(map(len, pooled.values())) < 2:
        return None
    tracks = _tracks(cells)
    figure, axes = style.new_figure(1, 2 if tracks else 1, (9.6 if tracks else 4.8, 3.4))
    notes = _gap_shares(axes[0], pooled)
    for variant, track in tracks.items():
        colour, dashes = style.COLOUR[variant], style.DASHES[variant]
        low, middle, high = (x * 1e3 for x in (track.low_s, track.median_s, track.high_s))
        axes[1].fill_between(track.seconds, low, high, color=colour, alpha=0.18, linewidth=0)
        axes[1].plot(track.seconds, middle, color=colour, linestyle=dashes)
        known = middle[np.isfinite(middle)]
        ends = (words.number(float(known[0])), words.number(float(known[-1])))
        notes.append(f"{variant} median over time from {ends[0]} to {ends[1]} ms")
    if tracks:
        _over_time_axis(axes[1], [track.n for track in tracks.values()])
    _name_load(figure, group)
    style.name_variants(figure, variants=[v for v in VARIANTS if len(pooled[v])])
    name = words.slug("gaps", group.name)
    over_time = (
        " Right: their course through the first block of each variant, the median and the middle "
        "80%; a line that rises is a server that slows down."
    )
    return style.finished(
        figure,
        name,
        "latency",
        title=f"Time between chunks: {group.name}",
        alt=f"Time between chunks, {group.name}: " + "; ".join(notes) + ".",
        caption="With speculation a gap is one verify step, which yields one to "
        "k + 1 tokens; without, it is one token. Thin lines: medians. The extreme 0.1% at either "
        "end are drawn at the edge." + (over_time if tracks else ""),
        wide=bool(tracks),
    )


def _tracks(cells: Sequence[CellData]) -> dict[Variant, GapTrack]:
    """The gaps over time of the first block of each variant that tells them."""
    import numpy as np

    found: dict[Variant, GapTrack] = {}
    for cell in cells:
        track = cell.samples.track if cell.samples is not None else None
        if track is not None and np.isfinite(track.median_s).sum() > 1:
            found.setdefault(cell.variant, track)
    return {v: found[v] for v in VARIANTS if v in found}


def _over_time_axis(ax: Axes, sizes: Sequence[int]) -> None:
    ax.set_title(f"Over time, first blocks (n = {_sizes(sizes)})")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("seconds since the first request")
    ax.set_ylabel("gap between chunks, ms")


def _gap_shares(ax: Axes, pooled: dict[Variant, Floats]) -> list[str]:
    """Draw the shares of both variants' gaps by length; what they say in words."""
    import numpy as np

    low, high = np.percentile(np.concatenate(list(pooled.values())), [0.1, 99.9]) * 1e3
    edges = np.geomspace(max(low * 0.9, 1e-3), max(high * 1.1, low * 1.5, 2e-3), 61)
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
    sizes = [len(values) for values in pooled.values() if len(values)]
    ax.set_title(f"Time between chunks (n = {_sizes(sizes)})")
    return notes


def _sizes(sizes: Iterable[int]) -> str:
    return " and ".join(f"{size:,d}" for size in sizes)


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
