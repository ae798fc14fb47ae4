"""Results as other tools write them, small and round, for tests of the import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.exchange.reading import Document
from harness.exchange.recognise import tool_of
from harness.exchange.records import Foreign


def vllm(**changes: Any) -> Document:
    """`vllm bench serve`: 8 requests, 4 at once."""
    return {
        "date": "20261101-101112", "endpoint_type": "openai-chat", "backend": "openai-chat",
        "label": None, "model_id": "org/small-target", "tokenizer_id": "org/small-target",
        "num_prompts": 8, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 4,
        "duration": 2.0, "completed": 8, "failed": 2, "total_input_tokens": 80,
        "total_output_tokens": 800, "request_throughput": 4.0, "request_goodput": None,
        "output_throughput": 400.0, "total_token_throughput": 440.0,
        "mean_ttft_ms": 50.0, "median_ttft_ms": 49.0, "std_ttft_ms": 1.0, "p99_ttft_ms": 77.0,
        "mean_tpot_ms": 5.0, "median_tpot_ms": 4.0, "std_tpot_ms": 1.0, "p99_tpot_ms": 9.0,
        "mean_itl_ms": 12.5, "median_itl_ms": 12.0, "std_itl_ms": 1.0, "p99_itl_ms": 20.0,
        **changes,
    }  # fmt: skip


SPECULATED = {
    "spec_decode_acceptance_rate": 50.0, "spec_decode_acceptance_length": 2.5,
    "spec_decode_num_drafts": 320, "spec_decode_draft_tokens": 960,
    "spec_decode_accepted_tokens": 480, "spec_decode_per_position_acceptance_rates": [0.8, 0.5],
}  # fmt: skip


def sglang(**changes: Any) -> Document:
    """SGLang's `bench_serving` on its own protocol, random prompts."""
    latencies = {
        f"{part}_{name}_ms": value * scale
        for name, value in (("e2e_latency", 900.0), ("ttft", 50.0), ("tpot", 5.0), ("itl", 6.0))
        for part, scale in (
            ("mean", 1.0), ("median", 0.9), ("std", 0.1), ("p90", 1.5), ("p95", 1.7), ("p99", 2.0),
        )
    }  # fmt: skip
    return {
        "tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": 4.0,
        "max_concurrency": None, "sharegpt_output_len": None, "random_input_len": 32,
        "random_output_len": 64, "random_range_ratio": 0.0,
        "server_info": {
            "version": "0.5.23", "model_path": "/models/small-target/",
            "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/m/drafter",
        },
        "duration": 2.0, "completed": 8, "total_input_tokens": 256, "total_output_tokens": 512,
        "total_output_tokens_retokenized": 512, "request_throughput": 4.0,
        "input_throughput": 128.0, "output_throughput": 256.0, "total_throughput": 384.0,
        **latencies, "concurrency": 3.5, "accept_length": 2.4, **changes,
    }  # fmt: skip


def distribution(mean: float, *, count: int = 8, interval: bool = False) -> dict[str, Any]:
    """GuideLLM's, of requests with one status."""
    percentiles = {"p50": mean, "p90": 1.5 * mean, "p95": 1.7 * mean, "p99": 2 * mean}
    found: dict[str, Any] = {
        "mean": mean, "median": mean, "count": count, "total_sum": mean * count,
        "percentiles": percentiles,
    }  # fmt: skip
    if interval:
        found["mean_ci"] = {"lower": 0.9 * mean, "upper": 1.1 * mean}
    return {"successful": found, "errored": {"mean": 0.0, "count": 0, "percentiles": {}}}


