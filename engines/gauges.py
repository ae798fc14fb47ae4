"""What an engine says of itself at one moment: requests, KV cache, preemptions, prefix cache.

The names differ from engine to engine and never clash, so that one table reads them all; a server
that publishes none of them gives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engines.prometheus import Sample, once, parse

RUNNING, WAITING, KV_USAGE = "running", "waiting", "kv_usage"
PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS = "preemptions", "prefix_queries", "prefix_hits"
COUNTERS = (PREEMPTIONS, PREFIX_QUERIES, PREFIX_HITS)
"""Totals since the server began; the others are of the moment."""

_SERIES: tuple[tuple[str, str, Callable[[Iterable[float]], float]], ...] = (
    (RUNNING, "vllm:num_requests_running", sum),
    (WAITING, "vllm:num_requests_waiting", sum),
    # Of several data-parallel ranks the fullest cache is the one that preempts.
    (KV_USAGE, "vllm:kv_cache_usage_perc", max),
    (PREEMPTIONS, "vllm:num_preemptions_total", sum),
    (PREFIX_QUERIES, "vllm:prefix_cache_queries_total", sum),
    (PREFIX_HITS, "vllm:prefix_cache_hits_total", sum),
    (RUNNING, "sglang:num_running_reqs", sum),
    (WAITING, "sglang:num_queue_reqs", sum),
    (KV_USAGE, "sglang:token_usage", max),
    (PREEMPTIONS, "sglang:num_retracted_requests_total", sum),
    # SGLang counts both when a request has finished.
    (PREFIX_QUERIES, "sglang:prompt_tokens_total", sum),
    (PREFIX_HITS, "sglang:cached_tokens_total", sum),
)
_SUMS_OF_PARTS = {"cache_source": "total"}
"""Labels under which a page tells both the parts and, with this value, their sum."""


def read_gauges(metrics_text: str) -> dict[str, float]:
    """The gauges and counters on a page of metrics, by the names above; absent ones are left out.

    `kv_usage`: share of the KV cache in use, 1 is all. `prefix_queries` and `prefix_hits`: prompt
    tokens looked up in the prefix cache, and found there.
    """
    values: dict[str, list[float]] = {}
    for sample in once(parse(metrics_text)):
        if not _is_part(sample):
            values.setdefault(sample.name, []).append(sample.value)
    return {name: over(values[series]) for name, series, over in _SERIES if series in values}


def _is_part(sample: Sample) -> bool:
    return any(sample.labels.get(label, whole) != whole for label, whole in _SUMS_OF_PARTS.items())
