"""How a run names what it will do and what it is doing, on its progress."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analyse.words import load_words
from harness.plan.expand import launches_of
from harness.plan.schema import CompareSection
from harness.records import Cell


def how_often(cells: Sequence[Cell], compare: CompareSection, *, attached: bool) -> str:
    """How many load points there are, how often each is measured, and which keys say so."""
    loads = len({c.load for c in cells})
    each = len({(c.repeat, c.block) for c in cells})
    both = " with each variant" if len({c.variant for c in cells}) > 1 else ""
    starts = "" if attached else f"{_count(len(launches_of(list(cells))), 'start')}, "
    return (
        f"{starts}{_count(loads, 'load point')}, each measured "
        f"{'once' if each == 1 else f'{each} times'}{both} "
        f"(compare.launches={compare.launches}, compare.blocks={compare.blocks}): "
        f"{_count(len(cells), 'cell')}"
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def title_of(cell: Cell, cells: Sequence[Cell], *, searching: bool) -> str:
    """A cell in the words of the progress; repeat and block are numbered as in its name."""
    title = f"{cell.engine} {cell.variant} at {load_words(cell.load)}"
    if searching:
        return title  # a search has one repeat, and goes by looks
    title += f", repeat {cell.repeat}"
    several = any(c.block for c in cells)
    return f"{title}, block {cell.block}" if several else title
