"""Points as CSV, Parquet and JSON: all of a point's fields, and back again without a loss.

A cell without a value is one that is not known. So an optional text of no characters comes back
from CSV as not known.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.errors import UsageError, one_line, plain_words
from harness.exchange.reading import PARQUET_MAGIC, Document, is_table
from harness.history.parquet import table_of
from harness.history.records import Point
from harness.measure.store import check_version, to_json
from harness.records import Record

T = TypeVar("T")
POINTS_VERSION = "1.0"
COLUMNS = Point.__struct_fields__
NUMBERS = ("value", "ci_low", "ci_high")
REQUIRED = ("settings",)
"""Text columns in which an empty cell is an empty text."""
METADATA = b"spec_harness_points"
"""What marks a Parquet file of points."""
_TRUTH = {"true": True, "false": False}


class Points(Record, frozen=True, kw_only=True):
    """The JSON export."""

    schema_version: str
    points: tuple[Point, ...]


def to_points_json(points: Sequence[Point]) -> bytes:
    """The JSON export of points."""
    return to_json(Points(schema_version=POINTS_VERSION, points=tuple(points)))


def to_csv(points: Sequence[Point]) -> bytes:
    """RFC 4180, in UTF-8: a header, then a line for each point; numbers to their last digit."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    for point in points:
        writer.writerow([_cell(getattr(point, name)) for name in COLUMNS])
    return out.getvalue().encode()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def to_parquet(points: Sequence[Point]) -> bytes:
    """One row for each point, as a run's own `points.parquet` has them."""
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(table_of(points), out, compression="zstd")
    return out.getvalue()


def read_points(data: bytes, path: Path) -> list[Point] | None:
    """Points that one of the above wrote; None where the file is not one of theirs.

    Raises `UsageError` where it is, and cannot be read.
    """
    if data.startswith(PARQUET_MAGIC):
        return _from_parquet(data, path)
    return _from_csv(data, path) if is_table(data) else None


def is_points(document: Document) -> bool:
    """Whether a JSON document is the JSON export."""
    return set(document) == {"schema_version", "points"}


def from_document(document: Document, path: Path) -> list[Point]:
    """The points of a JSON export. Raises `UsageError` that names `path`."""
    found = _through_json(document, Points, str(path))
    check_version(path, found.schema_version)
    return list(found.points)


def _from_parquet(data: bytes, path: Path) -> list[Point]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise UsageError(
            f"{path}: cannot be read as Parquet: {one_line(str(error), 120)}"
        ) from None
    if METADATA not in (table.schema.metadata or {}):
        raise UsageError(f"{path}: a Parquet file, but not of points that `export` wrote")
    return [_point(row, path, i) for i, row in enumerate(table.to_pylist(), 1)]


def _from_csv(data: bytes, path: Path) -> list[Point]:
    try:
        text = data.decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as CSV: {one_line(str(error), 120)}") from None
    names = rows[0]
    points = []
    for i, row in enumerate(rows[1:], 1):
        if not row:
            continue
        if len(row) != len(names):
            raise UsageError(f"{path}: row {i}: {len(names)} cells are wanted, not {len(row)}")
        values = {n: _value(n, cell, path, i) for n, cell in zip(names, row, strict=True)}
        points.append(_point(values, path, i))
    return points


def _value(name: str, cell: str, path: Path, row: int) -> Any:
    if cell == "":
        return "" if name in REQUIRED else None
    try:
        if name in NUMBERS:
            return float(cell)
        if name == "n":
            return int(cell)
        return _TRUTH[cell] if name == "void" else cell
    except (ValueError, KeyError):
        raise UsageError(f"{path}: row {row}: {name}={one_line(cell, 40)}: no such value") from None


def _point(values: dict[str, Any], path: Path, row: int) -> Point:
    return _through_json(values, Point, f"{path}: row {row}")


def _through_json(values: dict[str, Any], kind: type[T], where: str) -> T:
    """A record of the values, so that what it could not be written with is refused as well.

    That is what is no number at all, as NaN, and half a character.
    """
    try:
        return msgspec.json.decode(json.dumps(values, allow_nan=False), type=kind)
    except ValueError as error:
        raise UsageError(f"{where}: {plain_words(str(error))}") from None
