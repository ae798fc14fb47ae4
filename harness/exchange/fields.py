"""Values out of another tool's JSON, and figures of them; what is not there is None, never 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from harness.errors import printable
from harness.history.figures import Better, Figure, defined
from harness.history.points import load_text
from harness.measure.definitions import DEFINITIONS
from harness.records import LoadPoint

COUNTS_END = 2**63
"""What is counted is less: a table's column holds no more."""
PARTS = ("mean", "p50", "p90", "p95", "p99")

# Figures of other tools that this harness's definitions do not have: unit, and which way is better.
OTHERS: dict[str, tuple[str, Better | None]] = {
    "requests_ok": ("requests", None),
    "requests_failed": ("requests", "lower"),
    "requests_failed_share": ("fraction", "lower"),
    "prompt_tokens": ("tokens", None),
    "output_tokens": ("tokens", None),
    "duration_s": ("s", None),
    "prompt_tokens_per_s": ("tokens/s", "higher"),
    "total_tokens_per_s": ("tokens/s", "higher"),
    "normalized_tpot_s": ("s", "lower"),
    "round_s": ("s", "lower"),
    "server_accept_length": ("tokens", "higher"),
}


def number(value: Any) -> float | None:
    """A finite number; None for anything else, a boolean or a text too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """A count; None for anything else."""
    found = number(value)
    if found is None or not 0 <= found < COUNTS_END or found != int(found):
        return None
    return int(found)


def text(value: Any) -> str | None:
    """A text of one line; None of none, or of spaces. Half a character that JSON let in is a ?."""
    if not isinstance(value, str):
        return None
    return printable(value.encode("utf-8", "replace").decode()) or None


def inside(value: Any, *path: str | int) -> Any:
    """What lies at `path` in nested objects and lists; None where something on it is not there."""
    for key in path:
        if isinstance(key, int):
            known = isinstance(value, list) and 0 <= key < len(value)
            value = value[key] if known else None
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def listed(value: Any, *path: str | int) -> list[Any]:
    """The list at `path`; empty where there is none."""
    found = inside(value, *path)
    return found if isinstance(found, list) else []


def scaled(value: Any, factor: float) -> float | None:
    """A number times `factor`."""
    found = number(value)
    return None if found is None else found * factor


def figure(metric: str, value: float | None, n: int | None = None) -> Figure:
    """A figure with the unit and the direction that its metric has."""
    base = metric.partition(".")[0]
    if base in DEFINITIONS:
        return msgspec.structs.replace(defined(metric, value), n=n)
    unit, better = OTHERS[base]
    return Figure(metric=metric, value=value, unit=unit, better=better, n=n)


def latency(metric: str, parts: Mapping[str, float | None], n: int | None) -> list[Figure]:
    """Mean and percentiles of a latency in seconds; of those that are there, in order.

    Tools that had nothing to average write a mean of 0, which no latency has: all is None then.
    """
    measured = parts.get("mean") != 0 and n != 0
    return [
        figure(f"{metric}.{part}", parts[part] if measured else None, n if measured else None)
        for part in PARTS
        if part in parts
    ]


def in_milliseconds(
    document: Mapping[str, Any], latencies: Mapping[str, str], n: int | None
) -> list[Figure]:
    """Latencies as the benchmarks of vLLM and SGLang name them: `median_ttft_ms`."""
    figures = []
    for metric, name in latencies.items():
        keys = {part: f"{'median' if part == 'p50' else part}_{name}_ms" for part in PARTS}
        parts = {p: scaled(document[k], 1e-3) for p, k in keys.items() if k in document}
        figures += latency(metric, parts, n)
    return figures


def plain(document: Mapping[str, Any], names: Mapping[str, str]) -> list[Figure]:
    """Figures that are numbers at the top, in this harness's units already."""
    return [figure(m, number(document[key])) for m, key in names.items() if key in document]


def load_of(
    concurrency: int | None,
    rate: float | None,
    arrival: str | None = None,
    burstiness: float | None = None,
) -> str | None:
    """A load as the history tells its own: `q2.5` for a rate, else `c8`; None of neither."""
    most = concurrency if concurrency is not None and concurrency > 0 else None
    if rate is not None and rate > 0:
        kind: Any = arrival if arrival in ("constant", "poisson", "gamma") else None
        shape = burstiness if kind == "gamma" else None
        return load_text(
            LoadPoint(
                mode="open",
                request_rate=rate,
                arrival="poisson" if kind == "gamma" and shape is None else kind,
                burstiness=shape,
                max_concurrency=most,
            )
        )
    return None if most is None else load_text(LoadPoint(mode="closed", concurrency=most))


def failed_share(ok: float | None, failed: float | None) -> list[Figure]:
    """Of all requests, where both counts are known."""
    if ok is None or failed is None or ok + failed <= 0:
        return []
    return [figure("requests_failed_share", failed / (ok + failed), whole(ok + failed))]


def utc(when: datetime) -> str:
    """ISO text in UTC, to the second; a time without a zone is this machine's local time."""
    return when.astimezone(UTC).isoformat(timespec="seconds")


def from_epoch(seconds: Any) -> str | None:
    """Seconds since 1970 as ISO text; None where they are no such time."""
    found = number(seconds)
    if found is None or found <= 0:
        return None
    try:
        return utc(datetime.fromtimestamp(found, UTC))
    except (OverflowError, ValueError, OSError):
        return None


def from_iso(value: Any) -> str | None:
    """ISO text as ISO text in UTC; None where it is no time."""
    try:
        return utc(datetime.fromisoformat(value)) if isinstance(value, str) else None
    except (ValueError, OverflowError):
        return None


def from_format(value: Any, form: str) -> str | None:
    """A text of `strptime`'s form as ISO text in UTC; None where it is none."""
    try:
        return utc(datetime.strptime(value, form)) if isinstance(value, str) else None
    except (ValueError, OverflowError):
        return None
