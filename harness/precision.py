"""Adding pairs of starts until the interval of the run's question is narrow enough.

What comes next follows from the saved cells alone, so that a run that was cut short goes on. The
rule looks at the interval's width, never at the ratio: see `analyse.stopping`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.analyse.compare import compare
from harness.analyse.data import RunData
from harness.analyse.stopping import widest
from harness.analyse.summary import cell_figures, void_reason
from harness.analyse.words import metric_words
from harness.errors import UsageError
from harness.measure.store import RunFolder
from harness.plan.expand import expand
from harness.prepare import Prepared
from harness.progress import Progress
from harness.records import Cell, Manifest


def check_precision(prepared: Prepared) -> None:
    """Raise `UsageError` where a plan's precision asks for what cannot be."""
    plan = prepared.plan.compare
    if plan.precision is None:
        return
    if len({c.variant for c in prepared.cells}) < 2:
        raise UsageError("--precision: of a ratio, which needs both variants")
    if plan.launches > plan.max_launches:
        raise UsageError(
            f"compare.max_launches={plan.max_launches}: fewer than compare.launches, "
            f"{plan.launches}"
        )


def grown(prepared: Prepared, manifest: Manifest) -> Prepared:
    """The engine with all the cells that a manifest has of it, where its plan let it grow."""
    if prepared.plan.compare.precision is None:
        return prepared
    own = sum(c.engine == prepared.name for c in manifest.cells)
    cells, launches = prepared.cells, _launches(prepared)
    while len(cells) < own and launches < prepared.plan.compare.max_launches:
        launches += 1
        cells = _cells(prepared, launches)
    return msgspec.structs.replace(prepared, cells=cells)


def by_engine(cells: Sequence[Cell], prepared: Sequence[Prepared]) -> list[Cell]:
    """A manifest's cells, engine by engine: those that were added lie at its end."""
    names = [p.name for p in prepared]
    known = [c for c in cells if c.engine in names]
    return sorted(known, key=lambda c: names.index(c.engine)) if len(known) == len(cells) else []


def grow(prepared: Prepared, cells: list[Cell], folder: RunFolder, progress: Progress) -> None:
    """Write further cells of an engine into the manifest, before they are measured."""
    if not cells:
        return
    prepared.cells.extend(cells)
    manifest = folder.manifest()
    folder.write_manifest(msgspec.structs.replace(manifest, cells=(*manifest.cells, *cells)))
    progress.expect(len(manifest.cells) + len(cells))


def further(prepared: Prepared, run: RunData, spent_s: float, progress: Progress) -> list[Cell]:
    """The cells of one more start of each variant; none where the run may end, which is told.

    `spent_s`: since the measuring began, or was gone on with.
    """
    plan = prepared.plan.compare
    void = void_reason(run)
    if plan.precision is None or void is not None:
        if void is not None:
            progress.say(f"{prepared.name}: no more starts are made: {void}")
        return []
    width = widest(compare(run, cell_figures(run)), prepared.name, plan.metric)
    launches = _launches(prepared)
    reached = "no interval" if width is None else f"{width:.1%} to either side"
    told = f"{prepared.name}: {launches} starts of each, {reached} of {metric_words(plan.metric)}"
    if width is None:
        progress.say(f"{told}; no more are made")
        return []
    if width <= plan.precision:
        progress.say(f"{told}: as precise as asked")
        return []
    if launches >= plan.max_launches:
        progress.say(f"{told}; compare.max_launches is reached")
        return []
    if plan.time_limit_s is not None and spent_s + _turn_s(run, prepared.name) > plan.time_limit_s:
        progress.say(f"{told}; one more of each would pass compare.time_limit_s")
        return []
    progress.say(f"{told}; one more of each")
    return _cells(prepared, launches + 1)[len(prepared.cells) :]


def _turn_s(run: RunData, engine: str) -> float:
    """How long a start of each variant took at most: coming up, and its cells."""
    turns: dict[int, float] = {}
    for launch in run.launches:
        if launch.engine == engine:
            turns[launch.repeat] = turns.get(launch.repeat, 0.0) + (launch.ready_s or 0.0)
    for data in run.select(engine):
        begin, end = data.timeline.window_start_ns, data.timeline.window_end_ns
        if begin is not None and end is not None:
            repeat = data.cell.repeat
            turns[repeat] = turns.get(repeat, 0.0) + (end - begin) / 1e9
    return max(turns.values(), default=0.0)


def _launches(prepared: Prepared) -> int:
    """How many launches, in the plan's sense, the cells are of."""
    repeats = len({c.repeat for c in prepared.cells})
    return repeats // prepared.plan.compare.blocks if prepared.attached else repeats


def _cells(prepared: Prepared, launches: int) -> list[Cell]:
    """The plan's cells with so many launches: those of fewer are its beginning."""
    compared = msgspec.structs.replace(prepared.plan.compare, launches=launches)
    plan = msgspec.structs.replace(prepared.plan, compare=compared)
    variants = tuple(dict.fromkeys(c.variant for c in prepared.cells))
    return expand(plan, prepared.name, variants, attached=prepared.attached)
