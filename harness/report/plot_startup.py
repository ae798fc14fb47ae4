"""The start-up waterfall: where each start of an engine spends its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.records import Phase
from harness.report import style, words
from harness.report.run_data import RunData
from harness.report.style import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_STARTS_DRAWN = 8


def launches(run: RunData) -> list[tuple[str, tuple[Phase, ...]]]:
    """Each start of an engine once, with its phases: the cells of a start share them."""
    seen: dict[tuple[str, str, int], tuple[Phase, ...]] = {}
    for cell in run.summary.cells:
        if cell.startup:
            seen.setdefault((cell.engine, cell.variant, cell.repeat), cell.startup)
    for data in run.cells:
        if data.timeline is not None and data.timeline.startup:
            seen.setdefault((data.engine, data.variant, data.repeat), data.timeline.startup)
    for launch in run.launches:
        if launch.phases:
            seen.setdefault((launch.engine, launch.variant, launch.repeat), launch.phases)
    return [
        (f"{words.one_line(engine, 80)}, {variant}, repeat {repeat}", phases)
        for (engine, variant, repeat), phases in seen.items()
    ]


def startup(run: RunData) -> Plot | None:
    """Start-up phases as a waterfall: the first start of each engine and variant."""
    every = launches(run)
    first: dict[str, tuple[Phase, ...]] = {}
    for name, phases in every:
        first.setdefault(name.rsplit(", ", 1)[0], phases)
    if not first:
        return None
    shown = list(first.items())[:MOST_STARTS_DRAWN]
    bars = [(name, phase) for name, phases in shown for phase in phases]
    figure, (ax,) = style.new_figure(1, 1, (9.6, 1.3 + 0.27 * (len(bars) + len(shown))))
    latest = max([p.end_s if p.end_s is not None else p.start_s for _, p in bars] + [1e-3])
    y, ticks, labels = 0.0, [], []
    for name, phases in shown:
        ax.text(0, y, style.plain(name), fontweight="bold", va="center", fontsize=9)
        y += 1
        for phase in phases:
            _phase_bar(ax, y, phase, latest, "baseline" if "baseline" in name else "speculative")
            ticks.append(y)
            labels.append(style.plain(phase.phase))
            y += 1
    ax.set_yticks(ticks, labels)
    ax.set_ylim(y - 0.4, -0.6)
    ax.set_xlim(0, latest * 1.14)
    ax.grid(axis="x", visible=True)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("seconds since the engine was started")
    ax.set_title(f"Start-up phases (n = {words.plural(len(every), 'start')}, first of each drawn)")
    alts = [f"{name}: " + ", ".join(_phase_said(p) for p in phases) for name, phases in shown]
    return Plot(
        name="startup",
        title="Start-up",
        svg=style.to_svg(figure, "startup"),
        alt="Start-up phases. " + ". ".join(alts) + ".",
        caption="Where a start spends its time. A phase that never ended is drawn hatched up to "
        "the last thing that is known.",
        wide=True,
    )


def _phase_bar(ax: Axes, y: float, phase: Phase, latest: float, variant: str) -> None:
    ended = phase.end_s is not None
    end = phase.end_s if phase.end_s is not None else max(latest, phase.start_s)
    length = max(end - phase.start_s, latest * 0.002)
    ax.barh(
        y,
        length,
        left=phase.start_s,
        height=0.62,
        color=style.COLOUR[variant] if ended else "none",
        edgecolor=style.COLOUR[variant],
        hatch=None if ended else "////",
    )
    text = f"{words.fixed(end - phase.start_s)} s" if ended else "did not end"
    place = (phase.start_s + length, y)
    ax.annotate(text, place, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _phase_said(phase: Phase) -> str:
    if phase.end_s is None:
        return f"{words.one_line(phase.phase, 80)} did not end"
    return f"{words.one_line(phase.phase, 80)} {words.fixed(phase.end_s - phase.start_s)} s"
