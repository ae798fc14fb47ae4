"""Whether speculation changed what was said: greedy outputs against the paired baseline's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from harness.analyse.data import CellData
from harness.records import Integrity, RequestRecord, Tie

SHOWN = 5
NEAR_TIE = {"float32": 0.05, "float16": 0.1}
NEAR_TIE_ELSE = 0.5
"""Nats; bfloat16 and what is not known. Its 8 bits put neighbouring logits of 16 to 32 0.125 apart.

Told with its reasons in `docs/integrity.md`.
"""
GROSS_GAP = 2.0
"""Nats. A token this far below the best one is no matter of rounding in any precision."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where an answer first parts from the baseline's."""

    baseline: RequestRecord
    candidate: RequestRecord
    place: dict[str, Any]

    @property
    def key(self) -> tuple[str, int]:
        """The candidate's cell and index."""
        return self.candidate.cell_id, self.candidate.index


def near_tie_bound(dtype: str | None) -> float:
    """The largest gap in nats at which either token may be the best one by rounding."""
    return NEAR_TIE.get(dtype or "", NEAR_TIE_ELSE)


def compare_outputs(
    baseline: CellData,
    candidate: CellData,
    *,
    ties: dict[tuple[str, int], Tie] | None = None,
    dtype: str | None = None,
) -> Integrity:
    """Compare the whole answers to equal prompts, token by token where both sides sent ids.

    Where one side did not, the texts are compared, and positions count characters. `ties` are what
    a server said of the divergences, by cell and index.
    """
    compared, parted = divergences(baseline, candidate)
    known = {d.key: found for d in parted if (found := tie_of(d, ties or {})) is not None}
    gaps = [tie.gap for tie in known.values() if tie.gap is not None]
    errors = sum(gap > near_tie_bound(dtype) for gap in gaps)
    asked = bool(gaps) or not parted
    return Integrity(
        compared=compared,
        identical=compared - len(parted),
        near_tie=len(gaps) - errors if asked else None,
        diverged=len(parted),
        first_divergence=tuple(_told(d, known.get(d.key)) for d in parted[:SHOWN]),
        errors=errors if asked else None,
        worst_gap=max(gaps, default=None),
    )


def divergences(baseline: CellData, candidate: CellData) -> tuple[int, list[Divergence]]:
    """How many answers could be compared, and those that differ.

    A later turn of a conversation counts only while the turns before it were the same: else it is
    the answer to another question.
    """
    theirs = {(r.index, r.prompt_id): r for r in baseline.ok}
    parted: list[Divergence] = []
    apart: set[tuple[str, int]] = set()
    compared = 0
    for record in sorted(candidate.ok, key=lambda r: r.index):
        other = theirs.get((record.index, record.prompt_id))
        talk = (record.prompt_id, record.index - record.turn)
        if other is None or talk in apart:
            continue
        compared += 1
        place = first_divergence(other, record)
        if place is not None:
            parted.append(Divergence(baseline=other, candidate=record, place=place))
            if record.conversation is not None:
                apart.add(talk)
    return compared, parted


def tie_of(divergence: Divergence, ties: dict[tuple[str, int], Tie]) -> Tie | None:
    """What a server said of this divergence; None where it was asked of another place."""
    tie = ties.get(divergence.key)
    if tie is None or tie.position != divergence.place["position"]:
        return None
    return tie


def _told(divergence: Divergence, tie: Tie | None) -> dict[str, Any]:
    record = divergence.candidate
    told = {"prompt_id": record.prompt_id, "index": record.index, **divergence.place}
    return told if tie is None else {**told, "gap": tie.gap}


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
    # Cells whose servers could not be asked leave the count of ties unknown, not too low.
    asked = all(p.near_tie is not None for p in known)
    return Integrity(
        compared=sum(p.compared for p in known),
        identical=sum(p.identical for p in known),
        near_tie=sum(p.near_tie or 0 for p in known) if asked else None,
        diverged=sum(p.diverged for p in known),
        first_divergence=tuple(d for p in known for d in p.first_divergence)[:SHOWN],
        errors=_sum([p.errors for p in known]),
        worst_gap=max((p.worst_gap for p in known if p.worst_gap is not None), default=None),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    """The sum of what is known: one error is an error, whatever else is not known."""
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def matched_answers(
    base: CellData, cand: CellData
) -> Iterator[tuple[RequestRecord, RequestRecord]]:
    """Whole answers of both cells to the same request.

    First turns alone: a later one's question depends on what was answered.
    """
    theirs = {(r.index, r.prompt_id): r for r in base.ok if r.turn == 0}
    for r in cand.ok:
        other = theirs.get((r.index, r.prompt_id))
        if other is not None:
            yield other, r
