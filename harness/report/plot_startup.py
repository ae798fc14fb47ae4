"""The start-up waterfall: where each start of an engine spends its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.records import Phase
from harness.report import style, words
from harness.report.run_data import RunData
from harness.report.startup import (
    Start,
    first_of_each_side,
    load_speed,
    per_second,
    starts_of,
)
from harness.report.style import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_STARTS_DRAWN = 8


def all_starts(run: RunData) -> list[Start]:
    """Every start of a run that told its phases."""
    timelines = [
        (c.engine, c.variant, c.repeat, c.timeline) for c in run.cells if c.timeline is not None
    ]
    return starts_of(run.summary, timelines, run.launches)


def startup(run: RunData) -> Plot | None:
    """Start-up phases as a waterfall: the first start of each engine and variant."""
    every = all_starts(run)
    shown = list(first_of_each_side(every).items())[:MOST_STARTS_DRAWN]
    if not shown:
        return None
    bars = sum(len(start.phases) for _, start in shown)
    figure, (ax,) = style.new_figure(1, 1, (9.6, 1.3 + 0.27 * (bars + len(shown))))
    latest = max([_end(start) for _, start in shown] + [1e-3])
    y, ticks, labels = 0.0, [], []
    for name, start in shown:
        ax.annotate(
            style.plain(name), (0, y), xytext=(5, 0), textcoords="offset points", va="center",
            fontweight="bold", fontsize=9,
        )  # fmt: skip
        y += 1
        for phase in start.phases:
            _phase_bar(ax, y, phase, start, latest)
            ticks.append(y)
            labels.append(style.plain(phase.phase))
            y += 1
    ax.set_yticks(ticks, labels)
    ax.set_ylim(y - 0.4, -0.6)
    ax.set_xlim(0, latest * 1.25)
    ax.grid(axis="x", visible=True)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("seconds since the engine was started")
    ax.set_title(f"Start-up phases (n = {words.plural(len(every), 'start')}, first of each drawn)")
    alts = [f"{name}: " + ", ".join(map(_phase_said, start.phases)) for name, start in shown]
    return style.finished(
        figure,
        "startup",
        "start",
        title="Start-up",
        alt="Start-up phases. " + ". ".join(alts) + ".",
        caption="Where a start spends its time; beside the seconds the checkpoint's bytes a second "
        "where one is loaded, and how far a progress bar came. A phase that never ended is drawn "
        "hatched up to the last thing that is known.",
        wide=True,
    )


def _end(start: Start) -> float:
    """The last moment that is known of a start."""
    ends = [p.end_s if p.end_s is not None else p.start_s for p in start.phases]
    return max([*ends, start.wall_s or 0.0])


def _phase_bar(ax: Axes, y: float, phase: Phase, start: Start, latest: float) -> None:
    ended = phase.end_s is not None
    end = phase.end_s if phase.end_s is not None else max(_end(start), phase.start_s)
    length = max(end - phase.start_s, latest * 0.002)
    ax.barh(
        y,
        length,
        left=phase.start_s,
        height=0.62,
        color=style.COLOUR[start.variant] if ended else "none",
        edgecolor=style.COLOUR[start.variant],
        hatch=None if ended else "////",
    )
    text = f"{words.fixed(end - phase.start_s)} s" if ended else "did not end"
    place = (phase.start_s + length, y)
    text = ", ".join([text, *_beside(phase)])
    ax.annotate(text, place, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _beside(phase: Phase) -> list[str]:
    """What is told beside a phase's seconds."""
    speed = load_speed(phase)
    told = [] if speed is None else [per_second(speed)]
    return told if phase.progress is None else [*told, words.share(*phase.progress)]


def _phase_said(phase: Phase) -> str:
    if phase.end_s is None:
        return f"{words.one_line(phase.phase, 80)} did not end"
    took = f"{words.one_line(phase.phase, 80)} {words.fixed(phase.end_s - phase.start_s)} s"
    return " at ".join([took, *_beside(phase)[:1]]) if load_speed(phase) is not None else took
