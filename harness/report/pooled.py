"""Counts of several cells, pooled for a report: acceptance, accuracy and categories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.findings import Acceptance, CategoryFigures, CellSummary
from harness.report import words


@dataclass(frozen=True, kw_only=True)
class PooledAcceptance:
    """Acceptance of a group's speculative cells, from pooled counts."""

    rate: float | None
    length: float | None
    drafts: int
    drafted: int | None
    accepted: int
    per_position: tuple[float, ...]
    conditional: tuple[float | None, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Right answers of one variant: `rate` over `n` answers that could be judged."""

    rate: float | None
    n: int


@dataclass(frozen=True, kw_only=True)
class CategorySide:
    """One variant's figures in one category, its cells pooled; seconds."""

    ok: int
    requests: int
    tpot_s: float | None
    acceptance_length: float | None
    accuracy: Accuracy


def pool_acceptance(parts: Sequence[Acceptance]) -> PooledAcceptance | None:
    """Pool the counts of several cells; None where no cell has any draft.

    A position's count is taken from the source that the cell relied on, else from its rate times
    its drafts. A cell without positions makes the pooled positions unknown rather than too low.
    """
    parts = [part for part in parts if part.drafts > 0]
    if not parts:
        return None
    drafts = sum(part.drafts for part in parts)
    accepted = sum(part.accepted for part in parts)
    drafted = None
    if all(part.drafted is not None for part in parts):
        drafted = sum(part.drafted or 0 for part in parts)
    positions = [_position_counts(part) for part in parts]
    marginal: tuple[float, ...] = ()
    if all(positions):
        width = max(len(p) for p in positions)
        padded = [(*p, *([0.0] * (width - len(p)))) for p in positions]
        marginal = tuple(sum(column) / drafts for column in zip(*padded, strict=True))
    return PooledAcceptance(
        rate=accepted / drafted if drafted else None,
        length=1 + accepted / drafts,
        drafts=drafts,
        drafted=drafted,
        accepted=accepted,
        per_position=marginal,
        conditional=_conditional(marginal),
        sources=tuple(dict.fromkeys(part.source for part in parts)),
    )


def _position_counts(part: Acceptance) -> tuple[float, ...]:
    counts = part.sources.get(part.source)
    if counts is not None and counts.per_position and counts.drafts == part.drafts:
        return tuple(float(value) for value in counts.per_position)
    return tuple(rate * part.drafts for rate in part.per_position or ())


def _conditional(marginal: Sequence[float]) -> tuple[float | None, ...]:
    """c_i = p_i / p_(i-1) with p_(-1) = 1; None where the position before was never reached."""
    before = (1.0, *marginal)
    return tuple(p / q if q > 0 else None for p, q in zip(marginal, before, strict=False))


def pool_accuracy(cells: Sequence[CellSummary]) -> Accuracy:
    """Right answers over the cells' answers that could be judged."""
    known = [
        (cell.metrics.task_accuracy, cell.metrics.task_n)
        for cell in cells
        if cell.metrics is not None and not words.missing(cell.metrics.task_accuracy)
    ]
    n = sum(weight for _, weight in known)
    right = sum((rate or 0.0) * weight for rate, weight in known)
    return Accuracy(rate=right / n if n else None, n=n)


def pool_category(parts: Sequence[CategoryFigures]) -> CategorySide | None:
    """Pooled over blocks: counts added, mean times weighed by the answers they are of."""
    if not parts:
        return None
    timed = [(p.tpot_s, p.ok) for p in parts if p.tpot_s is not None and p.ok]
    counts = [p.acceptance for p in parts]
    drafts = sum(c.drafts for c in counts if c is not None)
    accepted = sum(c.accepted for c in counts if c is not None)
    n = sum(p.task_n for p in parts)
    right = sum((p.task_accuracy or 0.0) * p.task_n for p in parts)
    return CategorySide(
        ok=sum(p.ok for p in parts),
        requests=sum(p.requests for p in parts),
        tpot_s=sum(t * n for t, n in timed) / sum(n for _, n in timed) if timed else None,
        acceptance_length=1 + accepted / drafts if drafts and None not in counts else None,
        accuracy=Accuracy(rate=right / n if n else None, n=n),
    )
