"""Request records as a Parquet file: one row a request, lists as list columns.

Reading is as strict as that of any record: an unknown field, a missing one that has no default, a
null or a word that cannot be, are errors. Fields with a default may be missing, as files of an
earlier version lack them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from harness.errors import UsageError
from harness.measure.columns import (
    Column,
    Drafts,
    Ints,
    Lists,
    Names,
    Texts,
    constant,
    packed,
)
from harness.measure.table import CLASSES, KINDS, NAMES, RequestTable
from harness.records import SCHEMA_VERSION, DraftCounts, RequestRecord

if TYPE_CHECKING:
    import pyarrow as pa

COUNTS = DraftCounts.__struct_fields__
COUNT_LISTS = ("per_position", "steps")
WORDS = tuple(name for name, kind in KINDS.items() if kind == "name")
HINTS = get_type_hints(RequestRecord)
NULLABLE = {name for name, hint in HINTS.items() if type(None) in get_args(hint)}
TOKENS = ("prompt_tokens", "output_tokens", "chunk_tokens", "turn", "tries", "worker", "index")
MOST = 2**31
"""Tokens or drafts of a request: more are no count, and could not be added up."""
DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for field in msgspec.structs.fields(RequestRecord)
    if field.default is not msgspec.NODEFAULT
}


class NotRecords(UsageError):
    """A file that is no file of request records; says which, why, and what to do."""

    def __init__(self, path: Path, why: object) -> None:
        self.why = str(why)[:160]
        super().__init__(
            f"{path}: cannot be read as version {SCHEMA_VERSION} ({self.why}); "
            "`python -m harness resume` measures the cell anew; remove its folder to go without it"
        )


class Odd(ValueError):
    """What is wrong with a file's columns."""


def types() -> dict[str, Any]:
    """The Arrow type of each field."""
    import pyarrow as pa

    ints = pa.list_(pa.int64())
    counts = pa.struct([(n, ints if n in COUNT_LISTS else pa.int64()) for n in COUNTS])
    kinds = {
        "int": pa.int64(), "name": pa.string(), "text": pa.string(), "ints": ints,
        "bool": pa.bool_(), "counts": counts,
    }  # fmt: skip
    return {name: kinds[kind] for name, kind in KINDS.items()}


def write_requests(path: Path, records: Sequence[RequestRecord]) -> None:
    """Write records, one row a request; the version of their schema stands in the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = RequestTable.of(records)
    wanted = types()
    arrays = [_arrow(table.column(name)).cast(wanted[name]) for name in NAMES]
    schema = pa.schema(wanted.items(), metadata={"schema_version": SCHEMA_VERSION})
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path, compression="zstd")


def _arrow(column: Column) -> Any:
    import pyarrow as pa

    match column:
        case Ints():
            values = column.values.astype(bool) if column.truth else column.values
            return pa.array(np.ascontiguousarray(values), mask=~column.known)
        case Lists():
            offsets = np.concatenate(([0], np.cumsum(column.sizes))).astype(np.int32)
            mask = None if column.known.all() else pa.array(~column.known)
            return pa.ListArray.from_arrays(offsets, pa.array(column.packed()), mask=mask)
        case Names():
            codes = pa.array(column.codes, mask=~column.known)
            return pa.DictionaryArray.from_arrays(codes, pa.array(column.names, pa.string()))
        case Texts():
            return column.arrow
        case Drafts():
            fields = [getattr(column, name) for name in COUNTS]
            return pa.StructArray.from_arrays(
                [pa.array(f) if isinstance(f, np.ndarray) else _arrow(f) for f in fields],
                names=list(COUNTS),
                mask=pa.array(~column.told),
            )


def read_requests(path: Path, names: Sequence[str] | None = None) -> RequestTable:
    """Read some fields, or all. Raises `NotRecords`, and `UsageError` where there is no file.

    Texts are large and seldom asked for: they are read when they are, each time anew.
    """
    import pyarrow.parquet as pq

    wanted = NAMES if names is None else tuple(names)
    numbers = [name for name in wanted if KINDS[name] != "text"]
    with telling(path):
        told = pq.read_metadata(path)
        _check_fields(told.schema.to_arrow_schema().names)
    columns = _read(path, told, numbers)

    def make(name: str) -> Column:
        if name in columns or name not in wanted:
            return columns[name]
        return _read(path, told, [name])[name]

    return RequestTable(told.num_rows, make)


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """What is wrong with a file is told with its name, and what to do."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; is this the folder of a run?") from None
    except (pa.ArrowException, Odd, OSError, RecursionError) as error:
        raise NotRecords(path, error) from None


def _read(path: Path, told: Any, names: Sequence[str]) -> dict[str, Column]:
    import pyarrow.parquet as pq

    present = told.schema.to_arrow_schema().names
    words = [name for name in WORDS if name in present]
    with telling(path), pq.ParquetFile(path, metadata=told, read_dictionary=words) as file:
        table = file.read(columns=[name for name in names if name in present])
        return {name: _column(table, name, told.num_rows) for name in names}


def _check_fields(present: Sequence[str]) -> None:
    unknown = [name for name in present if name not in KINDS]
    if unknown:
        raise Odd(f"unknown column `{unknown[0]}`")
    lacking = [name for name in NAMES if name not in present and name not in DEFAULTS]
    if lacking:
        raise Odd(f"column `{lacking[0]}` is missing")
    if len(set(present)) != len(present):
        raise Odd("a column comes twice")


