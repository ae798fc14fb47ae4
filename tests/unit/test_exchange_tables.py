"""Points as CSV, Parquet and JSON, and back."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exchange_points import POINTS, point
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.exchange.reading import documents
from harness.exchange.tables import (
    COLUMNS,
    from_document,
    is_points,
    read_points,
    to_csv,
    to_parquet,
    to_points_json,
)
from harness.history.records import Point

FILE = Path("points.x")


@settings(max_examples=60)
@given(st.lists(POINTS, min_size=1, max_size=3))
def test_every_table_there_and_back(points: list[Point]) -> None:
    assert read_points(to_csv(points), FILE) == points
    assert read_points(to_parquet(points), FILE) == points
    (document,) = documents(to_points_json(points), FILE)
    assert is_points(document) and from_document(document, FILE) == points


def test_a_csv_has_a_header_and_empty_cells_for_what_is_not_known() -> None:
    rows = list(csv.reader(io.StringIO(to_csv([point(value=None, n=8)]).decode(), newline="")))
    assert tuple(rows[0]) == COLUMNS and len(rows) == 2
    told = dict(zip(rows[0], rows[1], strict=True))
    assert (told["value"], told["n"], told["void"], told["drafter"]) == ("", "8", "false", "")


def test_columns_may_come_in_another_order_and_blank_lines_do_not_count() -> None:
    rows = list(csv.reader(io.StringIO(to_csv([point()]).decode(), newline="")))
    turned = "\r\n".join(",".join(reversed(row)) for row in rows) + "\r\n\r\n"
    assert read_points(b"\xef\xbb\xbf" + turned.encode(), FILE) == [point()]


def test_parquet_has_columns_that_other_tools_can_compute_with() -> None:
    table = pq.read_table(io.BytesIO(to_parquet([point(n=8), point(value=None)])))
    assert table.column_names == list(COLUMNS)
    assert table.schema.field("value").type == pa.float64()
    assert table["value"].to_pylist() == [0.05, None]


def _csv(change: Callable[[str], str]) -> bytes:
    return change(to_csv([point(n=8)]).decode()).encode()


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (_csv(lambda t: t.replace("0.05", "fast")), "row 1: value=fast: no such value"),
        (_csv(lambda t: t.replace("0.05", "nan")), "row 1: Out of range"),
        (_csv(lambda t: t.replace("false", "perhaps")), "row 1: void=perhaps"),
        (_csv(lambda t: t.replace("speculative", "fast")), "row 1: 'variant'"),
        (_csv(lambda t: t.replace("suite", "sweet")), "there is no key 'sweet'"),
        (_csv(lambda t: t + "x,y\r\n"), "row 2: 25 cells are wanted, not 2"),
        (_csv(lambda t: t + '"x'), "cannot be read as CSV"),
        (to_parquet([point()])[:-40], "cannot be read as Parquet"),
    ],
)
def test_what_is_broken_is_told(data: bytes, wanted: str) -> None:
    with pytest.raises(UsageError, match=f"points.x: .*{wanted}"):
        read_points(data, FILE)


def test_another_parquet_file_is_none_of_ours() -> None:
    out = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), out)
    with pytest.raises(UsageError, match="not of points"):
        read_points(out.getvalue(), FILE)


def test_a_later_major_version_is_refused() -> None:
    with pytest.raises(UsageError, match=r"written with schema 2\.0"):
        from_document({"schema_version": "2.0", "points": []}, FILE)


@pytest.mark.parametrize("write", [to_csv, to_parquet])
def test_no_points_at_all_are_an_empty_table(write: Callable[[Sequence[Point]], bytes]) -> None:
    assert read_points(write([]), FILE) == []
