"""A cell's request records as columns, and the latencies that the plots are drawn from.

The formulas are those of `measure.metrics`, applied to whole columns so that a run of hundreds of
thousands of requests is drawn in seconds; a test holds the two against each other.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

COLUMNS = ("status", "sent_ns", "chunk_ns", "chunk_tokens", "output_tokens", "error", "category")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Latencies of one cell's answered requests, in seconds; requests without one left out.

    `gaps_s` holds the gap before each chunk but a request's first: one verify step each, where
    the engine sends a chunk a step. `errors` counts the messages of the requests that failed.
    """

    ttft_s: Floats
    tpot_s: Floats
    e2el_s: Floats
    gaps_s: Floats
    requests: int
    ok: int
    errors: Counter[str]


def read_samples(path: Path) -> Samples:
    """Read a `requests.parquet`. Raises `ValueError` or `KeyError` where it is not one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        present = set(pq.read_schema(path).names)
        table = pq.read_table(path, columns=[name for name in COLUMNS if name in present])
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
    lacking = {"status", "sent_ns", "chunk_ns"} - present
    if lacking:
        raise KeyError(f"columns missing: {', '.join(sorted(lacking))}")
    return _samples(table)


def _samples(table: Any) -> Samples:
    import numpy as np

    rows = table.num_rows
    status = table.column("status").to_pylist()
    ok = np.fromiter((s == "ok" for s in status), dtype=bool, count=rows)
    sent = _floats(table, "sent_ns", rows)
    times, lengths = _lists(table, "chunk_ns", rows)
    first_tokens = _first_of(*_lists(table, "chunk_tokens", rows))
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)[:rows]
    has = lengths > 0
    first = np.full(rows, np.nan)
    last = np.full(rows, np.nan)
    first[has] = times[starts[has]]
    last[has] = times[(starts + lengths)[has] - 1]
    ttft = (first - sent) / 1e9
    e2el = (last - sent) / 1e9
    later = _floats(table, "output_tokens", rows) - first_tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where((later > 0) & (lengths > 1), (e2el - ttft) / later, np.nan)
    return Samples(
        ttft_s=_known(ttft[ok]),
        tpot_s=_known(tpot[ok]),
        e2el_s=_known(e2el[ok]),
        gaps_s=_gaps(times, lengths, ok),
        requests=rows,
        ok=int(ok.sum()),
        errors=_errors(table, status),
    )


def _known(values: Floats) -> Floats:
    import numpy as np

    return values[np.isfinite(values)]


def _floats(table: Any, name: str, rows: int) -> Floats:
    """A column as floats (exact up to 2**53 ns, 104 days); NaN where missing."""
    import numpy as np

    if name not in table.column_names:
        return np.full(rows, np.nan)
    values = table.column(name).to_pylist()
    return np.array([np.nan if v is None else float(v) for v in values], dtype=np.float64)


def _lists(table: Any, name: str, rows: int) -> tuple[Floats, Ints]:
    """A list column as its flat values and each row's length; 0 for a missing list.

    Lists may also be stored as JSON text.
    """
    import numpy as np
    import pyarrow as pa

    if name not in table.column_names or not rows:
        return np.empty(0), np.zeros(rows, dtype=np.int64)
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if pa.types.is_null(column.type):
        return np.empty(0), np.zeros(rows, dtype=np.int64)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        texts = column.to_pylist()
        column = pa.array([json.loads(t) if t else None for t in texts], pa.list_(pa.float64()))
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    flat = column.flatten().cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return flat, lengths.astype(np.int64)


def _first_of(values: Floats, lengths: Ints) -> Floats:
    """The first value of each row's list; NaN for an empty one."""
    import numpy as np

    first = np.full(len(lengths), np.nan)
    has = lengths > 0
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)[: len(lengths)]
    first[has] = values[starts[has]]
    return first


def _gaps(times: Floats, lengths: Ints, ok: npt.NDArray[np.bool_]) -> Floats:
    """Gaps between neighbouring chunks of the same answered request, in seconds."""
    import numpy as np

    if len(times) < 2:
        return np.empty(0)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    same = (owner[1:] == owner[:-1]) & ok[owner[1:]]
    return np.asarray(np.diff(times)[same] / 1e9)


def _errors(table: Any, status: list[str]) -> Counter[str]:
    if "error" not in table.column_names:
        texts: list[str | None] = [None] * len(status)
    else:
        texts = table.column("error").to_pylist()
    return Counter(
        text or f"{state}, no message"
        for state, text in zip(status, texts, strict=True)
        if state != "ok"
    )
