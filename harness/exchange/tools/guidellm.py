"""GuideLLM's report (`--output kind=json`), of schema 2 and of those before it.

`request_latency` is in seconds, what ends with `_ms` in milliseconds. Its `inter_token_latency` is
one request's (last token - first token) / (tokens - 1): this harness's `tpot_s`. Its
`time_per_output_token` counts the wait for the first token as well: `normalized_tpot_s`. Figures
are those of successful requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.exchange.fields import (
    PARTS,
    failed_share,
    figure,
    from_epoch,
    inside,
    latency,
    listed,
    load_of,
    number,
    scaled,
    text,
    whole,
)
from harness.exchange.reading import Document
from harness.exchange.records import Foreign
from harness.history.figures import Figure

NAME = "guidellm"
SHOWN = "GuideLLM"
LATENCIES = {
    "ttft_s": ("time_to_first_token_ms", 1e-3),
    "time_to_first_answer_s": ("time_to_first_output_token_ms", 1e-3),
    "tpot_s": ("inter_token_latency_ms", 1e-3),
    "normalized_tpot_s": ("time_per_output_token_ms", 1e-3),
    "e2el_s": ("request_latency", 1.0),
    "e2el_from_due_s": ("request_scheduled_latency", 1.0),
    "send_lag_s": ("request_dispatch_delay", 1.0),
}
RATES = {
    "output_tokens_per_s": "output_tokens_per_second",
    "prompt_tokens_per_s": "prompt_tokens_per_second",
    "total_tokens_per_s": "tokens_per_second",
    "requests_per_s": "requests_per_second",
    "goodput_per_s": "request_goodput",
}
SUMS = {"prompt_tokens": "prompt_token_count", "output_tokens": "output_token_count"}
_INTERVALS = {"mean": ("mean_ci",), **{p: ("percentile_cis", p) for p in PARTS[1:]}}


def recognise(document: Document) -> bool:
    """Whether it is a report: benchmarks that each have metrics by the status of a request."""
    return inside(document, "benchmarks", 0, "metrics", "request_latency") is not None


def convert(found: Sequence[Document]) -> list[Foreign]:
    """Each benchmark of each report: one strategy, such as so many streams, is one."""
    return [
        msgspec.structs.replace(_one(report, benchmark), run=run)
        for run, (report, benchmark) in enumerate(
            (report, benchmark) for report in found for benchmark in listed(report, "benchmarks")
        )
        if isinstance(inside(benchmark, "metrics"), dict)
    ]


def _one(report: Document, benchmark: Mapping[str, Any]) -> Foreign:
    strategy = next(
        (
            s
            for place in ("config", "args", "scheduler")
            if (s := inside(benchmark, place, "strategy"))
        ),
        None,
    )
    backend = inside(benchmark, "config", "backend") or inside(report, "config", "spec", "backend")
    kind = text(inside(backend, "kind")) or text(inside(backend, "type_")) or ""
    began = from_epoch(inside(benchmark, "scheduler_metrics", "measure_start_time"))
    return Foreign(
        engine="vllm" if kind.startswith("vllm") else "openai",
        workload=_workload(report),
        load=_load(strategy),
        figures=tuple(_figures(benchmark)),
        created=began or from_epoch(benchmark.get("start_time")),
        model=text(inside(backend, "model")),
        tool_version=text(inside(report, "metadata", "guidellm_version")),
    )


def _workload(report: Document) -> str:
    """The kind of its data, and the lengths of synthetic ones; never a path."""
    data = inside(report, "config", "spec", "data", 0)
    if data is None:
        data = inside(report, "args", "data", 0)
    words = [NAME]
    if isinstance(data, dict):
        words.append(text(data.get("kind")) or "?")
        words += [f"{n}" for k in ("prompt_tokens", "output_tokens") if (n := whole(data.get(k)))]
    return "-".join(words)


def _load(strategy: Any) -> str:
    kind = text(inside(strategy, "type_")) or "?"
    if kind == "synchronous":
        return "c1"
    rate = number(inside(strategy, "rate"))
    streams = whole(inside(strategy, "streams")) or whole(inside(strategy, "max_concurrency"))
    return load_of(streams, rate, kind) or kind


def _figures(benchmark: Mapping[str, Any]) -> list[Figure]:
    metrics = benchmark["metrics"]
    figures = []
    for metric, (name, factor) in LATENCIES.items():
        figures += _latency(metric, inside(metrics, name, "successful"), factor)
    for metric, name in RATES.items():
        if (rate := inside(metrics, name, "successful")) is not None:
            known = inside(rate, "count") != 0
            figures.append(figure(metric, number(inside(rate, "mean")) if known else None))
    for metric, name in SUMS.items():
        if (counts := inside(metrics, name, "successful")) is not None:
            known = inside(counts, "count") != 0
            figures.append(figure(metric, number(inside(counts, "total_sum")) if known else None))
    totals = metrics.get("request_totals")
    for metric, status in (("requests_ok", "successful"), ("requests_failed", "errored")):
        if inside(totals, status) is not None:
            figures.append(figure(metric, number(inside(totals, status))))
    figures += failed_share(number(inside(totals, "successful")), number(inside(totals, "errored")))
    if metrics.get("slo_attainment") is not None:
        n = whole(metrics.get("slo_determined_requests"))
        figures.append(figure("goodput_share", number(metrics["slo_attainment"]), n))
    if "duration" in benchmark:
        figures.append(figure("duration_s", number(benchmark["duration"])))
    return figures


def _latency(metric: str, told: Any, factor: float) -> list[Figure]:
    if not isinstance(told, dict):
        return []
    parts = {"mean": scaled(told.get("mean"), factor)}
    for part in PARTS[1:]:
        if (value := inside(told, "percentiles", part)) is not None:
            parts[part] = scaled(value, factor)
    figures = latency(metric, parts, whole(told.get("count")))
    return [_with_interval(f, told, factor) for f in figures]


def _with_interval(one: Figure, told: Any, factor: float) -> Figure:
    interval = inside(told, *_INTERVALS[one.metric.rpartition(".")[2]])
    low = scaled(inside(interval, "lower"), factor)
    high = scaled(inside(interval, "upper"), factor)
    if one.value is None or low is None or high is None:
        return one
    return msgspec.structs.replace(one, ci_low=low, ci_high=high)
