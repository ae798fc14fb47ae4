"""Whether greedy outputs diverge more than the baseline does from itself, and what that means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from harness.analyse.data import CellData, RunData, pairs
from harness.analyse.integrity import (
    GROSS_GAP,
    compare_outputs,
    first_divergence,
    matched_answers,
    near_tie_bound,
    total,
)
from harness.records import Caution, EngineIntegrity, Integrity, RequestRecord, Tie, Ties

SIGNIFICANT = 0.01
EXACT = ("float32",)
"""Precisions in which a divergence that no server could be asked about is taken for an error."""
Key = tuple[Any, ...]


def greedy(run: RunData, engine: str) -> bool:
    """Whether the engine was asked for its best token each time."""
    return bool(run.plan(engine)["sampling"]["temperature"] == 0)


def ties_of(run: RunData, engine: str) -> Ties:
    """What servers said of the engine's divergences."""
    dtype = run.plan(engine)["engine"]["dtype"]
    none = Ties(engine=engine, dtype=None if dtype == "auto" else dtype)
    return next((t for t in run.ties if t.engine == engine), none)


def cell_integrity(run: RunData) -> dict[str, Integrity | None]:
    """By the speculative cell's id; only greedy outputs can be compared token by token."""
    found: dict[str, Integrity | None] = {}
    for engine in run.engines():
        if not greedy(run, engine):
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
    if not greedy(run, engine):
        return EngineIntegrity(engine=engine)
    cells = run.select(engine)
    whole = total([integrity.get(c.cell.cell_id) for c in cells])
    if whole is None:
        return EngineIntegrity(engine=engine)
    ours = _first_by_prompt(
        (_prompt(cand), base, cand) for b, c in pairs(cells) for base, cand in matched_answers(b, c)
    )
    again = [c for c in run.floor if c.cell.engine == engine]
    plain = [*run.select(engine, "baseline"), *again]
    same, other = floor(plain, load=True), floor(plain, load=False)
    n, hits = len(ours), sum(ours.values())
    p = fisher(hits, n, sum(same.values()), len(same)) if same and n else None
    return EngineIntegrity(
        engine=engine,
        compared=whole.compared,
        diverged=whole.diverged,
        near_tie=whole.near_tie,
        errors=whole.errors,
        floor_compared=len(same),
        floor_diverged=sum(same.values()),
        floor_loads_compared=len(other),
        floor_loads_diverged=sum(other.values()),
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


def _prompt(record: RequestRecord) -> Key:
    return record.prompt_id, record.turn


def _first_by_prompt(
    compared: Iterable[tuple[Key, RequestRecord, RequestRecord]],
) -> dict[Key, bool]:
    """Whether the two answers of each key's first comparison differ."""
    found: dict[Key, bool] = {}
    for key, one, other in compared:
        if key not in found:
            found[key] = first_divergence(one, other) is not None
    return found


def floor(cells: list[CellData], *, load: bool) -> dict[Key, bool]:
    """By prompt asked more than once of the baseline: whether a second answer differs.

    `load` True: both under the same load, in another cell. False: under different loads, which
    shows what the size of the batch does.
    """
    fits: Callable[[CellData, CellData], bool] = (
        (lambda a, b: a.cell.load == b.cell.load)
        if load
        else (lambda a, b: a.cell.load != b.cell.load)
    )
    first: dict[Key, tuple[CellData, RequestRecord]] = {}
    found: dict[Key, bool] = {}
    for data in cells:
        for record in data.ok:
            key = _prompt(record)
            if record.turn or key in found:
                continue
            before = first.setdefault(key, (data, record))
            if before[0] is not data and fits(before[0], data):
                found[key] = first_divergence(before[1], record) is not None
    return found


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
