"""What was sampled while the cells ran, in rows of text and in figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from harness.findings import CellSummary, Gauge, Summary, Telemetry
from harness.measure.hardware import POWER, SM_CLOCK
from harness.measure.series import Series, Source
from harness.records import VARIANTS, Variant
from harness.report import style, words
from harness.report.run_data import CellData
from harness.report.style import Plot
from harness.report.view import Group
from harness.report.words import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from harness.report.samples import Floats

MOST_POINTS = 600
Read = Callable[[Telemetry], Any]
Over = Callable[[list[Any]], float | None]


def telemetry_rows(group: Group) -> list[tuple[str, str, str]]:
    """Label, baseline and speculative of what was sampled; no row for what nothing told."""
    rows: list[tuple[str, Read, Callable[[float | None], str], Over]] = [
        ("J per output token (GPUs)", _joules, words.fixed, fmean),
        ("GPU power, mean, W", lambda t: _over_gpus(t, POWER, sum), words.number, fmean),
        ("SM clock, mean, MHz", lambda t: _over_gpus(t, SM_CLOCK, fmean), words.number, fmean),
        ("samples of the engine", _engine_samples, _whole, sum),
        ("waiting requests, most", lambda t: t.engine.get("waiting"), _whole, _most),
        ("KV cache in use, most", lambda t: t.engine.get("kv_usage"), words.percent, _most),
        ("preemptions", lambda t: t.preemptions, _whole, max),
        ("prefix cache hits", lambda t: t.prefix_hit_rate, words.percent, fmean),
    ]
    found = []
    for label, read, write, over in rows:
        values = [_value(group.cells, variant, read, over) for variant in VARIANTS]
        if any(value is not None for value in values):
            baseline, speculative = (DASH if v is None else write(v) for v in values)
            found.append((label, baseline, speculative))
    return found


def _value(cells: Sequence[CellSummary], variant: Variant, read: Read, over: Over) -> float | None:
    """Over the cells of a variant that tell it: the sum, the largest, or the mean."""
    told = [
        value
        for cell in cells
        if cell.variant == variant
        and cell.telemetry is not None
        and (value := read(cell.telemetry)) is not None
    ]
    return over(told) if told else None


def _whole(value: float | None) -> str:
    return words.fixed(value, 0)


def _joules(told: Telemetry) -> float | None:
    return told.joules_per_output_token


def _engine_samples(told: Telemetry) -> float | None:
    """How many samples what the engine said is of: of a short window there are few."""
    return max((gauge.n for gauge in told.engine.values()), default=None)


def _most(gauges: list[Gauge]) -> float | None:
    """The largest sample; one alone says nothing of what came between."""
    return max(g.most for g in gauges) if sum(g.n for g in gauges) > 1 else None


def _over_gpus(told: Telemetry, name: str, over: Callable[[list[float]], float]) -> float | None:
    """Of the engine's GPUs, or of all where it is not known which are its."""
    mine = [gpu for gpu in told.gpus if gpu.engine] or told.gpus
    gauges: list[Gauge | None] = [gpu.gauges.get(name) for gpu in mine]
    means = [gauge.mean for gauge in gauges if gauge is not None]
    return over(means) if means and len(means) == len(mine) else None


def missing_words(summary: Summary) -> str:
    """What was not sampled and why, in one sentence; empty where nothing is missing."""
    sampled = [cell for cell in summary.cells if cell.telemetry is not None]
    why: dict[str, dict[str, str]] = {}
    for cell in sampled:
        for source, reason in (cell.telemetry.missing if cell.telemetry else {}).items():
            why.setdefault(source, {})[cell.cell_id] = reason
    if not why:
        return ""
    names = {"gpu": "GPUs", "engine": "engine gauges", "host": "this machine", "all": "everything"}
    parts = [
        f"{names.get(source, words.one_line(source, 20))}{_in_cells(list(cells), len(sampled))} "
        f"({words.one_line(next(iter(cells.values())), 160)})"
        for source, cells in why.items()
    ]
    return f"Not sampled: {', '.join(parts)}."


def _in_cells(cells: Sequence[str], of: int) -> str:
    """Which cells something is missing of; nothing where it is all of them."""
    if len(cells) == of:
        return ""
    more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
    return f" in {words.one_line(', '.join(cells[:3]) + more, 200)}"


def telemetry_plots(group: Group, cells: Sequence[CellData]) -> list[Plot]:
    """The engine's gauges over time, and power and clocks where GPUs told them."""
    chosen: dict[Variant, CellData] = {}
    for cell in cells:
        if cell.telemetry is not None and cell.telemetry.tracks:
            chosen.setdefault(cell.variant, cell)
    found = [_engine_plot(group, chosen), _power_plot(group, chosen)]
    return [plot for plot in found if plot is not None]


