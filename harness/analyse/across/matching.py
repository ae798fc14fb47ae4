"""What of two runs belongs together: engines, loads and blocks, or why nothing does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from harness.analyse.across.differences import flat, searching
from harness.analyse.across.readings import ended, plain
from harness.analyse.across.records import Difference, Stored
from harness.analyse.data import CellData
from harness.analyse.words import load_words
from harness.records import VARIANTS, LoadPoint

DEALT = ("workload.", "sampling.", "load.num_requests", "load.warmup_requests", "load.duration_s")
"""Keys of a plan that decide which prompts a block gets; seeds and loads are looked at as well."""


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """The engines and loads of the reference, each with the candidate's that it is held against."""

    engines: dict[str, str]
    loads: dict[LoadPoint, LoadPoint]


def match(a: Stored, b: Stored, *, anyway: bool) -> Match:
    """By name and by load; `anyway` also by their order, where nothing fits otherwise."""
    return Match(engines=_engines(a, b, anyway=anyway), loads=_loads(a, b, anyway=anyway))


def _engines(a: Stored, b: Stored, *, anyway: bool) -> dict[str, str]:
    shared = {name: name for name in a.plans if name in b.plans}
    single = len(a.plans) == len(b.plans) == 1
    if shared or not (single or anyway):
        return shared
    return dict(zip(a.plans, b.plans, strict=False))


def _loads(a: Stored, b: Stored, *, anyway: bool) -> dict[LoadPoint, LoadPoint]:
    ours, theirs = loads_of(a), loads_of(b)
    shared = {load: load for load in ours if load in theirs}
    return dict(zip(ours, theirs, strict=False)) if anyway and not shared else shared


def loads_of(stored: Stored) -> list[LoadPoint]:
    """The loads that something was measured at, in their order."""
    return list(dict.fromkeys(plain(cell.load) for cell in ended(stored)))


def hindrances(a: Stored, b: Stored, found: Match, told: Sequence[Difference]) -> list[str]:
    """Why the two cannot be compared: another target, workload or load."""
    why = [f"another {d.key}: {d.reference} -> {d.candidate}" for d in told if d.blocks]
    if searching(a, b):
        why.append("a capacity search chooses its own loads")
    if not found.engines:
        why.append(f"another engine: {', '.join(a.plans)} -> {', '.join(b.plans)}")
    if not set(loads_of(a)) & set(loads_of(b)):
        ends = [", ".join(map(load_words, loads_of(s))) or "nothing measured" for s in (a, b)]
        why.append(f"another load: {ends[0]} -> {ends[1]}")
    return why


def left_out(a: Stored, b: Stored, found: Match) -> list[str]:
    """What only one of the two measured, in words."""
    told: list[str] = []
    for words, run, engines, loads in (
        ("reference", a, found.engines.keys(), found.loads.keys()),
        ("candidate", b, found.engines.values(), found.loads.values()),
    ):
        others = [f"engine {name}" for name in run.plans if name not in engines]
        others += [load_words(load) for load in loads_of(run) if load not in loads]
        told += [f"{what}: only in the {words}" for what in others]
    for variant in VARIANTS:
        has = [any(c.variant == variant for c in ended(s)) for s in (a, b)]
        if has[0] != has[1]:
            told.append(f"{variant}: only in the {'reference' if has[0] else 'candidate'}")
    return told


def unpaired(
    a: Stored, b: Stored, engines: tuple[str, str], loads: tuple[LoadPoint, LoadPoint]
) -> str | None:
    """Why the blocks of two runs do not pair at a load; None: they had the same prompts in turn."""
    plans = flat(a.plans[engines[0]]), flat(b.plans[engines[1]])
    for key in dict.fromkeys((*plans[0], *plans[1])):
        if key.startswith(DEALT) and plans[0].get(key) != plans[1].get(key):
            return f"{key} is not the same"
    ours, theirs = (_seeds(s, e, p) for s, e, p in zip((a, b), engines, loads, strict=True))
    shared = ours.keys() & theirs.keys()
    if any(ours[at] != theirs[at] for at in shared):
        return "the seeds are not the same"
    if ours.keys() != theirs.keys():
        return "not the same blocks were planned"
    cells = [_cells(s, e, p) for s, e, p in zip((a, b), engines, loads, strict=True)]
    for at in cells[0].keys() & cells[1].keys():
        if not _same_prompts(cells[0][at], cells[1][at]):
            return "the prompts are not the same"
    return None


def _seeds(stored: Stored, engine: str, load: LoadPoint) -> dict[Any, int]:
    return {
        (c.variant, c.repeat, c.block): c.seed
        for c in stored.run.manifest.cells
        if c.engine == engine and plain(c.load) == load
    }


def _cells(stored: Stored, engine: str, load: LoadPoint) -> dict[Any, CellData]:
    return {
        (c.cell.variant, c.cell.repeat, c.cell.block): c
        for c in stored.run.cells
        if c.cell.engine == engine and plain(c.cell.load) == load
    }


def _same_prompts(a: CellData, b: CellData) -> bool:
    """Whether each request that both sent had the same prompt, as long in tokens."""
    ours, theirs = a.records, b.records
    _, at_a, at_b = np.intersect1d(
        ours.ints("index").values, theirs.ints("index").values, return_indices=True
    )
    one, other = ours.take(at_a), theirs.take(at_b)
    if one.names("prompt_id").python() != other.names("prompt_id").python():
        return False
    tokens = one.ints("prompt_tokens"), other.ints("prompt_tokens")
    known = tokens[0].known & tokens[1].known & (one.ints("turn").values == 0)
    return bool((tokens[0].values[known] == tokens[1].values[known]).all())
