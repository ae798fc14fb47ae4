"""Records as columns: every record comes back as it was, from memory and from a file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness_records import failed, request
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.measure.columns import Ints, Lists, Names
from harness.measure.parquet import read_requests, write_requests
from harness.measure.table import NAMES, RequestTable
from harness.records import DraftCounts, RequestRecord

NS = st.integers(0, 2**62)
SMALL = st.integers(0, 300_000)
WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
LISTS = st.lists(SMALL, max_size=5).map(tuple)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


COUNTS = st.builds(
    DraftCounts,
    drafts=SMALL,
    drafted=maybe(SMALL),
    accepted=SMALL,
    per_position=maybe(LISTS),
    past_end=maybe(SMALL),
    steps=maybe(LISTS),
)
RECORDS = st.lists(
    st.builds(
        RequestRecord,
        cell_id=WORDS,
        index=SMALL,
        prompt_id=WORDS,
        category=maybe(WORDS),
        due_ns=maybe(NS),
        sent_ns=maybe(NS),
        chunk_ns=st.lists(NS, max_size=5).map(tuple),
        chunk_tokens=maybe(LISTS),
        end_ns=maybe(NS),
        status=st.sampled_from(["ok", "failed", "cancelled"]),
        error=maybe(WORDS),
        http_status=maybe(SMALL),
        prompt_tokens=maybe(SMALL),
        output_tokens=maybe(SMALL),
        token_source=st.sampled_from(["token_ids", "usage", None]),
        token_ids=maybe(LISTS),
        text=maybe(WORDS),
        reasoning=maybe(WORDS),
        finish_reason=maybe(WORDS),
        acceptance=maybe(COUNTS),
        correct=maybe(st.booleans()),
        first_reasoning_ns=maybe(NS),
        first_answer_ns=maybe(NS),
        connect_ns=maybe(NS),
        conversation=maybe(WORDS),
        turn=SMALL,
        worker=SMALL,
        tries=SMALL,
    ),
    max_size=9,
)
PICKED = st.lists(st.integers(0, 8), max_size=12)


def picked(table: RequestTable, rows: list[int]) -> RequestTable:
    return table.take(np.array(rows, np.int64))


@given(RECORDS, PICKED, st.randoms())
def test_a_table_is_a_sequence_of_its_records(
    records: list[RequestRecord], rows: list[int], random: Any
) -> None:
    table = RequestTable.of(records)
    assert len(table) == len(records)
    assert [table[i] for i in range(len(records))] == list(table) == table.records() == records
    assert table == records
    rows = [r for r in rows if r < len(records)]
    some = [records[r] for r in rows]
    assert picked(table, rows).records() == some
    assert table[1:7:2].records() == records[1:7:2]
    mask = np.array([random.random() < 0.5 for _ in records], bool)
    kept = [r for r, wanted in zip(records, mask, strict=True) if wanted]
    assert table.where(mask).records() == kept
    assert RequestTable.join([picked(table, rows), table]).records() == [*some, *records]
    assert table.ok.records() == [r for r in records if r.status == "ok"]


@settings(deadline=None)
@given(RECORDS, RECORDS, st.integers(1, 3))
def test_records_survive_a_file(
    records: list[RequestRecord], more: list[RequestRecord], group: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.parquet"
        write_requests(path, records)
        found = read_requests(path)
        assert found.records() == records
        both = RequestTable.join([found, RequestTable.of(more)])
        assert both.records() == [*records, *more]
        write_requests(path, both.take(np.arange(len(both))[::-1]))
        assert read_requests(path).records() == [*records, *more][::-1]
        pq.write_table(pq.read_table(path), path, row_group_size=group)  # as several chunks
        assert read_requests(path).records() == [*records, *more][::-1]


@given(RECORDS)
def test_what_the_plain_way_of_writing_made_is_read_alike(records: list[RequestRecord]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.parquet"
        write_requests(path, records)
        schema = pq.read_schema(path)
        rows = [msgspec.to_builtins(r) for r in records]
        assert pq.read_table(path).to_pylist() == pa.Table.from_pylist(rows, schema).to_pylist()
        pq.write_table(pa.Table.from_pylist(rows, schema), path)
        assert read_requests(path).records() == records


LISTED = st.lists(maybe(st.lists(SMALL, max_size=4)), max_size=8)


@given(LISTED, PICKED)
def test_lists_by_their_rows(lists: list[list[int] | None], rows: list[int]) -> None:
    column = Lists.of(lists)
    for at in (slice(None), slice(None, None, -1), slice(1, None, 2)):
        some, own = column.take(np.arange(len(lists))[at]), [v or [] for v in lists[at]]
        assert some.flat().tolist() == [v for values in own for v in values]
        assert some.rows().tolist() == [i for i, values in enumerate(own) for _ in values]
        assert some.first().python() == [v[0] if v else None for v in own]
        assert some.last().python() == [v[-1] if v else None for v in own]
        assert some.later().flat().tolist() == [v for values in own for v in values[1:]]
        heads = [len(v) // 2 for v in own]
        halves = some.head(np.array(heads, np.int64)).flat().tolist()
        assert halves == [v for values, n in zip(own, heads, strict=True) for v in values[:n]]


@given(st.lists(maybe(st.sampled_from(["", "a", "b", "c"])), max_size=12))
def test_names_by_their_words(words: list[str | None]) -> None:
    column = Names.of(words)
    assert column.where("a", "c").tolist() == [w in ("a", "c") for w in words]
    assert column.mapped({"a": "c"}).python() == ["c" if w == "a" else w for w in words]
    assert column.mapped({"a": "c"}).ranked().names == tuple(
        dict.fromkeys("c" if w == "a" else w for w in words if w is not None)
    )
    last = Names.of(reversed(words))
    assert column.or_else(last).python() == [
        w or other for w, other in zip(words, reversed(words), strict=True)
    ]
    backwards = column.take(np.arange(len(words))[::-1]).ranked()
    assert backwards.python() == words[::-1]
    assert backwards.names == tuple(dict.fromkeys(w for w in words[::-1] if w is not None))


def test_a_sum_of_which_a_part_is_not_known_is_not_known() -> None:
    assert (Ints.of([1, 2]).total(), Ints.of([1, None]).total(), Ints.of([]).total()) == (
        3,
        None,
        None,
    )


def plain(path: Path, records: list[RequestRecord], **change: Any) -> pa.Table:
    write_requests(path, records)
    table = pq.read_table(path)
    for name, column in change.items():
        at = table.column_names.index(name) if name in table.column_names else None
        if at is not None:
            table = table.remove_column(at)
        if column is not None:
            table = table.append_column(name, column)
    return table


LATER = (
    "first_reasoning_ns",
    "first_answer_ns",
    "connect_ns",
    "conversation",
    "turn",
    "worker",
    "tries",
)


def test_a_file_of_an_earlier_version_has_the_defaults(tmp_path: Path) -> None:
    counts = DraftCounts(drafts=2, drafted=6, accepted=3, per_position=(2, 1))
    records = [request(acceptance=counts), failed(index=1)]
    path = tmp_path / "r.parquet"
    table = plain(path, records, **dict.fromkeys(LATER))
    old = pa.struct(
        [f for f in table.schema.field("acceptance").type if f.name not in LATER_COUNTS]
    )
    rows = [
        None if row is None else {k: v for k, v in row.items() if k not in LATER_COUNTS}
        for row in table.column("acceptance").to_pylist()
    ]
    at = table.column_names.index("acceptance")
    pq.write_table(table.set_column(at, "acceptance", pa.array(rows, old)), path)
    assert read_requests(path).records() == records


LATER_COUNTS = ("past_end", "steps")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": None}, "`status` is missing"),
        ({"more": pa.array([1])}, "unknown column `more`"),
        ({"index": pa.array([None], pa.int64())}, "`index` has a null"),
        ({"index": pa.array(["x"])}, "x"),
        ({"index": pa.array([1.5])}, "1.5"),
        ({"status": pa.array(["fine"])}, "`status` has `fine`"),
        ({"token_source": pa.array(["guess"])}, "`token_source` has `guess`"),
        ({"chunk_ns": pa.array([None], pa.list_(pa.int64()))}, "`chunk_ns` has a null"),
        ({"chunk_ns": pa.array([[1, None]])}, "null within a list"),
        ({"acceptance": pa.array([{"drafts": 1, "accepted": 1, "odd": 1}])}, "unknown field `odd`"),
        ({"acceptance": pa.array([{"drafts": 1}])}, "no `accepted`"),
        ({"acceptance": pa.array(["{}"])}, "`acceptance` holds string"),
    ],
)
def test_a_file_that_holds_no_records_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "r.parquet"
    pq.write_table(plain(path, [request()], **change), path)
    with pytest.raises(UsageError, match="cannot be read as version") as refused:
        read_requests(path)
    assert said in str(refused.value)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    write_requests(path, [request(index=i, text="x" * 50) for i in range(400)])
    whole = path.read_bytes()
    for torn in (b"", b"PAR1", whole[:-20], whole[: len(whole) // 2] + bytes(len(whole) // 2)):
        path.write_bytes(torn)
        with pytest.raises(UsageError, match="cannot be read"):
            read_requests(path)


def test_every_field_of_a_record_is_a_column() -> None:
    assert RequestRecord.__struct_fields__ == NAMES
