"""A run's folder on disk: written piece by piece, each piece whole or not there at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.errors import UsageError
from harness.findings import Summary
from harness.measure.migrate import read_stored
from harness.measure.parquet import read_requests, write_requests
from harness.measure.series import Series, read_series, write_series
from harness.measure.shape import ShapeError, checked
from harness.measure.table import NAMES, RequestTable
from harness.records import SCHEMA_VERSION, EngineCounters, Manifest, RequestRecord, Timeline

T = TypeVar("T")
MANIFEST = "manifest.json"
SUMMARY = "summary.json"
PROFILE = "speculation_profile.json"
REQUESTS = "requests.parquet"
COUNTERS = "counters.json"
TIMELINE = "timeline.json"
TELEMETRY = "telemetry.parquet"
ENGINE_LOG = "engine.log"


def write_atomic(path: Path, data: bytes) -> None:
    """Write `path` whole, its folder too where it is missing, and wait for the disk.

    An `OSError` names a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    put_whole(path, data, sync=True)


def put_whole(path: Path, data: bytes, *, sync: bool) -> None:
    """Write to a file beside `path`, then rename it over it; `sync`: on the disk before that."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a full disk names no file
        raise


def to_json(record: Any) -> bytes:
    """Indented JSON, keys in the order of the fields."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def read_json(path: Path, kind: type[T]) -> T:
    """Read one record. Raises `UsageError` naming the file where it is missing or broken."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise _unread(path, error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as version {SCHEMA_VERSION}: {error}") from None


def read_migrated(path: Path, kind: type[T]) -> T:
    """Read a summary or a manifest, one of an earlier version in the newest form.

    Raises `UsageError` naming the file where it is missing, broken or of another major version.
    """
    try:
        return read_stored(path.read_bytes(), kind)
    except OSError as error:
        raise _unread(path, error) from None
    except UsageError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None


def _unread(path: Path, error: OSError) -> UsageError:
    if isinstance(error, FileNotFoundError):
        return UsageError(f"{path}: no such file; is this the folder of a run?")
    if isinstance(error, NotADirectoryError):
        return UsageError(f"{path.parent}: not a folder; give the folder of a run")
    return UsageError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}")


def check_version(path: Path, version: str) -> None:
    """Raise `UsageError` where a file's schema is another major version than this one's."""
    if version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        raise UsageError(
            f"{path}: written with schema {version[:20]}, this harness reads {SCHEMA_VERSION}; "
            "use the harness that wrote it"
        )


@contextlib.contextmanager
def held(folder: Path, refusal: str) -> Iterator[None]:
    """Hold a folder for one process. Raises `UsageError` with `refusal` where another holds it.

    It is the folder that is locked: its files may be replaced meanwhile.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not locked(handle):
            raise UsageError(f"{folder}: {refusal}")
        yield
    finally:
        os.close(handle)


