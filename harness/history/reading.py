"""One folder's points, read so that nothing in it can bring the reader down.

Folders come from other machines, other versions and other tools, and from runs that were killed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from harness.errors import UsageError, one_line
from harness.findings import Summary
from harness.history.points import points_of, utc_text
from harness.history.records import Labels, Point
from harness.measure.migrate import read_stored
from harness.measure.store import MANIFEST, SUMMARY
from harness.records import Manifest

T = TypeVar("T")
LABELS = "labels.json"
IMPORT = "import.json"
SWEEP = "sweep.json"
MOST_BYTES = 256 * 1024 * 1024
"""No summary is larger; what is would only fill the memory."""
Kind = Literal["run", "import"]
Stamp = tuple[int, int, int, int]
"""Times of the last write and of the last change of any kind, in ns, size, inode."""
Stamps = tuple[Stamp | None, ...]
WATCHED = (SUMMARY, MANIFEST, LABELS)
"""Of a run: what its points are made of."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """Of `import.json` what the history needs; the rest is the importer's."""

    schema_version: str
    points: tuple[Point, ...]


def stamps_of(folder: bytes, names: tuple[str, ...]) -> Stamps:
    """Each file's stamp, None where there is no such file."""
    return tuple(_stamp(b"%b/%b" % (folder, name.encode())) for name in names)


def _stamp(path: bytes) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def read_bytes(path: Path) -> bytes:
    """A plain file's bytes. Raises `UsageError` with its name and the reason."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            what = "a folder" if stat.S_ISDIR(found.st_mode) else "no plain file"
            raise UsageError(f"{path.name}: {what}")
        if found.st_size > MOST_BYTES:
            raise UsageError(f"{path.name}: {found.st_size:,d} bytes are too many")
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"no {path.name}") from None
    except OSError as error:
        raise UsageError(f"{path.name}: {(error.strerror or 'unreadable').lower()}") from None


def read_run(folder: Path) -> tuple[Summary, Manifest, Labels]:
    """A run's summary and manifest in the newest form, and its labels. Raises `UsageError`."""
    if not os.path.exists(folder / SUMMARY) and os.path.exists(folder / MANIFEST):
        raise UsageError(f"no {SUMMARY}: not finished; see `python -m harness resume`")
    summary = _named(SUMMARY, read_bytes(folder / SUMMARY), Summary)
    manifest = _named(MANIFEST, read_bytes(folder / MANIFEST), Manifest)
    if summary.run_id != manifest.run_id:
        ours, theirs = one_line(summary.run_id, 60), one_line(manifest.run_id, 60)
        raise UsageError(f"files of two runs: {SUMMARY} is of {ours}, {MANIFEST} of {theirs}")
    return summary, manifest, read_labels(folder)


def _named(name: str, data: bytes, kind: type[T]) -> T:
    try:
        return read_stored(data, kind)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def read_labels(folder: Path) -> Labels:
    """What is said of a run; nothing where there is no such file. Raises `UsageError`."""
    path = folder / LABELS
    if not os.path.lexists(path):
        return Labels()
    try:
        return msgspec.json.decode(read_bytes(path), type=Labels)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{LABELS}: cannot be read: {one_line(str(error), 120)}") from None


def read_points(folder: Path, kind: Kind) -> list[Point]:
    """The points of a run's or an import's folder. Raises `UsageError` with the reason.

    Whatever else goes wrong is a reason too: a history of ten thousand runs is not lost for one.
    """
    try:
        if kind == "import":
            return _imported(folder)
        return points_of(*read_run(folder))
    except UsageError:
        raise
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(
            f"{SUMMARY}: makes no sense ({type(error).__name__}: {one_line(str(error), 80)})"
        ) from None


def _imported(folder: Path) -> list[Point]:
    try:
        told = msgspec.json.decode(read_bytes(folder / IMPORT), type=Imported)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{IMPORT}: cannot be read: {one_line(str(error), 120)}") from None
    if told.schema_version.partition(".")[0] != "1":
        raise UsageError(f"{IMPORT}: written with schema {one_line(told.schema_version, 20)}")
    return [msgspec.structs.replace(p, created=utc_text(p.created)) for p in told.points]