def _engine_plot(group: Group, chosen: dict[Variant, CellData]) -> Plot | None:
    panels = [
        _Panel("running requests", lambda s: _line(s, "engine", "running"), counts=True),
        _Panel("waiting requests", lambda s: _line(s, "engine", "waiting"), counts=True),
        _Panel("KV cache in use, %", lambda s: _line(s, "engine", "kv_usage", 100.0), top=105.0),
    ]
    return _plot(
        group,
        chosen,
        panels,
        name="gauges",
        title="Requests and KV cache",
        caption="What the engine said of itself, sampled beside the load: the first block of each "
        "variant. Requests that wait, or a cache near 100%, are the engine's limit, not the "
        "drafter's.",
    )


def _power_plot(group: Group, chosen: dict[Variant, CellData]) -> Plot | None:
    panels = [
        _Panel("GPU power, W, all GPUs", lambda s: _all_gpus(s, POWER, total=True)),
        _Panel("SM clock, MHz, mean", lambda s: _all_gpus(s, SM_CLOCK, total=False)),
    ]
    return _plot(
        group,
        chosen,
        panels,
        name="power",
        title="Power and clocks",
        caption="Of this machine's GPUs, sampled beside the load: the first block of each variant. "
        "Clocks that differ between the variants are part of what was measured.",
    )


class _Panel:
    """One pair of axes: its label, and how its line is read from a series (ns, values)."""

    def __init__(
        self,
        label: str,
        read: Callable[[Series], tuple[Floats, Floats] | None],
        top: float | None = None,
        *,
        counts: bool = False,
    ) -> None:
        self.label, self.read, self.top, self.counts = label, read, top, counts


def _line(
    series: Series, source: Source, name: str, factor: float = 1.0
) -> tuple[Floats, Floats] | None:
    track = series.track(source, name)
    return None if track is None else (track.at_ns.astype(float), track.values * factor)


def _all_gpus(series: Series, name: str, *, total: bool) -> tuple[Floats, Floats] | None:
    """Over all GPUs that tell it, which are sampled together."""
    import numpy as np

    told = [series.track("gpu", name, device) for device in series.devices("gpu")]
    tracks = [track for track in told if track is not None]
    if not tracks:
        return None
    at = tracks[0].at_ns
    each = np.stack([np.interp(at, track.at_ns, track.values) for track in tracks])
    return at.astype(float), each.sum(axis=0) if total else each.mean(axis=0)


def _plot(
    group: Group,
    chosen: dict[Variant, CellData],
    panels: list[_Panel],
    *,
    name: str,
    title: str,
    caption: str,
) -> Plot | None:
    lines = [
        (panel, [(v, line) for v, cell in chosen.items() if (line := _shown(panel, cell))])
        for panel in panels
    ]
    drawn = [(panel, found) for panel, found in lines if found]
    if not drawn:
        return None
    figure, axes = style.new_figure(1, len(drawn), (9.6, 3.0))
    said = []
    for ax, (panel, found) in zip(axes, drawn, strict=True):
        for variant, (seconds, values) in found:
            colour, dashes = style.COLOUR[variant], style.DASHES[variant]
            ax.plot(seconds, values, color=colour, linestyle=dashes, linewidth=1.4)
            said.append(
                f"{panel.label}, {variant}: mean {words.number(float(values.mean()))}, "
                f"most {words.number(float(values.max()))}"
            )
        _finish(ax, panel, [len(values) for _, (_, values) in found])
    seen = {variant for _, found in drawn for variant, _ in found}
    style.name_variants(figure, [v for v in VARIANTS if v in seen])
    missing = [v for v in VARIANTS if v in chosen and v not in seen]
    if missing:
        caption += f" Not drawn: {' and '.join(missing)}, with fewer than two samples in its block."
    label = f"{style.plain(group.engine)}, {words.load_words(group.load)}"
    figure.suptitle(label, x=0.01, ha="left", fontsize=9.5)
    slug = words.slug(name, group.name)
    return style.finished(
        figure,
        slug,
        "time",
        title=f"{title}: {group.name}",
        alt=f"{title} over time, {group.name}. " + "; ".join(said) + ".",
        caption=caption,
        wide=True,
    )


def _finish(ax: Axes, panel: _Panel, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(panel.label)
    top = panel.top
    if panel.counts:
        ax.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
        top = max(1.0, ax.get_ylim()[1])  # a line of nothing but 0 lies on the axis
    ax.set_ylim(0, top)
    ax.set_xlim(left=0)
    told = " and ".join(f"{n:,d}" for n in sizes)
    ax.set_xlabel(f"seconds since the first request\n(n = {told} samples)")


def _shown(panel: _Panel, cell: CellData) -> tuple[Floats, Floats] | None:
    """Seconds since the window began, and the values in it; None with fewer than two."""
    import numpy as np

    begin = cell.timeline.window_start_ns if cell.timeline else None
    end = cell.timeline.window_end_ns if cell.timeline else None
    line = panel.read(cell.telemetry) if cell.telemetry else None
    if line is None or begin is None or end is None:
        return None
    at, values = line
    inside = np.flatnonzero((begin <= at) & (at <= end))
    if len(inside) < 2:
        return None
    keep = inside[:: max(1, len(inside) // MOST_POINTS)]
    return (at[keep] - begin) / 1e9, values[keep]
