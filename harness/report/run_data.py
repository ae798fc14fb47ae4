"""Reading a run's folder for its report: what is missing or broken becomes a caution, not an end.

The folder's contract is in `docs/run-folder.md`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.errors import UsageError
from harness.findings import Caution, CellSummary, Summary
from harness.measure.series import Series, read_series
from harness.measure.shape import checked
from harness.records import (
    SCHEMA_VERSION,
    Cell,
    EngineCounters,
    LaunchRecord,
    LoadPoint,
    Manifest,
    Timeline,
    Variant,
)
from harness.report import words
from harness.report.samples import Samples, read_samples

R = TypeVar("R")

UNREADABLE_ADVICE = "Run `python -m harness analyse RUN` to make the summary anew from the cells."


@dataclass(frozen=True, kw_only=True)
class CellData:
    """One cell's files. `samples` None: no readable `requests.parquet`."""

    cell_id: str
    engine: str
    variant: Variant
    load: LoadPoint
    repeat: int
    samples: Samples | None
    timeline: Timeline | None
    counters: EngineCounters | None
    telemetry: Series | None = None


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run's folder as read. `notes` are the cautions about the folder itself.

    `launches` has every start of an engine in the order of their folders' names.
    """

    summary: Summary
    manifest: Manifest | None
    cells: tuple[CellData, ...]
    launches: tuple[LaunchRecord, ...] = ()
    notes: tuple[Caution, ...] = field(default=())


def read_run(run_dir: Path) -> RunData:
    """Read all that is there of a run.

    Raises `UsageError` only where the folder is no run at all: neither manifest nor summary.
    """
    notes: list[Caution] = []
    if not any((run_dir / name).is_file() for name in ("manifest.json", "summary.json")):
        raise UsageError(
            f"{run_dir}: not a run's folder, it holds neither manifest.json nor summary.json; "
            "give the folder that `python -m harness run` printed on its last line"
        )
    manifest = _read(run_dir / "manifest.json", Manifest, notes)
    summary = _read(run_dir / "summary.json", Summary, notes)
    if summary is None:
        summary = _empty_summary(run_dir, manifest)
    if summary.schema_version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        notes.append(
            Caution(
                code="schema-version",
                text=f"written with schema {words.one_line(summary.schema_version, 20)}, "
                f"read with {SCHEMA_VERSION}",
                advice="Make the report with the harness version that wrote the run.",
            )
        )
    cells = tuple(_cells(run_dir, summary, manifest, notes))
    notes += _without_requests(summary, cells)
    return RunData(
        summary=summary,
        manifest=manifest,
        cells=cells,
        launches=tuple(_launches(run_dir, notes)),
        notes=tuple(notes),
    )


def _without_requests(summary: Summary, cells: tuple[CellData, ...]) -> list[Caution]:
    """One caution for all cells whose requests cannot be read, or none."""
    bare = [cell.cell_id for cell in cells if cell.samples is None]
    if not bare:
        return []
    measured = {cell.cell_id for cell in summary.cells if cell.status == "ok"}
    first = words.one_line(bare[0], 60)
    if len(bare) == 1:
        text = f"cell {first} has no readable requests.parquet, so the plots leave it out"
    else:
        text = (
            f"{len(bare)} of {len(cells)} cells have no readable requests.parquet, the first is "
            f"{first}, so the plots leave them out"
        )
    advice = "`python -m harness resume RUN` measures the cells that are missing."
    if measured.issuperset(bare):
        advice = (
            "They were measured, and the figures are the summary's; copy the run's folder with "
            "its cells/ for the other plots."
        )
    return [Caution(code="no-requests", text=text, advice=advice)]


def _launches(run_dir: Path, notes: list[Caution]) -> list[LaunchRecord]:
    paths = sorted((run_dir / "launches").glob("*/launch.json"))
    found = [_read(path, LaunchRecord, notes) for path in paths]
    return [launch for launch in found if launch is not None]


def _empty_summary(run_dir: Path, manifest: Manifest | None) -> Summary:
    run_id = manifest.run_id if manifest else run_dir.name
    return Summary(
        schema_version=manifest.schema_version if manifest else SCHEMA_VERSION,
        run_id=run_id,
        title=run_id,
        cells=(),
        comparisons=(),
        failures=("the run has no readable summary",),
    )


def _known_cells(
    summary: Summary, manifest: Manifest | None
) -> list[tuple[str, str, Variant, LoadPoint, int]]:
    """Cells of the summary, then those of the plan that the summary does not know."""
    known: dict[str, tuple[str, str, Variant, LoadPoint, int]] = {}
    planned = manifest.cells if manifest else ()
    cells: list[Cell | CellSummary] = [*summary.cells, *planned]
    for cell in cells:
        known.setdefault(
            cell.cell_id, (cell.cell_id, cell.engine, cell.variant, cell.load, cell.repeat)
        )
    return list(known.values())


def _cells(
    run_dir: Path, summary: Summary, manifest: Manifest | None, notes: list[Caution]
) -> Iterator[CellData]:
    """Every cell. What is drawn over time is read of the first of each engine, variant and load."""
    tracked: set[tuple[str, Variant, LoadPoint]] = set()
    for known in _known_cells(summary, manifest):
        _, engine, variant, load, _ = known
        cell = _cell(run_dir, known, notes, over_time=(engine, variant, load) not in tracked)
        if cell.samples is not None and cell.samples.track is not None:
            tracked.add((engine, variant, load))
        yield cell


def _cell(
    run_dir: Path,
    known: tuple[str, str, Variant, LoadPoint, int],
    notes: list[Caution],
    *,
    over_time: bool,
) -> CellData:
    cell_id, engine, variant, load, repeat = known
    folder = run_dir / "cells" / cell_id
    inside = folder.resolve().is_relative_to((run_dir / "cells").resolve())
    samples = timeline = counters = None
    if inside:
        timeline = _read(folder / "timeline.json", Timeline, notes, quiet=True)
        counters = _read(folder / "counters.json", EngineCounters, notes, quiet=True)
        samples = _samples(folder / "requests.parquet", notes, over_time=over_time)
    return CellData(
        cell_id=cell_id,
        engine=engine,
        variant=variant,
        load=load,
        repeat=repeat,
        samples=samples,
        timeline=timeline,
        counters=counters,
        telemetry=_telemetry(folder / "telemetry.parquet", notes) if inside else None,
    )


def _samples(path: Path, notes: list[Caution], *, over_time: bool) -> Samples | None:
    if not path.is_file():
        return None
    try:
        return read_samples(path, over_time=over_time)
    except UsageError as error:
        notes.append(_unreadable(path, getattr(error, "why", error)))
        return None


def _telemetry(path: Path, notes: list[Caution]) -> Series | None:
    if not path.is_file():
        return None
    try:
        return read_series(path)
    except UsageError as error:
        notes.append(_unreadable(path, error))
        return None


def _read(path: Path, kind: type[R], notes: list[Caution], *, quiet: bool = False) -> R | None:
    """One JSON record; NaN and the infinities, which JSON does not know, are read as missing."""
    if not path.is_file():
        if not quiet:
            notes.append(
                Caution(
                    code="missing-file",
                    text=f"{path.name} is missing: the run did not end, or it was moved",
                    advice=UNREADABLE_ADVICE,
                )
            )
        return None
    try:
        plain: Any = json.loads(path.read_text("utf-8"), parse_constant=lambda _: None)
        found = msgspec.convert(plain, kind)
        if isinstance(found, Manifest):
            checked(found)
        return found
    except (OSError, ValueError, msgspec.ValidationError, RecursionError) as error:
        notes.append(_unreadable(path, error))
        return None


def _unreadable(path: Path, error: object) -> Caution:
    inside = path.parent.parent.name in ("cells", "launches")
    where = f"{path.parent.name}/{path.name}" if inside else path.name
    return Caution(
        code="unreadable-file",
        text=f"{where} could not be read: {words.one_line(str(error), 200)}",
        advice=UNREADABLE_ADVICE,
    )
