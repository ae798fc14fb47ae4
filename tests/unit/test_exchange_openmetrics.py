"""Points as OpenMetrics text, read by Prometheus's own parsers."""

from __future__ import annotations

from typing import Any

import pytest
from exchange_points import POINTS, point
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as older

from harness.exchange.openmetrics import name_of, to_openmetrics
from harness.history.records import Point


def parsed(points: list[Point], *, timestamps: bool = False) -> dict[str, Any]:
    """Families by name, as the parser of OpenMetrics reads them."""
    text = to_openmetrics(points, timestamps=timestamps).decode()
    assert text.endswith("# EOF\n")
    return {family.name: family for family in openmetrics(text)}


@settings(max_examples=60)
@given(st.lists(POINTS, max_size=4), st.booleans())
def test_any_points_make_a_text_that_both_parsers_read(
    points: list[Point], timestamps: bool
) -> None:
    families = parsed(points, timestamps=timestamps)
    assert all(family.type == "gauge" for family in families.values())
    text = to_openmetrics(points, timestamps=timestamps).decode()
    if "\r" not in text:  # the older parser takes it for the end of a line
        assert {family.name for family in older(text)} >= set(families)


@pytest.mark.parametrize(
    ("metric", "unit", "name"),
    [
        ("ttft_s.p50", "s", "spec_harness_ttft_seconds"),
        ("output_tokens_per_s", "tokens/s", "spec_harness_output_tokens_per_second"),
        ("requests_per_s", "requests/s", "spec_harness_requests_per_second"),
        ("goodput_per_s", "requests/s", "spec_harness_goodput_requests_per_second"),
        ("acceptance_length", "tokens", "spec_harness_acceptance_length_tokens"),
        ("acceptance_rate", "fraction", "spec_harness_acceptance_rate_ratio"),
        ("requests_failed_share", "fraction", "spec_harness_requests_failed_ratio"),
        ("requests_failed", "requests", "spec_harness_requests_failed"),
        ("startup_s.weights", "s", "spec_harness_startup_seconds"),
        ("startup_rss_bytes", "bytes", "spec_harness_startup_rss_bytes"),
        ("gpu.power_w.mean", "W", "spec_harness_gpu_power_watts"),
        ("joules_per_output_token", "J/token", "spec_harness_joules_per_output_token"),
        ("preemptions", "preemptions", "spec_harness_preemptions"),
        ("ttft_s.mean", "x", "spec_harness_ttft_speculative_over_baseline_ratio"),
        (
            *("relative_step_cost", "baseline tokens"),
            "spec_harness_relative_step_cost_baseline_tokens",
        ),
    ],
)
def test_names_end_with_their_unit(metric: str, unit: str, name: str) -> None:
    (family, *_) = [f for f in parsed([point(metric, unit=unit)]).values() if f.name == name]
    assert family.samples[0].value == 0.05
    if family.unit:
        assert name.endswith(f"_{family.unit}")


def test_labels_tell_the_series_and_the_part() -> None:
    family = parsed([point(settings="speculative.k=5", suite=None)])["spec_harness_ttft_seconds"]
    assert family.samples[0].labels == {
        "profile": "demo", "settings": "speculative.k=5", "engine": "reference",
        "variant": "speculative", "workload": "demo", "load": "c4", "source": "run", "part": "p50",
    }  # fmt: skip
    assert name_of(point("gpu.power_w.mean", unit="W")).part == "mean"
    assert name_of(point("output_tokens_per_s", unit="tokens/s")).part is None


def test_labels_are_escaped() -> None:
    awkward = 'say "x"\n\\n'
    family = parsed([point(workload=awkward)])["spec_harness_ttft_seconds"]
    assert family.samples[0].labels["workload"] == awkward


def test_intervals_are_families_of_their_own() -> None:
    families = parsed([point(ci_low=0.04, ci_high=0.06), point("tpot_s.p50")])
    assert families["spec_harness_ci_low_ttft_seconds"].samples[0].value == 0.04
    assert families["spec_harness_ci_high_ttft_seconds"].samples[0].value == 0.06
    assert "spec_harness_ci_low_tpot_seconds" not in families


def test_only_the_newest_point_of_a_series_and_with_timestamps_all() -> None:
    points = [
        point(value=0.07, created="2026-11-03T10:00:00+00:00", run_id="new"),
        point(value=0.05),
        point(value=0.06, created="2026-11-02T10:00:00+00:00"),
    ]
    samples = parsed(points)["spec_harness_ttft_seconds"].samples
    assert [(s.value, s.timestamp) for s in samples] == [(0.07, None)]
    timed = parsed(points, timestamps=True)["spec_harness_ttft_seconds"].samples
    assert [s.value for s in timed] == [0.05, 0.06, 0.07]
    assert float(timed[0].timestamp) == 1793527200.0
    created = parsed(points)["spec_harness_run_created_seconds"].samples
    assert [(s.labels["run_id"], s.value) for s in created] == [("new", 1793700000.0)]


def test_what_is_not_known_and_what_is_void_is_left_out() -> None:
    assert to_openmetrics([point(value=None), point(void=True)]).decode().count("ttft") == 0
    assert to_openmetrics([]).decode() == "# EOF\n"
