"""Figures of acceptance: by draft position, tokens a verify step, and by category."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from harness.findings import AcceptanceSplits, SplitPart
from harness.report import style, words
from harness.report.pooled import PooledAcceptance
from harness.report.style import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CATEGORIES = 24
LONGEST_NARROW = 22
"""Letters of a name of which two stand side by side below half a page's figure."""

Named = tuple[str, PooledAcceptance]
"""A name in the reader's words (an engine and load, or a run), and its acceptance."""


def acceptance(named: Sequence[Named]) -> Plot | None:
    """Acceptance by position: of all drafts, and of those accepted at the position before."""
    known = [(name, pooled) for name, pooled in named if pooled.per_position]
    if not known:
        return None
    figure, axes = style.new_figure(1, 2, (9.6, 3.3))
    titles = ("Accepted at least to position", "Accepted, given the one before")
    for i, (name, pooled) in enumerate(known):
        for ax, values in zip(axes, (pooled.per_position, pooled.conditional), strict=True):
            shown = [(i, v * 100) for i, v in enumerate(values) if v is not None]
            xs, ys = [x for x, _ in shown], [y for _, y in shown]
            ax.plot(xs, ys, **_series(i), label=style.plain(name))
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
    axes[0].set_ylabel(f"% of drafts (n = {_drafts(known):,d})")
    axes[1].set_ylabel(f"% of those there (n = {_drafts(known):,d})")
    _legend(figure, axes[0], len(known))
    alts = [
        f"{name}: marginal {_list(p.per_position)}, conditional {_list(p.conditional)}, "
        f"of {p.drafts:,d} drafts."
        for name, p in known
    ]
    return style.finished(
        figure,
        "acceptance",
        "acceptance",
        title="Acceptance by position",
        alt="Acceptance by draft position. " + " ".join(alts),
        caption="Left falls by its nature; right tells whether the drafter is worse at later "
        "positions. A first position far below the training accuracy points at the engine or the "
        "layers served, a falling right-hand line at training.",
        wide=True,
    )


def _series(number: int) -> dict[str, Any]:
    return {
        "color": style.SERIES[number % len(style.SERIES)],
        "marker": style.SERIES_MARKERS[number % len(style.SERIES_MARKERS)],
    }


def _drafts(known: Sequence[Named]) -> int:
    return sum(pooled.drafts for _, pooled in known)


