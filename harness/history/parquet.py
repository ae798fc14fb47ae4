"""`points.parquet`: a run's points as columns, for whatever reads Parquet.

The history itself reads `summary.json`: this file is made of it, and made anew where it is missing
or older.
"""

from __future__ import annotations

import functools
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.history.records import Point
from harness.measure.store import put_whole

if TYPE_CHECKING:
    import pyarrow as pa

POINTS = "points.parquet"
POINTS_VERSION = 1
"""Raised when `points_of` makes other points of the same summary."""
_NUMBERS = ("value", "ci_low", "ci_high")


@functools.cache
def schema() -> pa.Schema:
    """A column for each field of `Point`, in their order; texts are nullable, as numbers are."""
    import pyarrow as pa

    kinds: dict[str, Any] = {
        **dict.fromkeys(_NUMBERS, pa.float64()),
        "n": pa.int64(),
        "void": pa.bool_(),
    }
    fields = [pa.field(name, kinds.get(name, pa.string())) for name in Point.__struct_fields__]
    return pa.schema(fields, metadata={"spec_harness_points": str(POINTS_VERSION)})


def table_of(points: Sequence[Point]) -> pa.Table:
    """Points as a table."""
    import pyarrow as pa

    columns = {name: [getattr(p, name) for p in points] for name in Point.__struct_fields__}
    columns["n"] = [None if n is None else storable(n) for n in columns["n"]]
    return pa.table(columns, schema=schema())


def storable(n: int) -> int:
    """A count as 8 bytes hold it: what is beyond is a damaged file's."""
    return min(max(n, 0), 2**62)


def write_points(path: Path, points: Sequence[Point]) -> None:
    """Write the file whole or not at all. It can be made anew, so nothing waits for the disk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()  # a third of the time that a file by its name takes
    pq.write_table(table_of(points), sink, compression="snappy")
    put_whole(path, sink.getvalue().to_pybytes(), sync=False)


def is_current(path: Path, *made_of: Path) -> bool:
    """Whether the file is there, of this version, and no older than what it is made of."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        own = path.lstat()  # a pipe would never end
        written = own.st_mtime_ns
        if not stat.S_ISREG(own.st_mode) or any(
            p.exists() and p.stat().st_mtime_ns > written for p in made_of
        ):
            return False
        told = pq.read_schema(path)
    except (OSError, pa.ArrowException):
        return False
    return bool(told.equals(schema(), check_metadata=True))
