"""The index: every point below a root in one file, as columns, so that nothing is read twice.

It is a cache. Deleted, damaged or of another version, it is made anew from the runs' folders. One
file holds the points and the stamps of what they were made of, and is replaced as a whole: what is
read always belongs together, whoever else writes.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness.history.folders import Found
from harness.history.parquet import POINTS_VERSION, storable
from harness.history.reading import Kind, Stamps
from harness.history.records import Point
from harness.measure.store import write_atomic
from harness.records import SCHEMA_VERSION

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[Any, np.dtype[np.int64]]

FOLDER = ".history"
FILE = "index.bin"
MAGIC = b"spec-harness history\n"
FORMAT = f"1 {POINTS_VERSION} {SCHEMA_VERSION}"
"""What the file's content depends on; another one is not read."""
COLUMNS = (("who", "<i4"), ("what", "<i4"), ("value", "<f8"), ("low", "<f8"), ("high", "<f8"))
NO_COUNT = -1
STALE_S = 3600.0


class Who(msgspec.Struct, frozen=True, array_like=True):
    """What the points of one run and one drafter have in common."""

    run_id: str
    created: str
    profile: str | None
    drafter: str | None
    target: str | None
    git_commit: str | None
    engine_version: str | None
    source: str
    suite: str | None
    settings: str
    drafter_name: str | None
    target_name: str | None
    folder: str | None
    void: bool


class What(msgspec.Struct, frozen=True, array_like=True):
    """What a figure is of."""

    engine: str
    variant: str
    workload: str
    load: str
    metric: str
    unit: str
    better: str | None


class Known(msgspec.Struct, frozen=True, array_like=True):
    """One folder as it was read: its stamps, and why it holds no points or how many."""

    place: bytes
    kind: Kind
    stamps: Stamps
    reason: str | None
    points: int


class _Head(msgspec.Struct, array_like=True):
    format: str
    folders: list[Known]
    who: list[Who]
    what: list[What]
    rows: int


class Table:
    """Points as columns. `folders` lie one behind the other, each with its number of rows."""

    def __init__(
        self,
        folders: list[Known],
        who: list[Who],
        what: list[What],
        columns: dict[str, np.ndarray[Any, Any]],
    ) -> None:
        self.folders = folders
        self.who = who
        self.what = what
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["who"])

    def point(self, row: int) -> Point:
        """One row as a record."""
        who, what = self.who[self.columns["who"][row]], self.what[self.columns["what"][row]]
        n = int(self.columns["n"][row])
        return Point(
            **msgspec.structs.asdict(who),
            **msgspec.structs.asdict(what),
            value=_number(self.columns["value"][row]),
            ci_low=_number(self.columns["low"][row]),
            ci_high=_number(self.columns["high"][row]),
            n=None if n == NO_COUNT else n,
        )

    def keep(self, kept: Sequence[bool]) -> Table:
        """Of the folders only those marked."""
        import numpy as np

        sizes = [f.points for f in self.folders]
        rows = np.repeat(np.asarray(kept, bool), sizes)
        return Table(
            [f for f, good in zip(self.folders, kept, strict=True) if good],
            self.who,
            self.what,
            {name: column[rows] for name, column in self.columns.items()},
        )

    def compact(self) -> Table:
        """The same without identities that no point has any more."""
        import numpy as np

        changed = dict(self.columns)
        tables: dict[str, list[Any]] = {"who": self.who, "what": self.what}
        for name, entries in tables.items():
            used, places = np.unique(self.columns[name], return_inverse=True)
            changed[name] = places.astype("<i4")
            tables[name] = [entries[i] for i in used]
        return Table(self.folders, tables["who"], tables["what"], changed)


def _number(value: float) -> float | None:
    number = float(value)
    return None if number != number else number


def empty() -> Table:
    """A table of nothing."""
    return Builder().table([])


