"""Whether greedy outputs diverge more than the baseline does from itself, and what that means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from harness.analyse.data import CellData, RunData, pairs
from harness.analyse.integrity import (
    GROSS_GAP,
    SIGNIFICANT,
    compare_outputs,
    differ,
    matched_rows,
    near_tie_bound,
    total,
)
from harness.findings import Caution, EngineIntegrity, Integrity
from harness.measure.columns import Integers, Names
from harness.measure.table import RequestTable
from harness.records import Tie, Ties

EXACT = ("float32",)
"""Precisions in which a divergence that no server could be asked about is taken for an error."""


def ties_of(run: RunData, engine: str) -> Ties:
    """What servers said of the engine's divergences."""
    dtype = run.plan(engine)["engine"]["dtype"]
    none = Ties(engine=engine, dtype=None if dtype == "auto" else dtype)
    return next((t for t in run.ties if t.engine == engine), none)


def cell_integrity(run: RunData) -> dict[str, Integrity | None]:
    """By the speculative cell's id; only greedy outputs can be compared token by token."""
    found: dict[str, Integrity | None] = {}
    for engine in run.engines():
        if not run.greedy(engine):
            continue
        asked = ties_of(run, engine)
        by_place: dict[tuple[str, int], Tie] = {(t.cell_id, t.index): t for t in asked.ties}
        for base, cand in pairs(run.select(engine)):
            found[cand.cell.cell_id] = compare_outputs(base, cand, ties=by_place, dtype=asked.dtype)
    return found


def engine_integrity(
    run: RunData, engine: str, integrity: dict[str, Integrity | None]
) -> EngineIntegrity:
    """An engine's divergences, the floor they are held against, and whether output is broken.

    Every prompt counts once on each side (its first comparison): answers to the same prompt
    diverge together, and an exact test wants independent ones.
    """
    if not run.greedy(engine):
        return EngineIntegrity(engine=engine)
    cells = run.select(engine)
    whole = total([integrity.get(c.cell.cell_id) for c in cells])
    if whole is None:
        return EngineIntegrity(engine=engine)
    hits, n = _first_comparisons(pairs(cells))
    again = [c for c in run.floor if c.cell.engine == engine]
    plain = [*run.select(engine, "baseline"), *again]
    (floor_hits, floor_n), (other_hits, other_n) = floor(plain, load=True), floor(plain, load=False)
    p = fisher(hits, n, floor_hits, floor_n) if floor_n and n else None
    return EngineIntegrity(
        engine=engine,
        compared=whole.compared,
        diverged=whole.diverged,
        near_tie=whole.near_tie,
        errors=whole.errors,
        floor_compared=floor_n,
        floor_diverged=floor_hits,
        floor_loads_compared=other_n,
        floor_loads_diverged=other_hits,
        p_value=p,
        broken=_broken(whole, p, ties_of(run, engine).dtype),
    )


def _broken(whole: Integrity, p: float | None, dtype: str | None) -> str | None:
    """Why the output is broken, or None. See `docs/integrity.md`, "When it is a failure"."""
    above = p is not None and p < SIGNIFICANT
    parted = f"{whole.diverged} of {whole.compared} greedy outputs differ from the baseline's"
    floor_words = f"; against the baseline's own floor p = {p:.2g}" if above else ""
    if whole.errors:
        gap = f"{whole.worst_gap or 0.0:.2f} nats"
        if (whole.worst_gap or 0.0) > GROSS_GAP or dtype in EXACT or above:
            return (
                f"{parted}, {whole.errors} of them no near-tie (a token {gap} below the best one, "
                f"where rounding allows {near_tie_bound(dtype):g}){floor_words}"
            )
        return None
    if whole.near_tie is None and above and dtype in EXACT:
        return f"{parted}{floor_words}"
    return None


UNSEEN = -1


