"""Points as llm-d's Benchmark Reports, validated by the package that publishes their schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exchange_points import POINTS, point
from history_runs import write_one
from hypothesis import given, settings
from hypothesis import strategies as st
from llmd_benchmark_report import BenchmarkReportV02, load_benchmark_report

from harness.exchange.exporting import export_text, of_folders
from harness.exchange.llmd import Known, file_name, group_of, reports
from harness.history.records import Point


def one(points: list[Point], known: Known | None = None) -> dict[str, Any]:
    """The report of points of one group, validated."""
    told = {} if known is None else {group_of(points[0]): known}
    (report,) = reports(points, told).values()
    assert isinstance(load_benchmark_report(report), BenchmarkReportV02)
    return report


def test_latencies_and_rates_with_their_units() -> None:
    report = one(
        [
            point("ttft_s.mean", 0.05), point("ttft_s.p50", 0.04), point("ttft_s.p99", 0.09),
            point("tpot_s.mean", 0.005), point("e2el_s.mean", 0.9),
            point("output_tokens_per_s", 400.0, unit="tokens/s"),
            point("requests_per_s", 4.0, unit="requests/s"),
        ]
    )  # fmt: skip
    told = report["results"]["request_performance"]["aggregate"]
    assert told["latency"]["time_to_first_token"] == {
        "units": "s", "mean": 0.05, "p50": 0.04, "p99": 0.09,
    }  # fmt: skip
    assert told["latency"]["time_per_output_token"]["units"] == "s/token"
    assert told["throughput"]["output_token_rate"] == {"units": "tokens/s", "mean": 400.0}
    assert told["throughput"]["request_rate"]["units"] == "queries/s"
    assert report["version"] == "0.2" and "requests" not in told


def test_the_workload_is_told_where_the_prompts_lengths_are_known() -> None:
    points = [
        point("requests_failed_share", 0.2, unit="fraction", n=10),
        point("ttft_s.mean", 0.05),
    ]
    assert "load" not in one(points)["scenario"]
    report = one(points, Known(prompt=30.5, output=25.0, tool_version="0.1.0"))
    load = report["scenario"]["load"]["standardized"]
    assert (load["input_seq_len"]["value"], load["concurrency"]) == (30.5, 4)
    assert (load["tool"], load["tool_version"]) == ("spec-harness", "0.1.0")
    requests = report["results"]["request_performance"]["aggregate"]["requests"]
    assert (requests["total"], requests["failures"]) == (10, 2)
    assert requests["output_length"] == {"units": "count", "mean": 25.0}


def test_lengths_of_an_import_are_its_totals_over_its_answers() -> None:
    report = one(
        [
            point("requests_ok", 8.0, unit="requests", source="import:guidellm", load="q2.5"),
            point("prompt_tokens", 80.0, unit="tokens", source="import:guidellm", load="q2.5"),
            point("ttft_s.mean", 0.05, source="import:guidellm", load="q2.5"),
        ]
    )
    load = report["scenario"]["load"]["standardized"]
    assert (load["tool"], load["rate_qps"]) == ("guidellm", 2.5)
    assert load["input_seq_len"] == {"distribution": "other", "value": 10.0}


def test_the_engine_is_a_component_with_its_models() -> None:
    (component,) = one([point("ttft_s.mean", target_name="t", drafter_name="d")])["scenario"][
        "stack"
    ]
    told = component["standardized"]
    assert (told["kind"], told["tool"], told["tool_version"]) == ("generic", "reference", "unknown")
    assert (told["model"], told["drafter"], told["variant"]) == ("t", "d", "speculative")


def test_each_engine_variant_and_load_has_its_report() -> None:
    points = [
        point("ttft_s.mean"),
        point("ttft_s.mean", variant="baseline"),
        point("ttft_s.mean", load="c8"),
        point("ttft_s.mean", 0.9, variant="ratio", unit="x"),
        point("startup_s", 30.0, load="all"),
        point("ttft_s.mean", run_id="void", void=True),
        point("acceptance_length", 2.5, unit="tokens", load="c16"),
    ]
    made = reports(points)
    assert len(made) == 3, "a ratio, a start, a void run and acceptance alone have none"
    assert len({report["run"]["uid"] for report in made.values()}) == 3
    assert len({file_name(group) for group in made}) == 3


LOADS = st.sampled_from(["c4", "q2.5", "q1e-05-gamma0.5-max8", "c4-think~2", "trace", "all"])
METRICS = st.sampled_from(
    [
        *("ttft_s.mean", "tpot_s.mean", "e2el_s.p50", "output_tokens_per_s", "requests_ok"),
        *("prompt_tokens", "requests_failed_share", "duration_s"),
    ]
)


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            lambda p, metric, load, value: Point(
                **{
                    **{name: getattr(p, name) for name in Point.__struct_fields__},
                    "run_id": "r",
                    "metric": metric,
                    "load": load,
                    "value": value,
                }
            ),
            POINTS,
            METRICS,
            LOADS,
            st.none() | st.floats(0, 1),
        ),
        max_size=6,
    )
)
def test_any_points_make_valid_reports(points: list[Point]) -> None:
    for report in reports(points).values():
        load_benchmark_report(json.loads(json.dumps(report, allow_nan=False)))


def test_a_run_of_this_harness(tmp_path: Path) -> None:
    folder = write_one(tmp_path, "20260101-000000-reference-ab12")
    chosen = of_folders([folder])
    lines = export_text(chosen, "llm-d").splitlines()
    told = [json.loads(line) for line in lines]
    for report in told:
        load_benchmark_report(report)
    assert {r["run"]["eid"] for r in told} == {folder.name}
    variants = {r["scenario"]["stack"][0]["standardized"]["variant"] for r in told}
    assert variants == {"baseline", "speculative"}
    assert all(r["scenario"]["load"]["standardized"]["tool_version"] == "0.1.0" for r in told)


@pytest.mark.parametrize("run_id", ["a/b c", "x" * 300])
def test_file_names_are_plain(run_id: str) -> None:
    name = file_name(group_of(point(run_id=run_id)))
    assert "/" not in name and len(name) < 200 and name.endswith(".json")
