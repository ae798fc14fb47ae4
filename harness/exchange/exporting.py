"""The export of runs, or of a selection of the history, for other tools."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.exchange.llmd import Group, Known, file_name, group_of, reports, to_llmd
from harness.exchange.openmetrics import to_openmetrics
from harness.exchange.records import Import
from harness.exchange.tables import to_csv, to_parquet, to_points_json
from harness.findings import CellSummary
from harness.history.folders import Found, find
from harness.history.points import load_text
from harness.history.query import Query
from harness.history.reading import IMPORT, read_points, read_run
from harness.history.records import Point
from harness.history.store import History
from harness.measure.store import MANIFEST, SUMMARY, read_json, to_json, write_atomic
from harness.records import Record

FORMATS = ("csv", "parquet", "json", "llm-d", "openmetrics")
TABLES: dict[str, Callable[[Sequence[Point]], bytes]] = {
    "csv": to_csv,
    "parquet": to_parquet,
    "json": to_points_json,
}


class Chosen(Record, frozen=True, kw_only=True):
    """The points to export. `folders`: of the runs' that could tell more. `problems`: left out."""

    points: tuple[Point, ...]
    folders: tuple[Path, ...]
    problems: tuple[str, ...]


def of_history(history: History, query: Query, most: int | None) -> Chosen:
    """What the query asks of the history. Raises `UsageError` where nothing is left."""
    points = history.query(query, most=most)
    places = dict.fromkeys(p.folder for p in points if p.folder is not None)
    return _not_empty(
        str(history.root),
        Chosen(
            points=tuple(points),
            folders=tuple(history.root / place for place in places),
            problems=tuple(f"{path}: {reason}" for path, reason in history.problems),
        ),
    )


def of_folders(runs: Sequence[Path]) -> Chosen:
    """All points of runs, of imports, and of folders that hold such. Raises `UsageError`."""
    points: list[Point] = []
    folders: list[Path] = []
    problems: list[str] = []
    for path in runs:
        if not path.is_dir():
            raise UsageError(f"{path}: no such folder; give the folder of a run")
        own = _own_kind(path)
        if own is not None:
            points += _read(path, own)
            folders.append(path)
            continue
        for found in find(path):  # a sweep's folder, or one of many runs
            folder = found.path(path)
            try:
                points += _read(folder, found)
                folders.append(folder)
            except UsageError as error:
                problems.append(str(error))
    chosen = Chosen(points=tuple(points), folders=tuple(folders), problems=tuple(problems))
    return _not_empty(", ".join(map(str, runs)), chosen)


def _not_empty(where: str, chosen: Chosen) -> Chosen:
    if not chosen.points:
        more = f"; left out: {chosen.problems[0]}" if chosen.problems else ""
        raise UsageError(f"{where}: nothing to export{more}")
    return chosen


def _own_kind(path: Path) -> Found | None:
    """What a folder is by itself; None where it only holds others."""
    if (path / IMPORT).is_file():
        return Found(place=b"", kind="import")
    if (path / MANIFEST).is_file() or (path / SUMMARY).is_file():
        return Found(place=b"", kind="run")
    return None


def _read(folder: Path, found: Found) -> list[Point]:
    if found.reason is not None:
        raise UsageError(f"{folder}: {found.reason}")
    try:
        return read_points(folder, found.kind)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None


def export_text(chosen: Chosen, form: str, *, timestamps: bool = False) -> bytes:
    """The whole export as one text; of `llm-d` one report, or one a line."""
    if form in TABLES:
        return TABLES[form](chosen.points)
    if form == "openmetrics":
        return to_openmetrics(chosen.points, timestamps=timestamps)
    return to_llmd(list(_reports(chosen).values()))


def export_files(chosen: Chosen, form: str, out: Path, *, timestamps: bool = False) -> list[Path]:
    """Write the export to a file, each whole or not at all; of several reports one file each.

    Then `out` is their folder. Raises `UsageError` where it is something else.
    """
    if form != "llm-d":
        _check_file(out)
        write_atomic(out, export_text(chosen, form, timestamps=timestamps))
        return [out]
    made = _reports(chosen)
    if len(made) == 1 and out.suffix == ".json" and not out.is_dir():
        _check_file(out)
        write_atomic(out, to_llmd(list(made.values())))
        return [out]
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: {len(made)} reports; give a folder for them, not a file")
    paths = [out / file_name(group) for group in made]
    for path, report in zip(paths, made.values(), strict=True):
        write_atomic(path, to_json(report))
    return paths


def write(chosen: Chosen, form: str, out: Path | None, *, timestamps: bool) -> None:
    """Write the export to `out`, and name its files; without it to standard output."""
    if out is not None:
        for path in export_files(chosen, form, out, timestamps=timestamps):
            print(path)
        return
    if form == "parquet" and sys.stdout.isatty():
        raise UsageError("--format parquet: no text; give --out FILE")
    sys.stdout.buffer.write(export_text(chosen, form, timestamps=timestamps))
    sys.stdout.flush()


def _check_file(out: Path) -> None:
    if out.is_dir():
        raise UsageError(f"--out {out}: a folder; give a file's name")
    if out.exists() and not out.is_file():  # a device would be replaced by a file
        raise UsageError(f"--out {out}: not a plain file; leave --out away for standard output")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: no such folder; make it first")


def _reports(chosen: Chosen) -> dict[Group, dict[str, object]]:
    known: dict[Group, Known] = {}
    for folder in chosen.folders:
        known |= _of_import(folder) if (folder / IMPORT).is_file() else _of_run(folder)
    made = reports(chosen.points, known)
    if not made:
        raise UsageError("llm-d: none of the points is a latency, a rate or a count of requests")
    return made


def _of_import(folder: Path) -> dict[Group, Known]:
    record = read_json(folder / IMPORT, Import)
    return {group_of(p): Known(tool_version=record.tool_version) for p in record.points}


def _of_run(folder: Path) -> dict[Group, Known]:
    """Of each of a run's engines, variants and loads."""
    summary, manifest, _ = read_run(folder)
    cells: dict[Group, list[CellSummary]] = defaultdict(list)
    for cell in summary.cells:
        group = summary.run_id, cell.engine, cell.variant, cell.workload, load_text(cell.load)
        cells[group].append(cell)
    version = manifest.versions.get("spec-harness")
    return {
        group: Known(
            prompt=_mean(own, "prompt_tokens"),
            output=_mean(own, "output_tokens"),
            tool_version=version,
        )
        for group, own in cells.items()
    }


def _mean(cells: Sequence[CellSummary], name: str) -> float | None:
    """Tokens of a whole answer, over the cells that know them."""
    told = [(getattr(m, name), m.requests_ok) for c in cells if (m := c.metrics) is not None]
    requests = sum(n for tokens, n in told if tokens is not None)
    return sum(tokens for tokens, _ in told if tokens is not None) / requests if requests else None
