"""A cell's latencies, of which the plots are drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.measure.columns import Floats

COLUMNS = ("status", "sent_ns", "chunk_ns", "chunk_tokens", "output_tokens", "error")


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
    """Read a `requests.parquet`. Raises `UsageError` where it is not one."""
    import numpy as np

    from harness.measure.metrics import e2el_s, icl_s, tpot_s, ttft_s
    from harness.measure.parquet import read_requests

    table = read_requests(path, COLUMNS)
    ttft, tpot, e2el = (
        values[np.isfinite(values)] for values in (f(table.ok) for f in (ttft_s, tpot_s, e2el_s))
    )
    lost = table.where(~table.answered)
    said = zip(lost.names("error").python(), lost.names("status").python(), strict=True)
    return Samples(
        ttft_s=ttft,
        tpot_s=tpot,
        e2el_s=e2el,
        gaps_s=icl_s(table.ok),
        requests=len(table),
        ok=len(table.ok),
        errors=Counter(error or f"{status}, no message" for error, status in said),
    )