def _column(table: pa.Table, name: str, size: int) -> Column:
    if name not in table.column_names:
        return _default(name, size)
    column, kind = table.column(name), KINDS[name]
    if name not in NULLABLE and column.null_count:
        raise Odd(f"column `{name}` has a null")
    parts = [_part(name, kind, chunk) for chunk in column.chunks]
    if kind == "text":
        return Texts.join([p for p in parts if isinstance(p, Texts)])
    found: Column = CLASSES[kind].join(parts)
    if isinstance(found, Names):
        _check_words(name, found)
    elif isinstance(found, Drafts):
        for field in COUNTS:
            _check_counts(f"acceptance.{field}", getattr(found, field))
    elif name in TOKENS:
        _check_counts(name, found)
    return found


def _check_counts(name: str, found: Any) -> None:
    """Raise where a count is below zero or beyond any."""
    values = found if isinstance(found, np.ndarray) else found.values
    if len(values) and not (values.min() >= 0 and values.max() < MOST):
        odd = values.min() if values.min() < 0 else values.max()
        raise Odd(f"column `{name}` has {odd}; int >= 0 and < 2**31 is wanted")


def _default(name: str, size: int) -> Column:
    value = DEFAULTS[name]
    if KINDS[name] == "name":
        return Names(constant(-1, size, np.int32), ())
    return Ints(constant(value or 0, size, np.int64), constant(value is not None, size, bool))


def _check_words(name: str, found: Names) -> None:
    """Raise where a word is none of those that the field may have."""
    allowed = set(_literals(HINTS[name]))
    odd = [word for word in found.names if allowed and word not in allowed]
    if odd:
        raise Odd(f"column `{name}` has `{odd[0][:40]}`")


def _literals(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
        return
    for part in get_args(hint):
        yield from _literals(part)


def _part(name: str, kind: str, chunk: Any) -> Column:
    """One chunk of a column, as Arrow has it."""
    import pyarrow as pa

    if kind == "name":
        return _words(chunk)
    if kind == "counts":
        return _drafts(chunk)
    chunk = chunk.cast(types()[name])
    if kind == "text":
        return Texts(pa.chunked_array([chunk]))
    return _lists(name, chunk) if kind == "ints" else _ints(chunk, truth=kind == "bool")


def _ints(chunk: Any, *, truth: bool = False) -> Ints:
    import pyarrow as pa

    size = len(chunk)
    if chunk.null_count == size:
        return Ints(constant(0, size, np.int64), constant(False, size, bool), truth)
    known = constant(True, size, bool)
    if chunk.null_count:
        known = chunk.is_valid().to_numpy(zero_copy_only=False)
        chunk = chunk.fill_null(False if truth else 0)
    values = chunk.cast(pa.int64()).to_numpy()
    if size and (values == values[0]).all():  # as of turns where there is no conversation
        values = constant(values[0], size, np.int64)
    return Ints(values, known, truth)


def _lists(name: str, chunk: Any) -> Lists:
    size = len(chunk)
    if chunk.null_count == size:
        nothing = constant(0, size, np.int64)
        return Lists(np.zeros(0, np.int64), nothing, nothing, constant(False, size, bool))
    offsets = chunk.offsets.to_numpy().astype(np.int64)
    values = chunk.values[: offsets[-1]]
    if values.null_count:
        raise Odd(f"column `{name}` has a null within a list")
    sizes = np.diff(offsets)
    known = constant(True, size, bool)
    if chunk.null_count:
        known = chunk.is_valid().to_numpy(zero_copy_only=False)
        sizes[~known] = 0
    return Lists(packed(values.to_numpy()), offsets[:-1], sizes, known)


def _words(chunk: Any) -> Names:
    import pyarrow as pa

    if not pa.types.is_dictionary(chunk.type):
        chunk = chunk.cast(pa.string()).dictionary_encode()
    names = map(sys.intern, chunk.dictionary.cast(pa.string()).to_pylist())  # cells share them
    codes = chunk.indices.cast(pa.int32()).fill_null(-1).to_numpy()
    return Names(codes, tuple(names)).ranked()


def _drafts(chunk: Any) -> Drafts:
    import pyarrow as pa

    whole = types()["acceptance"]
    if pa.types.is_null(chunk.type):
        chunk = pa.nulls(len(chunk), whole)
    if not pa.types.is_struct(chunk.type):
        raise Odd(f"column `acceptance` holds {chunk.type}")
    known = [field.name for field in chunk.type]
    odd = [name for name in known if name not in COUNTS]
    if odd:
        raise Odd(f"column `acceptance` has an unknown field `{odd[0]}`")
    told = _valid(chunk)
    own = dict(zip(known, chunk.flatten(), strict=True))  # null where the whole is
    size = len(chunk)
    found: dict[str, Any] = {}
    for field in whole:
        values = own.get(field.name, pa.nulls(size)).cast(field.type)
        found[field.name] = (
            _lists("acceptance", values) if field.name in COUNT_LISTS else _ints(values)
        )
    for name in ("drafts", "accepted"):
        if (told & ~found[name].known).any():
            raise Odd(f"column `acceptance` has no `{name}` in a row")
        found[name] = found[name].values
    return Drafts(told=told, **found)


def _valid(chunk: Any) -> Any:
    if chunk.null_count in (0, len(chunk)):
        return constant(chunk.null_count == 0, len(chunk), bool)
    return chunk.is_valid().to_numpy(zero_copy_only=False)
