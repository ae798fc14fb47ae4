"""A cell's request records as columns, which are a sequence of records as well.

Whatever is said of many requests is computed from the columns; a record is made where one is asked
for. A list of records, a Parquet file, some rows of a table and several tables one after another
all give a table, whose columns are made when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np

from harness.measure.columns import Bools, Column, Drafts, Integers, Ints, Lists, Names, Texts
from harness.records import RequestRecord

KINDS: dict[str, str] = {
    "cell_id": "name", "index": "int", "prompt_id": "name", "category": "name", "due_ns": "int",
    "sent_ns": "int", "chunk_ns": "ints", "chunk_tokens": "ints", "end_ns": "int",
    "status": "name", "error": "name", "http_status": "int", "prompt_tokens": "int",
    "output_tokens": "int", "token_source": "name", "token_ids": "ints", "text": "text",
    "reasoning": "text", "finish_reason": "name", "acceptance": "counts", "correct": "bool",
    "first_reasoning_ns": "int", "first_answer_ns": "int", "connect_ns": "int",
    "conversation": "name", "turn": "int", "worker": "int", "tries": "int",
}  # fmt: skip
"""Every field of a record, in the order of a file's columns."""
NAMES = tuple(KINDS)
CLASSES: dict[str, Any] = {
    "int": Ints, "bool": Ints, "name": Names, "ints": Lists, "text": Texts, "counts": Drafts,
}  # fmt: skip
AT_ONCE = 4096
"""Records made at once by an iteration."""


def column_of(name: str, values: Sequence[Any]) -> Column:
    """A field's column from its plain values."""
    if KINDS[name] == "bool":
        return Ints.of(values, truth=True)
    found: Column = CLASSES[KINDS[name]].of(values)
    return found


class RequestTable(Sequence[RequestRecord]):
    """Request records by column. `table.ints("sent_ns")` is a column, `table[0]` a record."""

    def __init__(self, size: int, make: Callable[[str], Column]) -> None:
        self._size = size
        self._make = make
        self._columns: dict[str, Column] = {}

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> RequestTable:
        """The table of some records; a table is its own."""
        if isinstance(records, RequestTable):
            return records
        return cls(len(records), lambda name: column_of(name, [getattr(r, name) for r in records]))

    @classmethod
    def join(cls, tables: Sequence[RequestTable]) -> RequestTable:
        """Tables one after another."""
        if len(tables) == 1:
            return tables[0]

        def make(name: str) -> Column:
            if not tables:
                return column_of(name, ())
            found: Column = CLASSES[KINDS[name]].join([t.column(name) for t in tables])
            return found

        return cls(sum(map(len, tables)), make)

    def take(self, rows: Integers) -> RequestTable:
        """These rows, by number and in this order."""
        return RequestTable(len(rows), lambda name: self.column(name).take(rows))

    def where(self, wanted: Bools) -> RequestTable:
        """The rows that are wanted; the table itself where that is all of them."""
        return self if wanted.all() else self.take(np.flatnonzero(wanted))

    def by(self, name: str) -> RequestTable:
        """The rows in the order of a number; the table itself where they are so already."""
        values = self.ints(name).values
        if (values[1:] >= values[:-1]).all():
            return self
        return self.take(np.argsort(values, kind="stable"))

    def column(self, name: str) -> Column:
        """One field of all records; texts are not kept, as they are large and seldom asked for."""
        found = self._columns.get(name)
        if found is None:
            found = self._make(name)
            if not isinstance(found, Texts):
                self._columns[name] = found
        return found

    def ints(self, name: str) -> Ints:
        """A field that is a number, or true or false."""
        found = self.column(name)
        assert isinstance(found, Ints)
        return found

    def lists(self, name: str) -> Lists:
        """A field that is a list of numbers."""
        found = self.column(name)
        assert isinstance(found, Lists)
        return found

    def names(self, name: str) -> Names:
        """A field that is a word."""
        found = self.column(name)
        assert isinstance(found, Names)
        return found

    def texts(self, name: str) -> Texts:
        """A field that is a text."""
        found = self.column(name)
        assert isinstance(found, Texts)
        return found

    @property
    def drafts(self) -> Drafts:
        """The engine's own counts of draft tokens."""
        found = self.column("acceptance")
        assert isinstance(found, Drafts)
        return found

    @cached_property
    def answered(self) -> Bools:
        """Which requests were answered whole."""
        return self.names("status").where("ok")

    @cached_property
    def ok(self) -> RequestTable:
        """The requests answered whole."""
        return self.where(self.answered)

    @cached_property
    def dropped(self) -> Bools:
        """Which requests were due but never sent, as too many were under way."""
        cancelled = self.names("status").where("cancelled")
        return cancelled & ~self.ints("sent_ns").known & self.ints("due_ns").known

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, at: slice) -> RequestTable: ...
    def __getitem__(self, at: int | slice) -> RequestRecord | RequestTable:
        if isinstance(at, slice):
            return self.take(np.arange(*at.indices(self._size)))
        if not -self._size <= at < self._size:
            raise IndexError(at)
        return self.take(np.array([at % self._size])).records()[0]

    def __iter__(self) -> Iterator[RequestRecord]:
        texts = {name: self.column(name) for name, kind in KINDS.items() if kind == "text"}
        whole = RequestTable(self._size, lambda name: texts.get(name) or self.column(name))
        for begin in range(0, self._size, AT_ONCE):
            yield from whole[begin : begin + AT_ONCE].records()

    def records(self) -> list[RequestRecord]:
        """All records, made anew."""
        columns = [self.column(name).python() for name in NAMES]
        rows: Iterable[tuple[Any, ...]] = zip(*columns, strict=True)
        return [RequestRecord(**dict(zip(NAMES, row, strict=True))) for row in rows]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != self._size:
            return False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RequestTable of {self._size} records"
