"""Whether speculation changed what was said: greedy outputs against the paired baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from harness.analyse.data import CellData
from harness.findings import Integrity
from harness.measure.columns import TEXTS_AT_ONCE, Bools, Integers, Names
from harness.measure.table import RequestTable
from harness.records import RequestRecord, Tie

SHOWN = 5
PARTED = "\x1f"
"""Between the thinking and the answer where the two are compared as one text."""
NEAR_TIE = {"float32": 0.05, "float16": 0.1}
NEAR_TIE_ELSE = 0.5
"""Nats; bfloat16 and what is not known. Its 8 bits put neighbouring logits of 16 to 32 0.125 apart.

Told with its reasons in `docs/integrity.md`.
"""
SIGNIFICANT = 0.01
"""Output is said to differ where chance alone would make it look so less often than so."""
GROSS_GAP = 2.0
"""Nats. A token this far below the best one is no matter of rounding in any precision."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Where an answer first parts from the baseline's; `key`: the candidate's cell and index.

    `rows` are those of the two answers, in the whole answers of the baseline and the candidate.
    """

    key: tuple[str, int]
    rows: tuple[int, int]
    base: RequestTable
    cand: RequestTable

    @cached_property
    def ours(self) -> RequestTable:
        """The candidate's answer, a table of one record."""
        return self.cand.take(np.array(self.rows[1:]))

    @cached_property
    def place(self) -> dict[str, Any]:
        """See `first_divergence`."""
        found = first_divergence(self.base.take(np.array(self.rows[:1])), self.ours)
        assert found is not None
        return found

    @property
    def prompt_id(self) -> str:
        """The prompt that was answered."""
        found: str = self.ours.names("prompt_id").python()[0]
        return found

    @property
    def turn(self) -> int:
        """Which turn of its conversation it is, from 0."""
        return int(self.ours.ints("turn").values[0])

    @property
    def shared_tokens(self) -> Sequence[int]:
        """The token ids that both answers begin with."""
        tokens: Sequence[int] = (
            self.ours.lists("token_ids").flat()[: self.place["position"]].tolist()
        )
        return tokens


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
    ties = ties or {}
    asked_of = (d for d in parted if d.key in ties)
    known = {d.key: found for d in asked_of if (found := tie_of(d, ties)) is not None}
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
    base, cand = baseline.ok, candidate.ok.by("index")
    theirs, ours = matched_rows(base, cand)
    parts = differ(base.take(theirs), cand.take(ours))
    after = _after_a_divergence(cand.take(ours), parts)
    at = np.flatnonzero(parts & ~after)
    cells = cand.names("cell_id").take(ours[at]).python()
    indices = cand.ints("index").take(ours[at]).python()
    rows = zip(theirs[at].tolist(), ours[at].tolist(), strict=True)
    parted = [
        Divergence(key=(cell_id, index), rows=both, base=base, cand=cand)
        for cell_id, index, both in zip(cells, indices, rows, strict=True)
    ]
    return int((~after).sum()), parted


def _after_a_divergence(table: RequestTable, parts: Bools) -> Bools:
    """Which turns come after one of their conversation that parted; `table` is by index."""
    talking = np.flatnonzero(parts & table.names("conversation").known)
    if not len(talking):
        return np.zeros(len(table), bool)
    begun = table.ints("index").values - table.ints("turn").values
    talks = np.column_stack([table.names("prompt_id").codes, begun])
    number = np.unique(talks, axis=0, return_inverse=True)[1].reshape(-1)
    first = np.full(len(table), len(table))  # of each talk, the first row that parted
    np.minimum.at(first, number[talking], talking)
    after: Bools = np.arange(len(table)) > first[number]
    return after


def matched_rows(
    base: RequestTable, cand: RequestTable, *, first_turns: bool = False
) -> tuple[Integers, Integers]:
    """The rows of both that are of the same request, in the order of the second.

    First turns alone, where asked for: a later one's question depends on what was answered.
    """
    words = Names.join([base.names("prompt_id"), cand.names("prompt_id")])
    names = len(words.names)
    theirs, ours = (
        table.ints("index").values * names + codes
        for table, codes in ((base, words.codes[: len(base)]), (cand, words.codes[len(base) :]))
    )
    order = np.argsort(theirs, kind="stable")
    if first_turns:
        order = order[base.ints("turn").values[order] == 0]
    at = np.searchsorted(theirs[order], ours, side="right") - 1  # of several the last
    same = np.zeros(len(ours), bool)
    same[at >= 0] = theirs[order[at[at >= 0]]] == ours[at >= 0]
    return order[at[same]], np.flatnonzero(same)


def differ(base: RequestTable, cand: RequestTable) -> Bools:
    """Whether the two answers of each row differ: see `first_divergence`."""
    theirs, ours = base.lists("token_ids"), cand.lists("token_ids")
    ids = theirs.known & ours.known
    found = ids & (theirs.sizes != ours.sizes)
    rows = np.flatnonzero(ids & ~found)
    mine = ours.take(rows)
    unlike = theirs.take(rows).packed() != mine.packed()
    if unlike.any():
        found[rows[mine.rows()[unlike]]] = True
    texts = np.flatnonzero(~ids)
    for begin in range(0, len(texts), TEXTS_AT_ONCE):
        some = texts[begin : begin + TEXTS_AT_ONCE]
        found[some] = _texts_differ(base.take(some), cand.take(some))
    return found


def _texts_differ(base: RequestTable, cand: RequestTable) -> Bools:
    import pyarrow.compute as pc

    unlike: Bools = pc.not_equal(whole_texts(base), whole_texts(cand)).to_numpy().astype(bool)
    return unlike


def tie_of(divergence: Divergence, ties: dict[tuple[str, int], Tie]) -> Tie | None:
    """What a server said of this divergence; None where it was asked of another place."""
    tie = ties.get(divergence.key)
    if tie is None or tie.position != divergence.place["position"]:
        return None
    return tie


def _told(divergence: Divergence, tie: Tie | None) -> dict[str, Any]:
    told = {"prompt_id": divergence.prompt_id, "index": divergence.key[1], **divergence.place}
    return told if tie is None else {**told, "gap": tie.gap}


def first_divergence(
    baseline: Sequence[RequestRecord], candidate: Sequence[RequestRecord]
) -> dict[str, Any] | None:
    """Where two answers part: unit, position and what each side has there; None: identical.

    Each side is a table of one record.
    """
    both = [RequestTable.of(side) for side in (baseline, candidate)]
    unit = "token" if all(t.lists("token_ids").known.all() for t in both) else "character"
    theirs, ours = (t.lists("token_ids").python()[0] if unit == "token" else _text(t) for t in both)
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


def _text(answer: RequestTable) -> str:
    text: str = whole_texts(answer)[0].as_py()
    return text


def whole_texts(table: RequestTable) -> Any:
    """Reasoning and answer together, as Arrow keeps texts."""
    import pyarrow.compute as pc

    parts = (table.texts(name).filled() for name in ("reasoning", "text"))
    return pc.binary_join_element_wise(*parts, PARTED)


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
