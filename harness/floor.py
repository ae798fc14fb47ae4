"""The floor of divergences: the baseline asked the same prompts again, which is not measured load.

An engine may answer the same prompt differently from one time to the next, and in a batch of
another size. What speculation changes is held against that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.load.drive import drive
from harness.measure.parquet import write_requests
from harness.measure.store import (
    RunFolder,
    to_json,
    write_atomic,
)
from harness.prepare import Prepared
from harness.progress import Progress
from harness.records import Cell, LoadPoint
from harness.serving import Server, asking_of

PROMPTS = 32
MOST_S = 30.0
"""Seconds spent at each concurrency: what is not answered by then is not compared."""
OTHER = 4
"""The concurrency whose batches are compared with single requests where the plan has one alone."""


def ask_again(
    prepared: Prepared, server: Server, cells: Sequence[Cell], folder: RunFolder, progress: Progress
) -> None:
    """Ask this baseline some prompts that the baseline answered before, at two concurrencies.

    Once in a run: in the second start of a baseline, or in the only one.
    """
    first = cells[0]
    variants = {c.variant for c in prepared.cells}
    if first.variant != "baseline" or len(variants) < 2:
        return
    if prepared.plan.sampling.temperature != 0:
        return
    saved = [c for c in prepared.cells if c.variant == "baseline" and folder.has_cell(c.cell_id)]
    later = any(c.variant == "baseline" and c.repeat > first.repeat for c in prepared.cells)
    earlier = [c for c in saved if c.repeat < first.repeat]
    before = (earlier or ([] if later else saved))[:1]
    name = f"{prepared.name}-again"
    if not before or _cell_file(folder, f"{name}-0").exists():
        return
    progress.stage(f"asking {prepared.name} again for the floor of divergences")
    own = before[0].load.concurrency or OTHER  # of an open loop as near as a closed one comes
    _ask(prepared, server, before[0], own, f"{name}-0", folder)
    other = 1 if own > 1 else OTHER
    load = msgspec.structs.replace(before[0].load, concurrency=other)
    changed = msgspec.structs.replace(before[0], load=load)
    _ask(prepared, server, changed, other, f"{name}-1", folder)


def _ask(
    prepared: Prepared,
    server: Server,
    before: Cell,
    concurrency: int,
    name: str,
    folder: RunFolder,
) -> None:
    known = {p.id: p for p in prepared.prompts}
    answered = folder.requests(before.cell_id).ok
    asked = answered.where(answered.ints("turn").values == 0).names("prompt_id").python()
    prompts = [known[prompt_id] for prompt_id in asked if prompt_id in known][:PROMPTS]
    prompts = [msgspec.structs.replace(p, turns=()) for p in prompts]
    if not prompts:
        return
    load = LoadPoint(
        mode="closed", concurrency=concurrency, num_requests=len(prompts), duration_s=MOST_S
    )
    ask = asking_of(prepared, server, "baseline")
    driven = drive(ask, prompts, load, cell_id=name, seed=before.seed, engine_gone=server.gone)
    path = _cell_file(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_requests(path.with_suffix(".parquet"), driven.records)
    write_atomic(path, to_json(msgspec.structs.replace(before, cell_id=name)))


def _cell_file(folder: RunFolder, name: str) -> Path:
    return folder.path / "floor" / f"{name}.json"