def _numbered(tables: Sequence[RequestTable]) -> tuple[list[Integers], int]:
    """Each table's prompts and turns by number, equal ones of all tables alike; how many at most.

    Tables: at least one.
    """
    words = Names.join([t.names("prompt_id") for t in tables])
    turns = np.concatenate([t.ints("turn").values for t in tables])
    span = 1 + int(turns.max(initial=0))
    ends = np.cumsum([len(t) for t in tables])
    return np.split(words.codes * np.int64(span) + turns, ends[:-1]), len(words.names) * span


def _firsts(prompts: Integers, rows: Integers) -> Integers:
    """Of these rows, the first one of each prompt."""
    return rows[np.unique(prompts[rows], return_index=True)[1]]


def _first_comparisons(compared: Sequence[tuple[CellData, CellData]]) -> tuple[int, int]:
    """How many prompts' answers differ where both variants first answered them, and of how many."""
    tables = []
    for base, cand in compared:
        theirs, ours = matched_rows(base.ok, cand.ok, first_turns=True)
        tables.append((base.ok.take(theirs), cand.ok.take(ours)))
    if not tables:
        return 0, 0
    numbered, prompts = _numbered([ours for _, ours in tables])
    found = np.full(prompts, UNSEEN)
    for (theirs_, ours_), own in zip(tables, numbered, strict=True):
        rows = _firsts(own, np.flatnonzero(found[own] == UNSEEN))
        found[own[rows]] = differ(theirs_.take(rows), ours_.take(rows))
    return int((found == 1).sum()), int((found != UNSEEN).sum())


def floor(cells: Sequence[CellData], *, load: bool) -> tuple[int, int]:
    """How many prompts a second answer of the baseline differs in, of those asked more than once.

    `load` True: both under the same load, in another cell. False: under different loads, which
    shows what the size of the batch does.
    """
    if not cells:
        return 0, 0
    tables = [c.ok.where(c.ok.ints("turn").values == 0) for c in cells]
    numbered, prompts = _numbered(tables)
    found, cell, row = (np.full(prompts, UNSEEN) for _ in range(3))
    for i, own in enumerate(numbered):
        fits = [(other.cell.load == cells[i].cell.load) is load for other in cells[:i]]
        again = np.array([*fits, False], bool)[cell[own]]
        rows = _firsts(own, np.flatnonzero(again & (found[own] == UNSEEN)))
        for before in np.unique(cell[own[rows]]).tolist():
            some = rows[cell[own[rows]] == before]
            theirs = tables[before].take(row[own[some]])
            found[own[some]] = differ(theirs, tables[i].take(some))
        new = _firsts(own, np.flatnonzero(cell[own] == UNSEEN))
        cell[own[new]], row[own[new]] = i, new
    return int((found == 1).sum()), int((found != UNSEEN).sum())


def fisher(hits: int, n: int, floor_hits: int, floor_n: int) -> float:
    """Fisher's exact test, one-sided: P(at least `hits` of `n`), given the total of both."""
    total_hits, everything = hits + floor_hits, n + floor_n
    most = min(total_hits, n)
    logs = [
        _log_choose(total_hits, x)
        + _log_choose(everything - total_hits, n - x)
        - _log_choose(everything, n)
        for x in range(max(hits, n - (everything - total_hits)), most + 1)
    ]
    return min(1.0, math.fsum(math.exp(value) for value in logs))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def lossless_caution(run: RunData, found: EngineIntegrity) -> Caution | None:
    """The output is not what the target alone would say."""
    if found.broken is None:
        return None
    return Caution(
        code="not_lossless",
        text=f"{found.engine}: {found.broken}",
        advice=(
            "Greedy speculative decoding must say what the target alone says: look for a defect of "
            "the engine, such as its verification or its cache, before believing any speed."
        ),
    )


def lossless_void(found: Iterable[EngineIntegrity]) -> str | None:
    """Why the run is void: the output is broken."""
    return next((f"output broken in {f.engine}: {f.broken}" for f in found if f.broken), None)
