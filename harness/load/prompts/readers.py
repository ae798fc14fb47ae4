"""Files of prompts: JSON Lines, JSON, plain text, CSV and Parquet, or a folder of one set."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import UsageError, one_line
from harness.load.prompts.prompt import Prompt
from harness.load.prompts.rows import Reading, check_column, prompt_of

LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", ".parquet")
KINDS = (*LINES, ".json", *TABLES, ".txt")
BATCH_ROWS = 1024
BLOCK_BYTES = 16_000_000
"""Of a CSV file in memory at a time; a row must fit."""
BOM = b"\xef\xbb\xbf"

Row = tuple[str, str, Any]
"""Where a row lies (for messages), the id its prompt has if it says none, and the row."""


def read_prompts(path: Path, how: Reading) -> list[Prompt]:
    """The prompts of a file. Raises `UsageError` naming file and line."""
    prompts = [prompt_of(row, where, name, how) for where, name, row in rows_of(path, how)]
    kept = [prompt for prompt in prompts if prompt is not None]
    if not kept:
        raise UsageError(f"{path}: holds no prompt")
    return kept


def rows_of(path: Path, how: Reading) -> Iterator[Row]:
    """The rows of a file by what its name ends with; an unknown ending is read as JSON Lines."""
    ending = path.suffix.lower()
    if ending in TABLES:
        yield from _table(path, how)
    elif ending == ".json":
        yield from _json(path)
    elif ending == ".txt":
        for where, name, line in _lines(path):
            yield where, name, {"prompt": line.strip()}
    else:
        for where, name, line in _lines(path):
            yield where, name, decode_row(line.encode(), where)


def set_file(folder: Path, subset: str | None, split: str | None) -> Path:
    """The one file of prompts in a downloaded data set's folder. Raises `UsageError`."""
    files = [f for f in sorted(folder.rglob("*")) if f.suffix.lower() in KINDS and f.is_file()]
    for wanted in (subset, split):
        if wanted is not None:
            files = [f for f in files if wanted in str(f.relative_to(folder))]
    if len(files) == 1:
        return files[0]
    found = one_line(", ".join(str(f.relative_to(folder)) for f in files), 200)
    why = f"several files may be meant ({found})" if files else "no file of prompts fits"
    raise UsageError(
        f"{folder}: {why}; give the path of one, or workload.subset and workload.split"
    )


def decode_row(line: bytes | msgspec.Raw, where: str) -> Any:
    """A row's JSON. Raises `UsageError` naming `where`."""
    try:
        row = msgspec.json.decode(line)
        msgspec.msgpack.encode(row)  # what a load generating process is given
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    except OverflowError:
        raise UsageError(f"{where}: holds a whole number of more than 64 bits") from None
    return row


def _lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """Lines that are not blank, read one at a time: a file may be larger than the memory."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                where = f"{path}, line {number}"
                try:
                    line = (raw.removeprefix(BOM) if number == 1 else raw).decode("utf-8")
                except UnicodeDecodeError as error:
                    raise UsageError(
                        f"{where}: cannot be read as UTF-8 text: {error.reason} at byte "
                        f"{error.start}; save the file as UTF-8"
                    ) from None
                if line.strip():
                    yield where, f"{path.stem}-{number}", line
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None


def _json(path: Path) -> Iterator[Row]:
    """The elements of a JSON array, decoded one by one; JSON Lines under this name are read too."""
    try:
        data = path.read_bytes().removeprefix(BOM)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not data.lstrip().startswith(b"["):
        for where, name, line in _lines(path):
            yield where, name, decode_row(line.encode(), where)
        return
    try:
        rows = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    for number, row in enumerate(rows, start=1):
        where = f"{path}, element {number}"
        yield where, f"{path.stem}-{number}", decode_row(row, where)


def _table(path: Path, how: Reading) -> Iterator[Row]:
    """The rows of a table, a batch of them in memory at a time."""
    import pyarrow

    number = 0
    try:
        for batch in _batches(path, how):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", f"{path.stem}-{number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        kind = "Parquet" if path.suffix.lower() == ".parquet" else "CSV in UTF-8"
        raise UsageError(f"{path}: cannot be read as {kind}: {one_line(str(error))}") from None


def _batches(path: Path, how: Reading) -> Iterator[Any]:
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        check_column(how, file.schema_arrow.names, str(path))
        yield from file.iter_batches(batch_size=BATCH_ROWS)
        return
    from pyarrow import csv as table
    from pyarrow import string

    tab = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as head:
        names = next(csv.reader(head, delimiter=tab), [])
    if not names:
        raise UsageError(f"{path}: holds no prompt")
    check_column(how, names, str(path))
    yield from table.open_csv(
        path,
        parse_options=table.ParseOptions(delimiter=tab, newlines_in_values=True),
        read_options=table.ReadOptions(block_size=BLOCK_BYTES),
        convert_options=table.ConvertOptions(column_types=dict.fromkeys(names, string())),
    )
