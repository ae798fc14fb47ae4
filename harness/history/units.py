"""What may be pruned as one: a run's folder, or a sweep's with all its runs.

A folder is recognised by what is in it, and only so: its manifest is read strictly, and a name in
it that no version of the harness writes makes it nobody's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from harness.errors import UsageError, one_line
from harness.history.folders import HOLDERS, NO_RUNS, shown
from harness.history.points import utc_text
from harness.history.reading import SWEEP, read_bytes, read_labels
from harness.measure.migrate import read_stored
from harness.measure.store import MANIFEST
from harness.records import SCHEMA_VERSION, Manifest, Record

OF_A_RUN = re.compile(
    r"manifest\.json|summary\.json|capacity\.json|labels\.json|report\.(html|md)|points\.parquet"
    r"|speculation_profile(-[^/]*)?\.json|launches|cells|floor|ties|golden|plots|figures"
)
OF_A_SWEEP = re.compile(r"sweep\.json|labels\.json|report\.(html|md)|plots|figures|runs")
HALF_WRITTEN = re.compile(r"\.(manifest|summary|capacity|points|sweep|report|cells)[^/]*")
"""What a writer that was killed left behind."""


class Unit(Record, frozen=True, kw_only=True):
    """A folder below the root. `runs`: its runs' ids and places; `pinned`: why it must stay."""

    place: str
    created: str
    runs: tuple[str, ...]
    pinned: str | None
    what: str


class _Swept(msgspec.Struct):
    schema_version: str
    sweep_id: str
    settings: list[object]


def units_of(root: Path) -> tuple[list[Unit], list[tuple[str, str]]]:
    """The units below `root`, the oldest first, and what is none, each with the reason."""
    units, others = [], []
    holders = {os.fsdecode(name) for name in HOLDERS} | set(NO_RUNS)
    with os.scandir(root) as entries:
        names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    for name in names:
        if name.startswith(".") or name in holders:
            continue
        try:
            units.append(unit_of(root, name))
        except UsageError as error:
            others.append((name, str(error)))
        except OSError as error:
            others.append((name, (error.strerror or "unreadable").lower()))
    return sorted(units, key=lambda u: (u.created, u.place)), others


def unit_of(root: Path, name: str) -> Unit:
    """One folder below `root` as a unit. Raises `UsageError` where it is none, or `OSError`."""
    folder = root / name
    if folder.is_symlink():
        raise UsageError("a link")
    if not os.path.lexists(folder / SWEEP):
        return _run(folder, name)
    _only(folder, OF_A_SWEEP)
    swept = _swept(folder)
    runs = [_run(path, f"{name}/runs/{path.name}") for path in sorted((folder / "runs").iterdir())]
    if not runs:
        raise UsageError("a sweep of no runs")
    pinned = [read_labels(folder).pinned, *(run.pinned for run in runs)]
    return Unit(
        place=name,
        created=max(run.created for run in runs),
        runs=(name, swept.sweep_id, *(told for run in runs for told in run.runs)),
        pinned=next((why for why in pinned if why is not None), None),
        what=f"sweep of {len(runs)} settings",
    )


def _swept(folder: Path) -> _Swept:
    try:
        swept = msgspec.json.decode(read_bytes(folder / SWEEP), type=_Swept)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UsageError(f"{SWEEP}: cannot be read") from None
    if swept.schema_version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        raise UsageError(f"{SWEEP}: written with schema {one_line(swept.schema_version, 20)}")
    return swept


def _run(folder: Path, place: str) -> Unit:
    """A run's folder as a unit. Raises `UsageError` where it is none, or not by its content."""
    if not os.path.lexists(folder / MANIFEST):
        raise UsageError(f"no run's: no {MANIFEST}")
    try:
        manifest = read_stored(read_bytes(folder / MANIFEST), Manifest)
    except UsageError as error:
        raise UsageError(f"{MANIFEST}: {error}") from None
    _only(folder, OF_A_RUN)
    whole = os.path.exists(folder / "summary.json")
    return Unit(
        place=place,
        created=utc_text(manifest.created),
        runs=(place, manifest.run_id),
        pinned=read_labels(folder).pinned,
        what="run" if whole else "unfinished run",
    )


def _only(folder: Path, known: re.Pattern[str]) -> None:
    """Raise `UsageError` where a folder holds what is not the harness's: it may be somebody's."""
    for name in sorted(os.listdir(folder)):
        if not known.fullmatch(name) and not HALF_WRITTEN.fullmatch(name):
            raise UsageError(f"holds {one_line(shown(name), 80)}, which is not of a run")
