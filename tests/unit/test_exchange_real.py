"""Results that the real tools wrote of a small model on the reference engine, trimmed.

The speculative server's counters have vLLM's names, so that vLLM and AIPerf tell its acceptance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exchange_files import foreign, values
from llmd_benchmark_report import load_benchmark_report
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from harness.exchange.exporting import export_text, of_folders
from harness.exchange.importing import import_paths
from harness.exchange.reading import documents
from harness.exchange.records import Foreign, Given

DATA = Path(__file__).resolve().parents[1] / "data" / "exchange"
FILES = sorted(path.name for path in DATA.iterdir())


def read(name: str) -> list[Foreign]:
    """What is read of one of the files."""
    path = DATA / name
    return foreign(*documents(path.read_bytes(), path))


def raw(name: str, line: int = 0) -> Any:
    """One of its documents as it stands."""
    path = DATA / name
    return documents(path.read_bytes(), path)[line]


@pytest.mark.parametrize("name", FILES)
def test_they_are_small_and_tell_nothing_of_a_machine(name: str) -> None:
    text = (DATA / name).read_text(encoding="utf-8")
    assert len(text) < 50_000
    assert "/root" not in text and "/tmp" not in text and "127.0.0.1" not in text


@pytest.mark.parametrize("name", FILES)
def test_figures_are_of_the_size_that_they_must_be(name: str) -> None:
    for one in read(name):
        found = values(one)
        if one.engine == "pytest-benchmark":
            assert 1e-6 < (found["round_s.mean"] or 0) < 0.1
            continue
        told = {metric: value for metric, value in found.items() if value is not None}
        if "e2el_s.mean" in told:  # vLLM leaves it out unless it is asked for
            assert 0.001 < told["ttft_s.mean"] < told["e2el_s.mean"] < 60
        assert told["tpot_s.mean"] < 1 and told["ttft_s.p50"] <= told["ttft_s.p99"]
        assert told["requests_ok"] in (6, 8) and told["output_tokens"] >= 48
        rate = told["output_tokens"] / told["duration_s"]
        # GuideLLM weighs by time; AIPerf's duration ends before the time that it divides by.
        off = {"guidellm": 0.5, "aiperf": 0.03}.get(one.workload.partition("-")[0], 1e-6)
        assert told["output_tokens_per_s"] == pytest.approx(rate, rel=off)


def test_loads_and_variants() -> None:
    told = {name: [(one.load, one.variant) for one in read(name)] for name in FILES}
    assert told == {
        "aiperf-records.jsonl": [("?", "speculative")],
        "aiperf-summary.json": [("c2", "speculative")],
        "guidellm.json": [("c2", None)],
        "pytest-benchmark.json": [("all", "baseline"), ("all", "baseline")],
        "sglang-bench.jsonl": [("c2", None), ("c2", None)],
        "vllm-bench-appended.jsonl": [("q4", "speculative"), ("c1", "speculative")],
        "vllm-bench.json": [("c2", "speculative")],
    }


def test_vllms_own_counts_give_the_acceptance_that_it_tells() -> None:
    found, told = values(read("vllm-bench.json")[0]), raw("vllm-bench.json")
    drafts, accepted = told["spec_decode_num_drafts"], told["spec_decode_accepted_tokens"]
    assert found["acceptance_length"] == pytest.approx(1 + accepted / drafts)
    assert found["acceptance_rate"] == pytest.approx(accepted / told["spec_decode_draft_tokens"])
    positions = [found[f"per_position.{i}"] or 0 for i in range(3)]
    assert sum(positions) == pytest.approx(accepted / drafts)
    assert found["goodput_per_s"] == told["request_goodput"]


def test_sglangs_gaps_are_those_between_chunks_on_others_protocols() -> None:
    for line, one in enumerate(read("sglang-bench.jsonl")):
        told = raw("sglang-bench.jsonl", line)
        assert values(one)["icl_s.mean"] == pytest.approx(told["mean_itl_ms"] / 1000)


def test_aiperfs_records_sum_up_to_its_own_summary() -> None:
    (records,), (summary,) = read("aiperf-records.jsonl"), read("aiperf-summary.json")
    ours, theirs = values(records), values(summary)
    for metric in ("ttft_s", "tpot_s", "icl_s", "e2el_s", "time_to_first_answer_s"):
        for part in ("mean", "p50", "p90", "p95", "p99"):
            name = f"{metric}.{part}"
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name
    for name in ("prompt_tokens", "output_tokens", "requests_ok", "requests_failed_share"):
        assert ours[name] == theirs[name], name


def test_all_of_them_go_in_and_out(tmp_path: Path) -> None:
    outcome = import_paths([DATA], tmp_path, Given())
    left = {one.file.name for one in outcome.skipped}
    assert left == {"aiperf-records.jsonl"}, "its summary lies beside it"
    chosen = of_folders([tmp_path])
    reports = export_text(chosen, "llm-d").splitlines()
    assert len(reports) == 7
    for line in reports:
        load_benchmark_report(json.loads(line))
    text = export_text(chosen, "openmetrics").decode()
    assert len(list(text_string_to_metric_families(text))) > 20