def guidellm(strategy: dict[str, Any] | None = None, **changes: Any) -> Document:
    """GuideLLM's report of one benchmark."""
    benchmark = {
        "type_": "generative_benchmark",
        "config": {"strategy": strategy or {"type_": "concurrent", "streams": 4}},
        "scheduler_metrics": {"measure_start_time": 1793613600.0},
        "metrics": {
            "request_totals": {"successful": 8, "errored": 2, "incomplete": 0, "total": 10},
            "requests_per_second": distribution(4.0),
            "request_latency": distribution(0.9),
            "prompt_token_count": distribution(10.0),
            "output_token_count": distribution(100.0),
            "time_to_first_token_ms": distribution(50.0, interval=True),
            "time_per_output_token_ms": distribution(9.0),
            "inter_token_latency_ms": distribution(5.0),
            "output_tokens_per_second": distribution(400.0),
            "tokens_per_second": distribution(440.0),
            "slo_attainment": None,
        },
        "duration": 2.0,
        **changes,
    }
    return {
        "metadata": {"version": 2, "guidellm_version": "0.8.1"},
        "config": {
            "spec": {
                "backend": {"kind": "openai_http", "model": "org/small-target"},
                "data": [{"kind": "synthetic_text", "prompt_tokens": 10, "output_tokens": 100}],
            }
        },
        "benchmarks": [benchmark],
    }


def told(unit: str, avg: float, **more: float) -> dict[str, Any]:
    """One figure of AIPerf's summary."""
    return {"unit": unit, "avg": avg, **more}


def aiperf(**changes: Any) -> Document:
    """AIPerf's summary."""
    return {
        "schema_version": "1.4", "aiperf_version": "0.13.0",
        "input_config": {
            "models": {"items": [{"name": "small-target"}]},
            "phases": [
                {"name": "warmup", "kind": "warmup", "type": "concurrency", "concurrency": 1},
                {"name": "profiling", "type": "concurrency", "concurrency": 4, "requests": 8},
            ],
        },
        "start_time": "2026-11-01T10:00:00+00:00",
        "time_to_first_token": told("ms", 50.0, p50=49.0, p90=60.0, p95=65.0, p99=77.0, count=8),
        "inter_token_latency": told("ms", 5.0, p50=4.0, p99=9.0, count=8),
        "inter_chunk_latency": told("ms", 12.5, p50=12.0, p99=20.0, count=300),
        "request_latency": told("ms", 900.0, p50=800.0, p99=1000.0, count=8),
        "request_throughput": told("requests/sec", 4.0),
        "output_token_throughput": told("tokens/sec", 400.0),
        "request_count": told("requests", 8.0), "error_request_count": told("requests", 2.0),
        "total_isl": told("tokens", 80.0), "total_osl": told("tokens", 800.0),
        "benchmark_duration": told("sec", 2.0),
        **changes,
    }  # fmt: skip


def aiperf_record(ttft_ms: float, **changes: Any) -> Document:
    """A line of AIPerf's records: 100 tokens in a second."""
    return {
        "metadata": {
            "session_num": 0, "request_start_ns": 1793613600_000_000_000,
            "request_end_ns": 1793613601_000_000_000, "benchmark_phase": "profiling",
        },
        "metrics": {
            "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
            "inter_chunk_latency": {"value": [10.0, 20.0], "unit": "ms"},
            "output_sequence_length": {"value": 100, "unit": "tokens"},
            "input_sequence_length": {"value": 10, "unit": "tokens"},
        },
        **changes,
    }  # fmt: skip


def pytest_benchmark(**changes: Any) -> Document:
    """Two benchmarks of one session."""
    stats = {"mean": 0.002, "median": 0.0019, "rounds": 50, "stddev": 0.0001}
    return {
        "machine_info": {"node": "x"},
        "commit_info": {"id": "0123abcd", "dirty": False},
        "benchmarks": [
            {"name": "test_a", "fullname": "tests/bench_a.py::test_a", "stats": stats},
            {"name": "test_b", "fullname": "tests/bench_a.py::test_b", "stats": stats},
        ],
        "datetime": "2026-11-01T10:00:00+00:00",
        "version": "5.3.1",
        **changes,
    }


def foreign(*found: Document) -> list[Foreign]:
    """What the import reads of documents."""
    return tool_of(found, Path("result.json")).convert(found)


def values(one: Foreign) -> dict[str, float | None]:
    """Its figures' values by metric."""
    return {figure.metric: figure.value for figure in one.figures}


def write(path: Path, *found: Document) -> Path:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(one)}\n" for one in found), encoding="utf-8")
    return path