def _write_beside(ax: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Each point's height in figures above it."""
    place: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
    for x, y in points:
        ax.annotate(f"{y:.1f}", (x, y), fontsize=8.5, **place)


def _legend(figure: Figure, ax: Axes, several: int) -> None:
    if several > 1:
        handles, labels = ax.get_legend_handles_labels()
        columns = 3 if figure.get_figwidth() > 6 else 2
        figure.legend(handles, labels, loc="outside lower center", ncols=min(several, columns))


def _needs_width(names: Sequence[str]) -> bool:
    """Whether a legend of these names asks for the page's whole width."""
    return len(names) > 4 or (len(names) > 1 and max(map(len, names)) > LONGEST_NARROW)


def _list(values: Iterable[float | None]) -> str:
    return ", ".join(words.percent(value) for value in values)


def step_shares(pooled: PooledAcceptance) -> list[float]:
    """The share of verify steps that brought 1, 2, … k + 1 tokens.

    From the positions alone, exactly: a step brings i + 1 tokens where its draft was accepted at
    least to position i - 1 but not to i. Empty where the positions are not known.
    """
    reached = [1.0, *pooled.per_position, 0.0]
    return [a - b for a, b in pairwise(reached)] if pooled.per_position else []


def tokens_per_step(named: Sequence[Named]) -> Plot | None:
    """How many tokens a verify step brought: the share of steps for each number."""
    known = [(name, pooled, step_shares(pooled)) for name, pooled in named if pooled.per_position]
    if not known:
        return None
    wide = _needs_width([name for name, _, _ in known])
    figure, (ax,) = style.new_figure(1, 1, (9.6 if wide else 4.8, 3.4))
    said = []
    for i, (name, pooled, shares) in enumerate(known):
        points = [(float(n), share * 100) for n, share in enumerate(shares, 1)]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        if len(known) == 1:
            ax.bar(xs, ys, width=0.7, color=_series(i)["color"], alpha=0.55)
            _write_beside(ax, points)
        else:
            ax.plot(xs, ys, **_series(i), label=style.plain(name))
        told = ", ".join(f"{n} {words.percent(s)}" for n, s in enumerate(shares, 1))
        said.append(f"{name}: {told}; mean {words.fixed(pooled.length)}.")
    deepest = max(len(shares) for _, _, shares in known)
    ax.set_xticks(range(1, deepest + 1))
    top = max(share for _, _, shares in known for share in shares) * 100
    ax.set_ylim(0, max(5.0, top * 1.16))
    ax.set_xlabel("tokens of a verify step")
    drafts = sum(pooled.drafts for _, pooled, _ in known)
    ax.set_ylabel(f"% of verify steps (n = {drafts:,d})")
    ax.set_title("Tokens per step")
    _legend(figure, ax, len(known))
    return style.finished(
        figure,
        "tokens-per-step",
        "acceptance",
        title="Tokens per step",
        alt="Share of verify steps by the tokens they brought. " + " ".join(said),
        caption="One token: nothing of the draft was accepted; the most: all of it, and the bonus "
        "token. Two peaks at the ends are a drafter that is right at length or not at all.",
        wide=wide,
    )


def by_category(named: Sequence[tuple[str, AcceptanceSplits]]) -> Plot | None:
    """Acceptance length of each category with its interval, one row a category."""
    sides: list[tuple[str, dict[str, SplitPart]]] = []
    for name, found in named:
        split = next((s for s in found.splits if s.by == "category"), None)
        if split is not None:
            sides.append((name, {p.name: p for p in split.parts if p.length.value is not None}))
    labels = sorted({label for _, parts in sides for label in parts})[:MOST_CATEGORIES]
    if len(labels) < 2:
        return None
    wide = _needs_width([name for name, _ in sides])
    figure, (ax,) = style.new_figure(1, 1, (9.6 if wide else 4.8, 1.5 + 0.33 * len(labels)))
    said = [_category_side(ax, i, labels, sides) for i in range(len(sides))]
    ax.set_yticks(range(len(labels)), [style.plain(label) for label in labels])
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set_xlim(left=1)
    ax.grid(axis="x", visible=True)
    steps = sum(p.drafts for _, parts in sides for p in parts.values())
    ax.set_xlabel(f"acceptance length (n = {steps:,d} verify steps)")
    ax.set_title("Acceptance by category")
    _legend(figure, ax, len(sides))
    return style.finished(
        figure,
        "acceptance-category",
        "acceptance",
        title="Acceptance by category",
        alt="Acceptance length by category. " + " ".join(said),
        caption="Tokens a verify step yields, by the prompts' category; lines are intervals over "
        "prompts. A category far to the left is what the drafter saw too little of.",
        wide=wide,
    )


def _category_side(
    ax: Axes, number: int, labels: Sequence[str], sides: Sequence[tuple[str, dict[str, SplitPart]]]
) -> str:
    """Draw one engine and load; what it says in words."""
    name, parts = sides[number]
    shift = (number - (len(sides) - 1) / 2) * min(0.22, 0.7 / len(sides))
    looks = _series(number)
    shown = [(row, parts[label]) for row, label in enumerate(labels) if label in parts]
    for row, part in shown:
        low, high = part.length.low, part.length.high
        if low is not None and high is not None:
            ax.hlines(row + shift, low, high, color=looks["color"], lw=1.4)
    ax.plot(
        [part.length.value or 0.0 for _, part in shown],
        [row + shift for row, _ in shown],
        linestyle="none",
        markersize=5.5,
        label=style.plain(name),
        **looks,
    )
    told = ", ".join(
        f"{words.one_line(p.name, 40)} {words.fixed(p.length.value)}" for _, p in shown
    )
    return f"{name}: {told}."
