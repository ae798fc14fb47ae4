"""A cell's latencies, of which the plots are drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.measure.columns import Floats, Integers

COLUMNS = ("status", "sent_ns", "chunk_ns", "chunk_tokens", "output_tokens", "error")
MOST_BINS = 90
LEAST_IN_A_BIN = 20
"""Fewer gaps than this tell no quantile."""


@dataclass(frozen=True, kw_only=True)
class GapTrack:
    """The gaps between chunks over time: quantiles of those that ended in each stretch of it.

    Arrays of one value a stretch: `seconds` since the first request was sent (its middle), then the
    gaps' quantiles in seconds, NaN where too few tell. `n`: gaps in all.
    """

    seconds: Floats
    low_s: Floats
    median_s: Floats
    high_s: Floats
    n: int


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Latencies of one cell's answered requests, in seconds; requests without one left out.

    `gaps_s` holds the gap before each chunk but a request's first: one verify step each, where
    the engine sends a chunk a step. `errors` counts the messages of the requests that failed.
    `track`: None where it was not asked for, or there are too few gaps.
    """

    ttft_s: Floats
    tpot_s: Floats
    e2el_s: Floats
    gaps_s: Floats
    requests: int
    ok: int
    errors: Counter[str]
    track: GapTrack | None = None


def read_samples(path: Path, *, over_time: bool = False) -> Samples:
    """Read a `requests.parquet`, with its gaps over time where asked for.

    Raises `UsageError` where it is not one.
    """
    import numpy as np

    from harness.measure.metrics import e2el_s, icl_s, tpot_s, ttft_s, window_ns
    from harness.measure.parquet import read_requests

    table = read_requests(path, COLUMNS)
    ttft, tpot, e2el = (
        values[np.isfinite(values)] for values in (f(table.ok) for f in (ttft_s, tpot_s, e2el_s))
    )
    lost = table.where(~table.answered)
    said = zip(lost.names("error").python(), lost.names("status").python(), strict=True)
    gaps = icl_s(table.ok)
    return Samples(
        ttft_s=ttft,
        tpot_s=tpot,
        e2el_s=e2el,
        gaps_s=gaps,
        requests=len(table),
        ok=len(table.ok),
        errors=Counter(error or f"{status}, no message" for error, status in said),
        track=gap_track(window_ns(table.ok)[0], table.ok.lists("chunk_ns").later().flat(), gaps)
        if over_time
        else None,
    )


def gap_track(begin: int | None, at: Integers, gaps: Floats) -> GapTrack | None:
    """The 10%, 50% and 90% quantiles of the gaps in equal stretches of time, from `begin` on.

    `at`: when each gap ended, on the client's clock. A stretch with too few gaps has NaN.
    """
    import numpy as np

    bins = min(MOST_BINS, len(at) // (3 * LEAST_IN_A_BIN))
    if bins < 2 or begin is None:
        return None
    end = int(at.max())
    width = max(1.0, (end - begin) / bins)
    place = np.clip(((at - begin) / width).astype(np.int64), 0, bins - 1)
    order = np.lexsort((gaps, place))
    edges = np.searchsorted(place[order], np.arange(bins + 1))
    sizes = np.diff(edges)
    some = sizes >= LEAST_IN_A_BIN
    ordered = gaps[order]

    def quantile(q: float) -> Floats:
        found = np.full(bins, np.nan)
        rows = edges[:-1][some] + np.floor(q * (sizes[some] - 1)).astype(np.int64)
        found[some] = ordered[rows]
        return found

    low, middle, high = map(quantile, (0.1, 0.5, 0.9))
    seconds = (np.arange(bins, dtype=np.float64) + 0.5) * (width / 1e9)
    return GapTrack(seconds=seconds, low_s=low, median_s=middle, high_s=high, n=len(at))