class Builder:
    """Rows put together: identities are numbered as they come."""

    def __init__(self, begun: Table | None = None) -> None:
        self._begun = begun
        self._who: dict[Who, int] = {w: i for i, w in enumerate(begun.who if begun else ())}
        self._what: dict[What, int] = {w: i for i, w in enumerate(begun.what if begun else ())}
        self._rows: list[tuple[int, int, float, float, float, int]] = []

    def add(self, points: Iterable[Point]) -> int:
        """Take a folder's points; how many they are."""
        before = len(self._rows)
        for point in points:
            told = msgspec.structs.asdict(point)
            who = Who(*(told[name] for name in Who.__struct_fields__))
            what = What(*(told[name] for name in What.__struct_fields__))
            numbers = (point.value, point.ci_low, point.ci_high)
            value, low, high = (float("nan") if v is None else v for v in numbers)
            self._rows.append(
                (
                    self._who.setdefault(who, len(self._who)),
                    self._what.setdefault(what, len(self._what)),
                    value,
                    low,
                    high,
                    NO_COUNT if point.n is None else storable(point.n),
                )
            )
        return len(self._rows) - before

    def table(self, folders: Sequence[Known]) -> Table:
        """What was begun with, and behind it what was added: `folders`, in that order."""
        import numpy as np

        columns: dict[str, np.ndarray[Any, Any]] = {}
        rows = self._rows[: sum(f.points for f in folders)]  # of a folder cut short, none
        turned = list(zip(*rows, strict=True)) or [()] * (len(COLUMNS) + 1)
        for (name, kind), values in zip((*COLUMNS, ("n", "<i8")), turned, strict=True):
            added = np.array(values, kind)
            old = self._begun.columns[name] if self._begun else np.array([], kind)
            columns[name] = np.concatenate([old, added])
        known = [*(self._begun.folders if self._begun else ()), *folders]
        return Table(known, list(self._who), list(self._what), columns)


def load(root: Path) -> Table | None:
    """The index as it lies there; None where there is none that can be used."""
    import numpy as np

    path = root / FOLDER / FILE
    try:
        if not path.is_file():  # a pipe would never end
            return None
        data = path.read_bytes()
    except OSError:
        return None
    begin = len(MAGIC) + 8
    if not data.startswith(MAGIC) or len(data) < begin:
        return None
    body = memoryview(data)[begin:]
    size = int.from_bytes(data[len(MAGIC) : begin - 4], "little")
    if zlib.crc32(body) != int.from_bytes(data[begin - 4 : begin], "little"):
        return None
    try:
        head = msgspec.msgpack.decode(body[:size], type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    wide = sum(np.dtype(kind).itemsize for _, kind in (*COLUMNS, ("n", "<i8")))
    if head.format != FORMAT or sum(f.points for f in head.folders) != head.rows:
        return None
    if len(body) != size + wide * head.rows or any(f.points < 0 for f in head.folders):
        return None
    columns, at = {}, begin + size
    for name, kind in (*COLUMNS, ("n", "<i8")):
        columns[name] = np.frombuffer(data, kind, head.rows, at)
        at += columns[name].nbytes
    for name, entries in (("who", head.who), ("what", head.what)):
        if head.rows and not 0 <= columns[name].min() <= columns[name].max() < len(entries):
            return None
    return Table(head.folders, head.who, head.what, columns)


def save(root: Path, table: Table) -> None:
    """Put the index in place, whole. Where that is not allowed, the next one reads anew."""
    told = table.compact()
    head = msgspec.msgpack.encode(
        _Head(format=FORMAT, folders=told.folders, who=told.who, what=told.what, rows=len(told))
    )
    names = [name for name, _ in (*COLUMNS, ("n", ""))]
    body = b"".join((head, *(told.columns[name].tobytes() for name in names)))
    check = zlib.crc32(body).to_bytes(4, "little")
    with contextlib.suppress(OSError):
        write_atomic(root / FOLDER / FILE, MAGIC + len(head).to_bytes(4, "little") + check + body)
        _tidy(root / FOLDER)


def _tidy(folder: Path) -> None:
    """Remove what writers that were killed left behind."""
    for path in folder.glob(f".{FILE}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                os.unlink(path)


def known_of(found: Found, reason: str | None, points: int) -> Known:
    """A folder as it was found and read."""
    return Known(found.place, found.kind, found.stamps, reason, points)
