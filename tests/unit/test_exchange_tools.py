"""Other tools' figures in this harness's units and under its names."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from exchange_files import (
    SPECULATED,
    aiperf,
    aiperf_record,
    distribution,
    foreign,
    guidellm,
    pytest_benchmark,
    sglang,
    told,
    values,
    vllm,
)
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.exchange.reading import Document
from harness.exchange.recognise import tool_of

MADE: dict[str, Callable[[], Document]] = {
    "vllm-bench": lambda: vllm(**SPECULATED),
    "sglang-bench": sglang,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "aiperf records": lambda: aiperf_record(50.0),
    "pytest-benchmark": pytest_benchmark,
}


def test_vllm_milliseconds_and_percent_become_seconds_and_shares() -> None:
    (one,) = foreign(vllm(**SPECULATED))
    found = values(one)
    assert found["ttft_s.mean"] == pytest.approx(0.05)
    assert found["ttft_s.p50"] == pytest.approx(0.049)
    assert found["icl_s.p99"] == pytest.approx(0.02)
    assert found["acceptance_rate"] == pytest.approx(0.5)
    assert found["acceptance_length"] == 2.5
    assert (found["per_position.0"], found["per_position.1"]) == (0.8, 0.5)
    assert found["requests_failed_share"] == pytest.approx(0.2)
    assert found["output_tokens_per_s"] == 400.0
    assert "goodput_per_s" not in found and "e2el_s.mean" not in found
    assert (one.engine, one.variant, one.load, one.model) == (
        *("openai", "speculative", "c4", "org/small-target"),
    )


def test_vllm_without_draft_counters_does_not_say_its_variant() -> None:
    (one,) = foreign(vllm())
    assert one.variant is None


def test_vllm_backends_that_are_a_protocol_of_many_name_no_engine() -> None:
    assert foreign(vllm())[0].engine == "openai"
    assert foreign(vllm(backend="vllm"))[0].engine == "vllm"
    assert foreign(vllm(backend="tgi"))[0].engine == "tgi"


def test_an_average_of_nothing_is_not_zero() -> None:
    found = values(foreign(vllm(completed=0, mean_ttft_ms=0.0, median_ttft_ms=0.0))[0])
    assert found["ttft_s.mean"] is None and found["ttft_s.p50"] is None
    assert found["tpot_s.mean"] is None, "no request was answered"
    assert found["requests_ok"] == 0
    one_token = values(foreign(vllm(mean_tpot_ms=0.0, median_tpot_ms=0.0, p99_tpot_ms=0.0))[0])
    assert one_token["tpot_s.p99"] is None and one_token["ttft_s.mean"] is not None


@pytest.mark.parametrize(
    ("changes", "load"),
    [
        ({"request_rate": 2.5, "max_concurrency": None}, "q2.5"),
        ({"request_rate": 2.5}, "q2.5-max4"),
        ({"request_rate": 2.5, "burstiness": 0.5, "max_concurrency": None}, "q2.5-gamma0.5"),
        ({"max_concurrency": None}, "burst8"),
        ({"request_rate": float("inf")}, "c4"),
    ],
)
def test_vllm_loads_are_named_as_the_harness_names_its_own(
    changes: dict[str, Any], load: str
) -> None:
    assert foreign(vllm(**changes))[0].load == load


def test_vllm_goodput_of_older_versions() -> None:
    older = {k: v for k, v in vllm().items() if k != "request_goodput"}
    assert values(foreign({**older, "request_goodput:": 3.0})[0])["goodput_per_s"] == 3.0


def test_vllm_results_behind_each_other_are_runs_of_their_own() -> None:
    found = foreign(vllm(label="night"), vllm(max_concurrency=8))
    assert [(one.run, one.load, one.workload) for one in found] == [
        (0, "c4", "vllm-bench night"),
        (1, "c8", "vllm-bench"),
    ]


def test_sglang_tells_its_server() -> None:
    (one,) = foreign(sglang())
    assert (one.engine, one.engine_version, one.variant) == ("sglang", "0.5.23", "speculative")
    assert (one.model, one.drafter) == ("/models/small-target/", "/m/drafter")
    assert (one.workload, one.load, one.created) == ("sglang-bench random-32-64", "q4", None)
    found = values(one)
    assert found["e2el_s.mean"] == pytest.approx(0.9)
    assert found["ttft_s.p95"] == pytest.approx(0.085)
    assert found["server_accept_length"] == 2.4 and "acceptance_length" not in found


def test_sglang_gaps_shared_out_over_tokens_are_no_gaps_between_chunks() -> None:
    assert "icl_s.mean" not in values(foreign(sglang())[0])
    plain = values(foreign(sglang(backend="vllm", accept_length=None, server_info=None))[0])
    assert plain["icl_s.mean"] == pytest.approx(0.006)
    divided = values(foreign(sglang(backend="sglang-oai-chat"))[0])
    assert "icl_s.mean" not in divided


def test_sglang_variant_is_the_servers_setting_before_its_figures() -> None:
    info = {**sglang()["server_info"], "speculative_algorithm": None}
    assert foreign(sglang(server_info=info, accept_length=1.0))[0].variant == "baseline"
    assert foreign(sglang(server_info=None, accept_length=2.0))[0].variant == "speculative"
    assert foreign(sglang(server_info=None, accept_length=None))[0].variant is None


def test_guidellm_names_of_its_own_are_told_apart() -> None:
    (one,) = foreign(guidellm())
    found = values(one)
    assert found["tpot_s.mean"] == pytest.approx(0.005), "its inter_token_latency"
    assert found["normalized_tpot_s.mean"] == pytest.approx(0.009), "with the first token"
    assert found["e2el_s.p90"] == pytest.approx(1.35), "in seconds already"
    assert found["output_tokens"] == pytest.approx(800)
    assert found["requests_failed_share"] == pytest.approx(0.2)
    assert (one.engine, one.load, one.tool_version) == ("openai", "c4", "0.8.1")
    assert (one.workload, one.created) == (
        *("guidellm-synthetic_text-10-100", "2026-11-02T10:00:00+00:00"),
    )
    ttft = next(f for f in one.figures if f.metric == "ttft_s.mean")
    assert (ttft.ci_low, ttft.ci_high) == (pytest.approx(0.045), pytest.approx(0.055))
    assert ttft.n == 8


@pytest.mark.parametrize(
    ("strategy", "load"),
    [
        ({"type_": "synchronous"}, "c1"),
        ({"type_": "throughput", "max_concurrency": 64}, "c64"),
        ({"type_": "throughput", "max_concurrency": None}, "throughput"),
        ({"type_": "constant", "rate": 2.5}, "q2.5-constant"),
        ({"type_": "poisson", "rate": 2.5}, "q2.5"),
    ],
)
def test_guidellm_strategies(strategy: dict[str, Any], load: str) -> None:
    assert foreign(guidellm(strategy))[0].load == load


def test_guidellm_distribution_of_nothing() -> None:
    empty = guidellm()
    metrics = empty["benchmarks"][0]["metrics"]
    for name in ("time_to_first_token_ms", "output_tokens_per_second", "output_token_count"):
        metrics[name] = distribution(0.0, count=0)
    found = values(foreign(empty)[0])
    assert found["ttft_s.mean"] is None and found["output_tokens_per_s"] is None
    assert found["output_tokens"] is None


def test_guidellm_benchmarks_of_a_sweep_are_all_read() -> None:
    report = guidellm()
    report["benchmarks"] += guidellm({"type_": "constant", "rate": 2.0})["benchmarks"]
    assert [(one.run, one.load) for one in foreign(report)] == [(0, "c4"), (1, "q2-constant")]


def test_aiperf_units_are_read_not_guessed() -> None:
    (one,) = foreign(aiperf(request_latency=told("sec", 0.9, count=8)))
    found = values(one)
    assert found["ttft_s.p95"] == pytest.approx(0.065)
    assert found["e2el_s.mean"] == pytest.approx(0.9)
    assert found["tpot_s.mean"] == pytest.approx(0.005)
    assert found["icl_s.mean"] == pytest.approx(0.0125)
    assert found["duration_s"] == 2.0 and found["requests_failed_share"] == pytest.approx(0.2)
    assert (one.load, one.model, one.tool_version) == ("c4", "small-target", "0.13.0")
    assert values(foreign(aiperf(goodput=told("furlongs", 3.0)))[0])["goodput_per_s"] is None


def test_aiperf_acceptance_is_the_pooled_one() -> None:
    (one,) = foreign(
        aiperf(
            spec_decode_acceptance_length=told("ratio", 9.0),
            spec_decode_token_weighted_acceptance_length=told("ratio", 2.5),
            spec_decode_overall_draft_acceptance_rate=told("%", 50.0),
        )
    )
    found = values(one)
    assert (found["acceptance_length"], found["acceptance_rate"]) == (2.5, 0.5)
    assert one.variant == "speculative"


def test_aiperf_loads_of_older_versions() -> None:
    older = {"endpoint": {"model_names": ["m"]}, "loadgen": {"request_rate": 3.0}}
    (one,) = foreign(aiperf(input_config=older))
    assert (one.load, one.model) == ("q3", "m")


def test_aiperf_records_are_summed_up() -> None:
    spec = {"num_spec_steps": 40, "num_accepted_draft_tokens": 60, "num_draft_tokens": 120}
    metadata = aiperf_record(0.0)["metadata"]
    (one,) = foreign(
        aiperf_record(40.0, spec_decode_acceptance=spec),
        aiperf_record(60.0, spec_decode_acceptance=spec),
        aiperf_record(999.0, error={"type": "x"}),
        aiperf_record(999.0, metadata={**metadata, "benchmark_phase": "warmup"}),
        aiperf_record(999.0, metadata={**metadata, "was_cancelled": True}),
    )
    found = values(one)
    assert found["ttft_s.mean"] == pytest.approx(0.05)
    assert found["icl_s.mean"] == pytest.approx(0.015)
    assert (found["requests_ok"], found["requests_failed"]) == (2, 2)
    assert found["output_tokens_per_s"] == pytest.approx(200)
    assert (found["acceptance_length"], found["acceptance_rate"]) == (2.5, 0.5)
    assert one.created == "2026-11-02T10:00:00+00:00" and one.variant == "speculative"


def test_aiperf_tokens_of_some_requests_are_no_total() -> None:
    silent = aiperf_record(60.0)
    del silent["metrics"]["output_sequence_length"]
    found = values(foreign(aiperf_record(40.0), silent)[0])
    assert found["output_tokens"] is None and found["output_tokens_per_s"] is None
    assert found["prompt_tokens"] == 20


def test_pytest_benchmarks_of_a_session_are_one_run() -> None:
    found = foreign(pytest_benchmark())
    assert [(one.run, one.workload) for one in found] == [
        (0, "tests/bench_a.py::test_a"),
        (0, "tests/bench_a.py::test_b"),
    ]
    assert values(found[0]) == {"round_s.mean": 0.002, "round_s.p50": 0.0019}
    assert (found[0].git_commit, found[0].load) == ("0123abcd", "all")
    assert found[0].figures[0].better == "lower" and found[0].figures[0].n == 50
    unversioned = foreign(pytest_benchmark(commit_info={"id": "unversioned"}))
    assert unversioned[0].git_commit is None


def test_every_tool_is_recognised_and_no_other() -> None:
    for name, make in MADE.items():
        assert tool_of([make()], Path("x")).name == name.partition(" ")[0]


def test_a_foreign_file_is_told_with_what_was_seen_and_what_is_known() -> None:
    with pytest.raises(UsageError) as caught:
        tool_of([{"alpha": 1, "beta": 2}], Path("some.json"))
    text = str(caught.value)
    assert "some.json" in text and "alpha, beta" in text and "GuideLLM" in text
    with pytest.raises(UsageError, match="result 2 of 2: GuideLLM behind vLLM bench serve"):
        tool_of([vllm(), guidellm()], Path("some.json"))
    with pytest.raises(UsageError, match="result 2 of 2: no known result; it has no keys"):
        tool_of([vllm(), {}], Path("some.json"))


JUNK = st.sampled_from(
    [None, True, "", "x\n", "\ud800", [], {}, [[]], -1, 10**400, float("nan"), {"a": [1]}]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something lies in nested objects and lists."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [path, *(p for key, inner in items for p in places(inner, (*path, key)))]


@given(st.data())
def test_junk_anywhere_in_a_result_ends_in_figures_or_in_one_line(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(MADE)))
    document = copy.deepcopy(MADE[name]())
    for path in data.draw(st.lists(st.sampled_from(places(document)[1:]), min_size=1, max_size=3)):
        inner: Any = document
        try:
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = data.draw(JUNK)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier piece of junk lies there
    try:
        found = foreign(document)
    except UsageError as error:
        assert "\n" not in str(error)
        return
    for one in found:
        for figure in one.figures:
            assert figure.value is None or abs(figure.value) < float("inf")
            json.dumps(figure.value, allow_nan=False)
        told = msgspec.json.encode(one)  # whatever it says can be kept
        assert b"\\n" not in told
