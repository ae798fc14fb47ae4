"""The figures of a diagnosis: what each stage loses, the profile, and whose states these are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.diagnose.records import Diagnosis, Dossier, Length, Share, SlotFit, States
from harness.diagnose.rules import gap
from harness.diagnose.rules.measures import finite, length
from harness.report import style, words
from harness.report.plot_acceptance import acceptance
from harness.report.pooled import PooledAcceptance
from harness.report.style import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEPT, LOST = style.SERIES[1], style.VERDICT["worse"]
LEAST_LOST = 0.005
"""Tokens a step below which the figures say 0.00, and so nothing is drawn."""
MOST_CELLS = 40
"""Columns of the matrix up to which each cell's figure is written into it."""
MOST_COLUMNS = 160


def figures(dossier: Dossier, diagnosis: Diagnosis) -> list[Plot]:
    """Those that there is anything for, in reading order."""
    with style.drawing():
        found = [waterfall(dossier, diagnosis), profile(dossier), matrix(dossier.states)]
    return [plot for plot in found if plot is not None]


def waterfall(dossier: Dossier, diagnosis: Diagnosis) -> Plot | None:
    """Tokens a step from what could be to what was; in red what each stage loses."""
    steps = diagnosis.waterfall
    if len(steps) < 2:
        return None
    observed = gap.observed_of(dossier)
    seen = observed or (dossier.expected and dossier.expected.acceptance)
    drafts, what = seen.counts.drafts if seen else 0, "observed" if observed else "expected"
    figure, (ax,) = style.new_figure(1, 1, (9.6, 1.3 + 0.42 * len(steps)))
    widest = max(step.length for step in steps)
    for row, step in enumerate(steps):
        ax.barh(row, step.length, color=KEPT, height=0.62, alpha=0.75)
        drawn = step.sure and abs(step.lost or 0.0) >= LEAST_LOST
        gone = step.lost if drawn else None
        if gone is not None and gone > 0:
            (bar,) = ax.barh(row, gone, left=step.length, height=0.62, facecolor="none")
            bar.set(edgecolor=LOST, hatch="///")
        lost = "" if gone is None else f" ({-gone:+.2f})"
        at = max(step.length, step.length + (gone or 0.0))
        text = f"{step.length:.2f}{lost}"
        ax.annotate(text, (at, row), (5, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_yticks(range(len(steps)), [_named(step) for step in steps])
    ax.set_ylim(len(steps) - 0.4, -0.6)
    ax.set_xlim(0, widest * 1.18)
    ax.grid(axis="x", visible=True)
    ax.grid(axis="y", visible=False)
    _break_even(ax, dossier, widest)
    ax.set_xlabel(f"tokens a verify step (n = {drafts:,d} steps {what})")
    ax.set_title("Acceptance from stage to stage")
    told = ", ".join(f"{s.name} {s.length:.2f}" for s in steps)
    return style.finished(
        figure,
        "waterfall",
        "acceptance",
        title="Where it is lost",
        alt=f"Tokens a verify step from stage to stage: {told}.",
        caption="Each bar is what would be accepted if all were right from there on, by so many "
        "verify steps; hatched is what is lost between it and the one above, if that is more than "
        "its error.",
        wide=True,
    )


def _named(step: Share) -> str:
    """A bar's name, and below it what it was counted from."""
    name = style.plain(step.name)
    return name if step.steps is None else f"{name}\n{step.steps:,d} steps"


def _break_even(ax: Axes, dossier: Dossier, widest: float) -> None:
    even = None if dossier.expected is None else finite(dossier.expected.break_even)
    if even is not None and 0 < even < widest * 1.15:
        ax.axvline(even, color=style.INK, linestyle=(0, (3, 2)), linewidth=1.1)
        ax.annotate(
            "speculation pays", (even, -0.55), (3, 0), textcoords="offset points", fontsize=8.5
        )


def profile(dossier: Dossier) -> Plot | None:
    """Acceptance by draft position: expected, proposed and observed."""
    named = [
        ("expected", gap.expectation(dossier)),
        ("on the engine's states", dossier.replay.on_engine_states if dossier.replay else None),
        ("observed", gap.observed_of(dossier)),
    ]
    known = [
        (f"{name}, {pooled.drafts:,d} steps", pooled)
        for name, found in named
        if (pooled := _pooled(found)) is not None
    ]
    return acceptance(known) if known else None


def _pooled(found: Length | None) -> PooledAcceptance | None:
    if found is None or found.counts.drafts <= 0 or not found.counts.per_position:
        return None
    drafts = found.counts.drafts
    marginal = tuple(min(1.0, n / drafts) for n in found.counts.per_position)
    before = (1.0, *marginal)
    return PooledAcceptance(
        rate=None,
        length=length(found),
        drafts=drafts,
        drafted=found.counts.drafted,
        accepted=found.counts.accepted,
        per_position=marginal,
        conditional=tuple(
            min(1.0, p / q) if q > 0 else None for p, q in zip(marginal, before, strict=False)
        ),
        sources=(),
    )


def matrix(states: States | None) -> Plot | None:
    """The match matrix as a heat map; a frame round what was declared, a dot on what fits best."""
    if states is None or not _is_whole(states):
        return None
    columns = states.matrix_columns[:MOST_COLUMNS]
    values = [[_cell(v) for v in row[: len(columns)]] for row in states.matrix]
    height = 1.9 + 0.34 * len(values)
    figure, (ax,) = style.new_figure(1, 1, (9.6, height))
    mesh = ax.pcolormesh(values, cmap="cividis", vmin=0.0, vmax=1.0, edgecolors="none")
    mesh.set_rasterized(False)
    bar = figure.colorbar(mesh, ax=ax, pad=0.01, fraction=0.025)
    bar.outline.set_visible(False)
    bar.set_label("median cosine")
    every = max(1, len(columns) // MOST_CELLS)
    shown = range(0, len(columns), every)
    ax.set_xticks([i + 0.5 for i in shown], [columns[i] for i in shown], rotation=90, fontsize=7.5)
    ax.set_yticks([i + 0.5 for i in range(len(values))], list(map(style.plain, states.matrix_rows)))
    ax.set_ylim(len(values), 0)
    ax.grid(visible=False)
    ax.set_xlabel(f"the reference's states (n = {_rows(states):,d} rows)")
    ax.set_title("Whose states the drafter was handed")
    said = [_mark(ax, states, row, columns, values[row]) for row in range(len(values))]
    return style.finished(
        figure,
        "match-matrix",
        "acceptance",
        title="Match matrix",
        alt=f"Median cosine of {_rows(states):,d} rows with every candidate. {' '.join(said)}",
        caption="Each row is a slot of the drafter's input. A frame is round the state that its "
        "checkpoint asks for, a dot on the one that fits best; they should be one cell.",
        wide=True,
    )


def _is_whole(states: States) -> bool:
    return (
        bool(states.matrix_rows)
        and bool(states.matrix_columns)
        and len(states.matrix) == len(states.matrix_rows)
        and all(len(row) == len(states.matrix_columns) for row in states.matrix)
    )


def _cell(value: float) -> float:
    known = finite(value)
    return 0.0 if known is None else min(1.0, max(0.0, known))


def _rows(states: States) -> int:
    return sum(slot.rows for slot in states.slots)


def _slots_of(states: States, label: str) -> list[SlotFit]:
    """The slot's fits that a row of the matrix is of: `slot 0, decode`, or `slot 0`."""
    return [
        s for s in states.slots if label == f"slot {s.slot}" or label == f"slot {s.slot}, {s.where}"
    ]


def _mark(
    ax: Axes, states: States, row: int, columns: Sequence[str], values: Sequence[float]
) -> str:
    """Frame what the row should be, dot what it is; what it says in words."""
    from matplotlib.patches import Rectangle

    label = states.matrix_rows[row]
    slots = _slots_of(states, label)
    declared = slots[0].declared if slots else None
    best = max(range(len(values)), key=lambda i: (values[i], -i))
    if declared in columns:
        at = columns.index(declared)
        frame = Rectangle((at, row), 1, 1, fill=False, edgecolor=LOST, linewidth=2.2, zorder=3)
        ax.add_patch(frame)
    ax.plot(best + 0.5, row + 0.5, marker="o", color="black", markersize=5, mec="white", zorder=4)
    told = f"{words.one_line(label, 40)} is nearest to {columns[best]} ({values[best]:.3f})"
    if declared is None:
        return f"{told}."
    same = declared == columns[best]
    return f"{told}, as declared." if same else f"{told}; declared is {declared}."
