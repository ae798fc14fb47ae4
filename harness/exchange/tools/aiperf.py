"""AIPerf: its summary (`profile_export_aiperf.json`), and its records (`profile_export.jsonl`).

Every figure says its unit. `inter_token_latency` is one request's (latency - TTFT) / (tokens - 1),
this harness's `tpot_s`; `inter_chunk_latency` its `icl_s`. Of records, one line a request, the same
figures are taken again: those of requests that were answered whole, without warm-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness.exchange.fields import (
    PARTS,
    failed_share,
    figure,
    from_epoch,
    from_iso,
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

NAME = "aiperf"
SHOWN = "AIPerf's summary"
RECORDS_SHOWN = "AIPerf's records"
LATENCIES = {
    "ttft_s": "time_to_first_token",
    "time_to_first_answer_s": "time_to_first_output_token",
    "tpot_s": "inter_token_latency",
    "icl_s": "inter_chunk_latency",
    "e2el_s": "request_latency",
}
PLAIN = {
    "output_tokens_per_s": "output_token_throughput",
    "prompt_tokens_per_s": "input_token_throughput",
    "total_tokens_per_s": "total_token_throughput",
    "requests_per_s": "request_throughput",
    "goodput_per_s": "goodput",
    "goodput_share": "good_request_fraction",
    "requests_ok": "request_count",
    "requests_failed": "error_request_count",
    "prompt_tokens": "total_isl",
    "output_tokens": "total_osl",
    "duration_s": "benchmark_duration",
    # Pooled over verify steps, as this harness's own; not the mean of requests' means.
    "acceptance_length": "spec_decode_token_weighted_acceptance_length",
    "acceptance_rate": "spec_decode_overall_draft_acceptance_rate",
}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0}
_AS_THEY_ARE = ("tokens", "requests", "ratio", "count", "tokens/sec", "requests/sec")
_FACTORS = {**_SECONDS, "%": 1e-2, **dict.fromkeys(_AS_THEY_ARE, 1.0)}


def recognise(document: Document) -> bool:
    """Whether it is a summary. Its timeslices and those of several runs have other keys."""
    latencies = inside(document, "request_latency", "unit") is not None
    return latencies and ("input_config" in document or "aiperf_version" in document)


def recognise_record(document: Document) -> bool:
    """Whether it is a line of the records."""
    told = inside(document, "metadata", "request_start_ns") is not None
    return told and isinstance(document.get("metrics"), dict)


def convert(found: Sequence[Document]) -> list[Foreign]:
    """Each summary is a run."""
    return [_one(document, i) for i, document in enumerate(found)]


def _one(document: Document, run: int) -> Foreign:
    config = document.get("input_config")
    figures = []
    for metric, name in LATENCIES.items():
        figures += _latency(metric, document.get(name))
    for metric, name in PLAIN.items():
        if isinstance(told := document.get(name), dict):
            figures.append(figure(metric, _in_our_unit(told.get("avg"), told)))
    known = {f.metric: f.value for f in figures}
    # It leaves the count of failed requests out where none failed.
    figures += failed_share(known.get("requests_ok"), known.get("requests_failed", 0.0))
    return Foreign(
        engine="openai",
        workload=_workload(config),
        load=_load(config),
        figures=tuple(figures),
        created=from_iso(document.get("start_time")),
        variant="speculative" if "acceptance_length" in known else None,
        model=_model(config),
        tool_version=text(document.get("aiperf_version")),
        run=run,
    )


def _in_our_unit(value: Any, told: Any) -> float | None:
    """The value in seconds, tokens, requests, shares; None for a unit that is not known."""
    factor = _FACTORS.get(text(inside(told, "unit")) or "")
    return None if factor is None else scaled(value, factor)


def _latency(metric: str, told: Any) -> list[Figure]:
    if not isinstance(told, dict):
        return []
    keys = {"mean": "avg", **{part: part for part in PARTS[1:]}}
    parts = {p: _in_our_unit(told[k], told) for p, k in keys.items() if k in told}
    return latency(metric, parts, whole(told.get("count")))


def _model(config: Any) -> str | None:
    return text(inside(config, "models", "items", 0, "name")) or text(
        inside(config, "endpoint", "model_names", 0)
    )


def _workload(config: Any) -> str:
    data = inside(config, "datasets", 0)
    kind = text(inside(data, "type")) or text(inside(data, "format"))
    return NAME if kind is None else f"{NAME}-{kind}"


def _load(config: Any) -> str:
    """That of the last profiling phase; of an older version that of its load generator."""
    phases = [
        p
        for p in listed(config, "phases")
        if isinstance(p, dict) and "warmup" not in (p.get("kind"), p.get("name"))
    ]
    told: Any = phases[-1] if phases else inside(config, "loadgen")
    kind = text(inside(told, "type")) or text(inside(told, "request_rate_mode"))
    rate = number(inside(told, "rate")) or number(inside(told, "request_rate"))
    return load_of(whole(inside(told, "concurrency")), rate, kind) or kind or "?"


def convert_records(found: Sequence[Document]) -> list[Foreign]:
    """All lines are one run."""
    lines = [one for one in found if inside(one, "metadata", "benchmark_phase") != "warmup"]
    whole_ones = [
        one
        for one in lines
        if one.get("error") is None and not inside(one, "metadata", "was_cancelled")
    ]
    figures: list[Figure] = []
    for metric, name in LATENCIES.items():
        figures += _pooled(metric, _values(whole_ones, name))
    begin = min(_stamps(lines, "request_start_ns"), default=None)
    end = max(_stamps(whole_ones, "request_end_ns"), default=None)
    counts = {
        "prompt_tokens": _sum(_values(whole_ones, "input_sequence_length"), len(whole_ones)),
        "output_tokens": _sum(_values(whole_ones, "output_sequence_length"), len(whole_ones)),
        "requests_ok": float(len(whole_ones)),
        "requests_failed": float(len(lines) - len(whole_ones)),
    }
    figures += [figure(metric, value) for metric, value in counts.items()]
    figures += failed_share(counts["requests_ok"], counts["requests_failed"])
    figures += _acceptance(whole_ones)
    if begin is not None and end is not None and end > begin:
        seconds = (end - begin) / 1e9
        figures.append(figure("duration_s", seconds))
        figures.append(figure("requests_per_s", len(whole_ones) / seconds))
        tokens = counts["output_tokens"]
        figures.append(figure("output_tokens_per_s", None if tokens is None else tokens / seconds))
    speculated = any(f.metric == "acceptance_length" for f in figures)
    return [
        Foreign(
            engine="openai",
            workload=NAME,
            load="?",
            figures=tuple(figures),
            created=None if begin is None else from_epoch(begin / 1e9),
            variant="speculative" if speculated else None,
        )
    ]


def _stamps(lines: Iterable[Document], name: str) -> list[int]:
    stamps = (whole(inside(line, "metadata", name)) for line in lines)
    return [stamp for stamp in stamps if stamp]


def _values(lines: Iterable[Document], name: str) -> list[float]:
    """One figure of every line that has it. A list, such as of gaps, counts value by value."""
    values: list[float] = []
    for line in lines:
        told = inside(line, "metrics", name)
        value = inside(told, "value")
        each = value if isinstance(value, list) else [value]
        values += [v for one in each if (v := _in_our_unit(one, told)) is not None]
    return values


def _pooled(metric: str, values: list[float]) -> list[Figure]:
    if not values:
        return []
    import numpy as np

    ranks = {part: float(part[1:]) for part in PARTS[1:]}
    parts: dict[str, float | None] = {"mean": float(np.mean(values))}
    parts |= {part: float(np.percentile(values, rank)) for part, rank in ranks.items()}
    return latency(metric, parts, len(values))


def _sum(values: list[float], wanted: int) -> float | None:
    """None where a request does not tell its count: a sum of the others would be too small."""
    return sum(values) if values and len(values) == wanted else None


def _acceptance(lines: Sequence[Document]) -> list[Figure]:
    """Counts of all requests, pooled."""
    told = [t for one in lines if isinstance(t := one.get("spec_decode_acceptance"), dict)]
    steps = sum(whole(t.get("num_spec_steps")) or 0 for t in told)
    accepted = sum(whole(t.get("num_accepted_draft_tokens")) or 0 for t in told)
    drafted = sum(whole(t.get("num_draft_tokens")) or 0 for t in told)
    if not steps:
        return []
    rate = accepted / drafted if drafted else None
    return [
        figure("acceptance_length", 1 + accepted / steps, steps),
        figure("acceptance_rate", rate, steps),
    ]
