"""The history: the points of every run below a results' root, found quickly."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness.errors import UsageError
from harness.history.folders import Found, find, shown
from harness.history.index import Builder, Known, Table, empty, known_of, load, save
from harness.history.parquet import POINTS, is_current, write_points
from harness.history.query import Query
from harness.history.reading import WATCHED, read_points
from harness.history.records import Point, SeriesKey

if TYPE_CHECKING:
    from harness.history.index import Ints

FEW = 16
"""So many changed folders are read again each time, before a large index is written for them."""
SMALL = 200_000
"""Points; a smaller index is written for every change."""
Told = Callable[[int, int], None]


class History:
    """The runs below `root`. `problems`: folders that could not be read, each with the reason."""

    def __init__(self, root: Path, table: Table, problems: list[tuple[Path, str]]) -> None:
        self.root = root
        self.problems = problems
        self._table = table

    def query(
        self, query: Query | None = None, /, *, most: int | None = None, **filters: Any
    ) -> list[Point]:
        """The points that every filter holds for, by time; the filters are those of `Query`.

        `most`: only of so many runs, the newest that hold an answer.
        """
        rows = self._rows(_query(query, filters))
        if most is not None:
            rows = self._newest(rows, most)
        points = [self._table.point(row) for row in rows]
        return sorted(points, key=attrgetter("created", "run_id"))

    def series(
        self, query: Query | None = None, /, *, most: int | None = None, **filters: Any
    ) -> dict[SeriesKey, list[Point]]:
        """The same without void runs, as series: each one's points by time."""
        asked = msgspec.structs.replace(_query(query, filters), void=False)
        found: dict[SeriesKey, list[Point]] = defaultdict(list)
        for point in self.query(asked, most=most):
            found[point.key].append(point)
        return dict(found)

    def runs(
        self, query: Query | None = None, /, *, most: int | None = None, **filters: Any
    ) -> dict[str, list[Point]]:
        """The same points, run by run: by folder, the runs by time."""
        found: dict[str, list[Point]] = defaultdict(list)
        for point in self.query(query, most=most, **filters):
            found[point.folder or point.run_id].append(point)
        return dict(found)

    def count(self, query: Query | None = None, /, **filters: Any) -> int:
        """How many runs hold an answer."""
        table = self._table
        rows = self._rows(_query(query, filters))
        return len({table.who[i].folder for i in _unique(table.columns["who"][rows])})

    def _newest(self, rows: Ints, most: int) -> Ints:
        """Of the rows those of the newest runs."""
        import numpy as np

        table = self._table
        column = table.columns["who"][rows]
        whose = {i: table.who[i] for i in _unique(column)}
        when = {w.folder: w.created for w in whose.values()}
        kept = set(sorted(when, key=lambda place: (when[place], place or ""))[-most:])
        good = [i for i, w in whose.items() if w.folder in kept]
        return rows[np.isin(column, good)]

    def _rows(self, query: Query) -> Ints:
        """The numbers of the rows that the filters hold for."""
        import numpy as np

        table = self._table
        who = np.fromiter((query.who(w) for w in table.who), bool, len(table.who))
        what = np.fromiter((query.what(w) for w in table.what), bool, len(table.what))
        return np.flatnonzero(who[table.columns["who"]] & what[table.columns["what"]])


def _unique(values: Ints) -> list[int]:
    """Each value once."""
    import numpy as np

    found: list[int] = np.unique(values).tolist()
    return found


def _query(query: Query | None, filters: dict[str, Any]) -> Query:
    """`query`, with what is given by name on top; one text stands for a tuple of one."""
    told = {
        name: (value,) if isinstance(value, str) and name not in ("commit", "since", "until")
        else value
        for name, value in filters.items()
    }  # fmt: skip
    return msgspec.structs.replace(query or Query(), **told)


def open_history(root: Path, told: Told | None = None) -> History:
    """Read what is below `root`; from the index what has not changed since it was written.

    `told` hears how many of how many folders have been read. Raises `UsageError` where `root` is
    no folder.
    """
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder of results; give another with --results")
    found = find(root)
    table = load(root) or empty()
    current = {f.place: f for f in found}
    kept = [_unchanged(known, current.get(known.place)) for known in table.folders]
    if not all(kept):
        table = table.keep(kept)
    have = {known.place for known in table.folders}
    new = [f for f in found if f.place not in have]
    if new:
        table = _read(root, table, new, told)
    changed = len(new) + kept.count(False)
    if changed > (0 if len(table) < SMALL else FEW):
        save(root, table)
    problems = [(root / shown(k.place), k.reason) for k in table.folders if k.reason is not None]
    table, twice = _once(table)
    return History(root, table, sorted(problems + [(root / p, why) for p, why in twice]))


def _unchanged(known: Known, found: Found | None) -> bool:
    if found is None or (found.kind, found.stamps) != (known.kind, known.stamps):
        return False
    return found.reason in (None, known.reason)


def _read(root: Path, table: Table, new: Sequence[Found], told: Told | None) -> Table:
    """`table` with the folders in `new` behind it; an interruption keeps what was read so far."""
    builder = Builder(table)
    known: list[Known] = []
    try:
        for number, found in enumerate(new, 1):
            reason, points = _points(root, found)
            if reason is None or os.path.lexists(found.path(root)):  # not gone since it was found
                known.append(known_of(found, reason, builder.add(points)))
            if told is not None:
                told(number, len(new))
    except BaseException:
        save(root, builder.table(known))
        raise
    return builder.table(known)


def _points(root: Path, found: Found) -> tuple[str | None, list[Point]]:
    """A folder's points, or the reason that there are none."""
    if found.reason is not None:
        return found.reason, []
    try:
        points = read_points(found.path(root), found.kind)
    except UsageError as error:
        return str(error), []
    if not points:
        return "no figures: no cell of it was measured", []
    if found.kind == "run":
        _keep_parquet(found.path(root), points)
    return None, [msgspec.structs.replace(p, folder=found.shown) for p in points]


def _keep_parquet(folder: Path, points: Sequence[Point]) -> None:
    """Make `points.parquet` anew where it is missing or old; a folder may be read-only."""
    with contextlib.suppress(OSError):
        if not is_current(folder / POINTS, *(folder / name for name in WATCHED)):
            write_points(folder / POINTS, points)


def _once(table: Table) -> tuple[Table, list[tuple[str, str]]]:
    """Without runs that lie there twice, as a baseline's copy does: no series may count it so.

    The run's own folder is kept, which has the shortest path; others are told.
    """
    first: dict[str, Known] = {}
    ids = _run_ids(table)
    order = sorted(range(len(ids)), key=lambda i: (table.folders[i].place.count(b"/"), i))
    kept, twice = [True] * len(ids), []
    for i in order:
        run_id, known = ids[i], table.folders[i]
        if run_id is None or known.kind != "run":
            continue
        if first.setdefault(run_id, known) is not known:
            kept[i] = False
            if not known.place.startswith(b"baselines/"):
                twice.append(
                    (shown(known.place), f"the run of {shown(first[run_id].place)} once more")
                )
    return (table if all(kept) else table.keep(kept)), twice


def _run_ids(table: Table) -> list[str | None]:
    """Each folder's run; None where it holds no points."""
    import numpy as np

    sizes = np.array([f.points for f in table.folders], int)
    begins = np.cumsum(sizes) - sizes
    column = table.columns["who"]
    return [
        table.who[column[begin]].run_id if size else None
        for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)
    ]