def locked(handle: int) -> bool:
    """Whether the lock is ours now; where the file system has none, always."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class RunFolder:
    """Where everything of a run lies."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cell(self, cell_id: str) -> Path:
        """The folder of one cell."""
        return self.path / "cells" / cell_id

    def new_launch(self, name: str) -> Path:
        """A new folder for one start of an engine: its log, and what is written for it.

        A second try gets a folder of its own: cells share their start's log by hard links.
        """
        for attempt in range(1, 1000):
            folder = self.path / "launches" / (name if attempt == 1 else f"{name}.{attempt}")
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                continue
        raise UsageError(f"{self.path}: too many tries of {name}; start a new run")

    def launch_dirs(self) -> list[Path]:
        """The folders of all starts, later tries after earlier ones."""

        def order(path: Path) -> tuple[str, int]:
            name, _, attempt = path.name.partition(".")
            return name, int(attempt) if attempt.isdecimal() else 1

        return sorted((self.path / "launches").glob("*"), key=order)

    def write_manifest(self, manifest: Manifest) -> None:
        """The first thing written."""
        write_atomic(self.path / MANIFEST, to_json(manifest))

    def write_summary(self, summary: Summary) -> None:
        """The last but the report."""
        write_atomic(self.path / SUMMARY, to_json(summary))

    def write_profiles(self, profiles: Mapping[str, Any]) -> None:
        """Each engine's `speculation_profile.json`; of several engines the later ones' are named.

        Those of an earlier analysis that this one no longer makes are removed.
        """
        paths = {
            self.path / (PROFILE if i == 0 else PROFILE.replace(".", f"-{engine}.")): profile
            for i, (engine, profile) in enumerate(profiles.items())
        }
        for old in self.path.glob(PROFILE.replace(".", "*.")):
            if old not in paths:
                old.unlink()
        for path, profile in paths.items():
            write_atomic(path, to_json(profile))

    def manifest(self) -> Manifest:
        """Raises `UsageError` where there is none, or one that is damaged."""
        path = self.path / MANIFEST
        try:
            return checked(read_migrated(path, Manifest))
        except ShapeError as error:
            raise UsageError(f"{path}: {error}") from None

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the folder for one harness. Raises `UsageError` where another measures into it."""
        if not self.path.is_dir():
            raise UsageError(f"{self.path}: no such folder; is this the folder of a run?")
        with held(self.path, "another harness is measuring into it; wait for its end"):
            yield

    def summary(self) -> Summary:
        """Raises `UsageError` where there is none."""
        return read_migrated(self.path / SUMMARY, Summary)

    def save_cell(
        self,
        cell_id: str,
        records: Sequence[RequestRecord],
        counters: EngineCounters,
        timeline: Timeline,
        engine_log: Path | None,
        telemetry: Series | None = None,
    ) -> None:
        """Put a cell's files in place together: a crash leaves the cell whole or absent."""
        final = self.cell(cell_id)
        final.parent.mkdir(parents=True, exist_ok=True)
        with _folder_beside(final) as work:
            write_requests(work / REQUESTS, records)
            (work / COUNTERS).write_bytes(to_json(counters))
            (work / TIMELINE).write_bytes(to_json(timeline))
            written = [REQUESTS, COUNTERS, TIMELINE]
            if telemetry is not None:
                write_series(work / TELEMETRY, telemetry)
                written.append(TELEMETRY)
            for name in written:
                _sync(work / name)
            if engine_log is not None and engine_log.exists():
                _link(engine_log, work / ENGINE_LOG)
            if final.exists():
                shutil.rmtree(final)
            os.replace(work, final)

    def has_cell(self, cell_id: str) -> bool:
        """Whether the cell was saved and ran to its end."""
        if not (self.cell(cell_id) / TIMELINE).exists():
            return False
        return self.timeline(cell_id).interrupted is None

    def saved_cells(self, cell_ids: Sequence[str]) -> list[str]:
        """Those of `cell_ids` that have been saved, whole or interrupted."""
        return [c for c in cell_ids if (self.cell(c) / TIMELINE).exists()]

    def set_damaged_aside(self, cell_ids: Sequence[str]) -> list[str]:
        """Those of `cell_ids` whose files cannot be read; their folders are renamed, not removed.

        So they are measured anew, and what can still be saved of them is not lost.
        """
        damaged = []
        for cell_id in self.saved_cells(cell_ids):
            try:
                table = self.requests(cell_id)
                for name in NAMES:
                    table.column(name)
                self.counters(cell_id)
                self.timeline(cell_id)
            except UsageError:
                damaged.append(cell_id)
                final = self.cell(cell_id)
                aside = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{cell_id}-damaged-"))
                os.replace(final, aside)
        return damaged

    def requests(self, cell_id: str) -> RequestTable:
        """The cell's request records, by index."""
        return read_requests(self.cell(cell_id) / REQUESTS)

    def counters(self, cell_id: str) -> EngineCounters:
        """The cell's counters."""
        return read_json(self.cell(cell_id) / COUNTERS, EngineCounters)

    def telemetry(self, cell_id: str) -> Series | None:
        """The cell's telemetry; None where it was not sampled. It is no reason to lose a cell."""
        path = self.cell(cell_id) / TELEMETRY
        if not path.exists():
            return None
        try:
            return read_series(path)
        except UsageError as error:
            return Series(tracks={}, missing={"all": str(error)})

    def timeline(self, cell_id: str) -> Timeline:
        """The cell's timeline."""
        return read_json(self.cell(cell_id) / TIMELINE, Timeline)


@contextlib.contextmanager
def _folder_beside(final: Path) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}-"))
    work.chmod(0o755)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _link(source: Path, target: Path) -> None:
    # The log of a start belongs to all its cells and still grows: one file, several names.
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
