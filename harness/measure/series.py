"""Telemetry as a table: one row a value, in a Parquet file beside the requests of its cell.

Columns: `at_ns` (the clock of the requests, so that both can be laid over each other), `source`
(`gpu`, `host`, `engine`), `device` (the GPU's index; empty for the others), `name`, `value`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from harness.errors import UsageError
from harness.measure.columns import Floats, Integers
from harness.records import SCHEMA_VERSION

Source = Literal["gpu", "host", "engine"]
SOURCES: tuple[Source, ...] = ("gpu", "host", "engine")
COLUMNS = ("at_ns", "source", "device", "name", "value")


class Row(NamedTuple):
    """What one source said at one moment."""

    at_ns: int
    source: str
    device: str
    values: dict[str, float]


class Track(NamedTuple):
    """One figure over time: when (ns, ascending), and what."""

    at_ns: Integers
    values: Floats


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A cell's telemetry. `missing`: why a source, or a part of one, said nothing.

    `gpus`: each GPU's name and limits, by its index.
    """

    tracks: dict[tuple[str, str, str], Track]
    interval_s: float | None = None
    missing: dict[str, str] = {}
    gpus: dict[str, dict[str, Any]] = {}

    def track(self, source: Source, name: str, device: str = "") -> Track | None:
        """One figure; None where it was not told."""
        return self.tracks.get((source, device, name))

    def devices(self, source: Source) -> list[str]:
        """The devices that said something, the first first."""
        found = {device for kind, device, _ in self.tracks if kind == source}
        return sorted(found, key=lambda d: (len(d), d))

    def names(self, source: Source) -> list[str]:
        """The figures that a source told."""
        return sorted({name for kind, _, name in self.tracks if kind == source})


def series_of(
    rows: Iterable[Row],
    *,
    interval_s: float | None = None,
    missing: dict[str, str] | None = None,
    gpus: dict[str, dict[str, Any]] | None = None,
) -> Series:
    """The rows, by figure."""
    found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.values.items():
            found.setdefault((row.source, row.device, name), []).append((row.at_ns, value))
    return Series(
        tracks={key: _track(sorted(points)) for key, points in found.items()},
        interval_s=interval_s,
        missing=missing or {},
        gpus=gpus or {},
    )


def _track(points: list[tuple[int, float]]) -> Track:
    return Track(
        np.array([at for at, _ in points], np.int64), np.array([v for _, v in points], np.float64)
    )


def write_series(path: Path, series: Series) -> None:
    """Write it, ordered by time; what is missing and the GPUs' names stand in the metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sizes = [len(track.at_ns) for track in series.tracks.values()]
    at = _joined([track.at_ns for track in series.tracks.values()], np.int64)
    order = np.argsort(at, kind="stable")
    columns: dict[str, Any] = {"at_ns": pa.array(at[order])}
    for place, column in enumerate(("source", "device", "name")):
        words = [key[place] for key in series.tracks]
        codes = np.repeat(np.arange(len(words)), sizes)[order].astype(np.int32)
        columns[column] = pa.DictionaryArray.from_arrays(codes, pa.array(words, pa.string())).cast(
            pa.string()
        )
    values = _joined([track.values for track in series.tracks.values()], np.float64)
    columns["value"] = pa.array(values[order])
    about = {"interval_s": series.interval_s, "missing": series.missing, "gpus": series.gpus}
    metadata = {"schema_version": SCHEMA_VERSION, "telemetry": json.dumps(about)}
    table = pa.table(columns).replace_schema_metadata(metadata)
    pq.write_table(table, path, compression="zstd")


def _joined(parts: list[Any], kind: Any) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, kind)


def read_series(path: Path) -> Series:
    """Read a file of telemetry. Raises `UsageError` where it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        about = json.loads((table.schema.metadata or {})[b"telemetry"])
        at, source, device, name, value = (table.column(column) for column in COLUMNS)
        keys = [c.dictionary_encode().combine_chunks() for c in (source, device, name)]
        at_ns = at.to_numpy().astype(np.int64)
        values = value.to_numpy().astype(np.float64)
        return Series(
            tracks=_split(keys, at_ns, values),
            interval_s=about["interval_s"],
            missing=dict(about["missing"]),
            gpus=dict(about["gpus"]),
        )
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: cannot be read as telemetry of version {SCHEMA_VERSION} "
            f"({str(error)[:160]}); remove it to go without"
        ) from None


def _split(keys: list[Any], at: Integers, values: Floats) -> dict[tuple[str, str, str], Track]:
    """The rows of each figure, in the order of time."""
    if not len(at):
        return {}
    sizes = [len(key.dictionary) for key in keys]
    codes = np.ravel_multi_index([k.indices.to_numpy() for k in keys], sizes)
    order = np.lexsort((at, codes))
    codes, at, values = codes[order], at[order], values[order]
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    tracks = {}
    for begin, end in zip(starts, [*starts[1:], len(codes)], strict=True):
        places = np.unravel_index(codes[begin], sizes)
        source, device, name = (
            str(k.dictionary[int(i)].as_py()) for k, i in zip(keys, places, strict=True)
        )
        tracks[source, device, name] = Track(at[begin:end], values[begin:end])
    return tracks
