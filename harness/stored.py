"""What a run's folder holds, read for the analysis, and the answer that is made from it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.analyse.data import CellData, RunData
from harness.analyse.profile import profiles
from harness.analyse.summary import summarise
from harness.errors import UsageError
from harness.findings import Summary
from harness.measure.counters import difference
from harness.measure.parquet import read_requests
from harness.measure.store import RunFolder, read_json
from harness.plan.schema import Plan, as_dict
from harness.progress import Progress
from harness.records import Cell, LaunchRecord, Manifest, ParityRecord, Ties, Timeline

LAUNCH = "launch.json"
PARITY = "parity.json"


def analyse(path: Path) -> Summary:
    """Compute `summary.json` anew from the stored records. Raises `UsageError`."""
    folder = RunFolder(path)
    return conclude(folder, read_run(folder))


def conclude(folder: RunFolder, run: RunData) -> Summary:
    """Write what the records say, and say it."""
    from harness.report.verdict import verdict_sentences

    summary = summarise(run)
    summary = msgspec.structs.replace(summary, verdict=tuple(verdict_sentences(summary)))
    folder.write_summary(summary)
    folder.write_profiles(profiles(run))
    keep_points(folder, run, summary)
    return summary


def keep_points(folder: RunFolder, run: RunData, summary: Summary) -> None:
    """The summary's scalars as Parquet. The history makes the file anew where it is missing."""
    from harness.history.parquet import POINTS, write_points
    from harness.history.points import points_of
    from harness.history.reading import read_labels

    try:
        points = points_of(summary, run.manifest, read_labels(folder.path))
        write_points(folder.path / POINTS, points)
    except Exception:
        return  # a date that is none, a full disk, whatever it is: the summary is safe


def report(path: Path, progress: Progress) -> None:
    """Write the pages. A report that fails must not cost a run that was measured."""
    progress.stage("writing the report")
    try:
        from harness.report.html import write_report

        write_report(path)
    except Exception as error:  # whatever it is, the summary is safe
        kind = type(error).__name__
        progress.say(
            f"the report could not be written ({kind}: {error}); the figures are in summary.json, "
            f"try `python -m harness report {path}`"
        )


def read_run(folder: RunFolder) -> RunData:
    """Everything that the folder holds for the analysis. Raises `UsageError`."""
    manifest = with_whole_plans(folder, folder.manifest())
    known = {c.cell_id: c for c in manifest.cells}
    cells = [read_cell(folder, known[cell_id]) for cell_id in folder.saved_cells(list(known))]
    return RunData(
        manifest=manifest,
        cells=cells,
        launches=read_launches(folder),
        parity=read_parity(folder),
        golden=read_golden(folder),
        ties=read_ties(folder),
        floor=read_floor(folder),
    )


def with_whole_plans(folder: RunFolder, manifest: Manifest) -> Manifest:
    """The manifest with every key in its engines' plans: one that a plan lacks has its default.

    Raises `UsageError` where they are no plans, or a cell's engine has none.
    """
    path, told = folder.path / "manifest.json", manifest.plan.get("engines")
    try:
        plans = msgspec.convert(told, dict[str, Plan])
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: plan.engines cannot be read ({error})") from None
    for cell in manifest.cells:
        if cell.engine not in plans:
            raise UsageError(f"{path}: {cell.cell_id} is of {cell.engine}, which has no plan in it")
    engines = {engine: as_dict(plan) for engine, plan in plans.items()}
    return msgspec.structs.replace(manifest, plan={**manifest.plan, "engines": engines})


def read_cell(folder: RunFolder, cell: Cell) -> CellData:
    """What the folder holds of one cell. Raises `UsageError`."""
    return CellData(
        cell=cell,
        records=folder.requests(cell.cell_id),
        counters=folder.counters(cell.cell_id),
        timeline=folder.timeline(cell.cell_id),
        telemetry=folder.telemetry(cell.cell_id),
    )


def read_launches(folder: RunFolder) -> list[LaunchRecord]:
    """Every start's record, of repeated tries the last."""
    found: dict[tuple[str, str, int], LaunchRecord] = {}
    for path in folder.launch_dirs():
        if (path / LAUNCH).exists():
            record = read_json(path / LAUNCH, LaunchRecord)
            found[record.engine, record.variant, record.repeat] = record
    return list(found.values())


def read_parity(folder: RunFolder) -> list[ParityRecord]:
    """What every start's server said; of repeated tries the last that said anything."""
    found: dict[tuple[str, str, int], ParityRecord] = {}
    for path in folder.launch_dirs():
        if (path / PARITY).exists():
            record = read_json(path / PARITY, ParityRecord)
            key = record.engine, record.variant, record.repeat
            if record.answers or key not in found:
                found[key] = record
    return list(found.values())


def read_golden(folder: RunFolder) -> dict[str, ParityRecord]:
    """The golden answers of a run's engines."""
    files = sorted((folder.path / "golden").glob("*.json"))
    return {path.stem: read_json(path, ParityRecord) for path in files}


def ties_path(folder: RunFolder, engine: str) -> Path:
    """Where an engine's near-ties lie."""
    return folder.path / "ties" / f"{engine}.json"


def read_ties(folder: RunFolder) -> list[Ties]:
    """What servers said of divergences, engine by engine."""
    return [read_json(path, Ties) for path in sorted((folder.path / "ties").glob("*.json"))]


def read_floor(folder: RunFolder) -> list[CellData]:
    """What baselines answered when they were asked again, as cells of the load they stood for."""
    return [
        CellData(
            cell=read_json(path, Cell),
            records=read_requests(path.with_suffix(".parquet")),
            counters=difference(None, None, settled=False),
            timeline=Timeline(startup=(), ready_s=None, window_start_ns=None, window_end_ns=None),
        )
        for path in sorted((folder.path / "floor").glob("*.json"))
    ]
