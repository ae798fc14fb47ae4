"""Whether speculation changed what was said: greedy outputs against the paired baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.analyse.data import CellData
from harness.records import Integrity, RequestRecord

SHOWN = 5


def compare_outputs(baseline: CellData, candidate: CellData) -> Integrity:
    """Compare the whole answers to equal prompts, token by token where both sides sent ids.

    Where one side did not, the texts are compared, and positions count characters.
    """
    theirs = {(r.index, r.prompt_id): r for r in baseline.ok}
    compared = identical = 0
    divergences: list[dict[str, Any]] = []
    for record in candidate.ok:
        other = theirs.get((record.index, record.prompt_id))
        if other is None:
            continue
        compared += 1
        divergence = first_divergence(other, record)
        if divergence is None:
            identical += 1
        elif len(divergences) < SHOWN:
            divergences.append({"prompt_id": record.prompt_id, "index": record.index, **divergence})
    return Integrity(
        compared=compared,
        identical=identical,
        near_tie=None,
        diverged=compared - identical,
        first_divergence=tuple(divergences),
    )


def first_divergence(baseline: RequestRecord, candidate: RequestRecord) -> dict[str, Any] | None:
    """Where two answers part: unit, position and what each side has there; None: identical."""
    ours: Sequence[Any]
    theirs: Sequence[Any]
    if baseline.token_ids is not None and candidate.token_ids is not None:
        unit, theirs, ours = "token", baseline.token_ids, candidate.token_ids
    else:
        unit, theirs, ours = "character", whole_text(baseline), whole_text(candidate)
    if theirs == ours:
        return None
    shared = min(len(theirs), len(ours))
    at = next((i for i in range(shared) if theirs[i] != ours[i]), shared)
    return {
        "unit": unit,
        "position": at,
        "baseline": theirs[at] if at < len(theirs) else None,
        "candidate": ours[at] if at < len(ours) else None,
    }


def whole_text(record: RequestRecord) -> str:
    """Reasoning and answer together."""
    return f"{record.reasoning or ''}\x1f{record.text or ''}"


def total(parts: Sequence[Integrity | None]) -> Integrity | None:
    """The sum over cells; None where none was compared."""
    known = [p for p in parts if p is not None]
    if not known:
        return None
    ties = [p.near_tie for p in known if p.near_tie is not None]
    return Integrity(
        compared=sum(p.compared for p in known),
        identical=sum(p.identical for p in known),
        near_tie=sum(ties) if len(ties) == len(known) else None,
        diverged=sum(p.diverged for p in known),
        first_divergence=tuple(d for p in known for d in p.first_divergence)[:SHOWN],
    )
