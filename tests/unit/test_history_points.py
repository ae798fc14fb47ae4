"""A run's summary as points: which figures, whose, and with what intervals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness_records import cell as cell_data
from harness_records import run_of, scaled
from history_runs import plan, told
from hypothesis import given
from hypothesis import strategies as st
from report_run import C1, C4, acceptance, cell, comparison, manifest, metrics

from harness.errors import UsageError
from harness.findings import Gauge, GpuFigures, Summary, Telemetry
from harness.history.figures import Figure, over_starts
from harness.history.metrics import can_be
from harness.history.parquet import is_current, write_points
from harness.history.points import load_text, points_of, settings_of, utc_text
from harness.history.records import NO_LOAD, Labels, Point
from harness.measure.store import RunFolder
from harness.records import VARIANTS, LoadPoint
from harness.stored import conclude

Key = tuple[str, str, str]


def points(summary: Summary, **changes: Any) -> dict[Key, Point]:
    fields = {"plan": plan(), **changes}
    found = points_of(summary, manifest(summary, **fields))
    by_key: dict[Key, Point] = {(p.variant, p.load, p.metric): p for p in found}
    assert len(by_key) == len(found)
    assert {p.metric for p in found if not can_be(p.metric)} <= {"newer_s"}  # of another version
    return by_key


def test_an_estimate_of_the_summary_is_taken_before_what_cells_say() -> None:
    found = points(told("r"))
    speed = found["baseline", "c1", "output_tokens_per_s"]
    assert (speed.value, speed.ci_low, speed.n) == (50.5, 50.5 / 1.05, 2)
    assert (speed.unit, speed.better) == ("tokens/s", "higher")
    length = found["speculative", "c1", "acceptance_length"]
    assert (length.value, length.ci_high) == (2.64, 2.64 * 1.05)
    ratio = found["ratio", "c1", "tpot_s.mean"]
    assert (ratio.value, ratio.ci_low, ratio.ci_high, ratio.n) == (0.80, 0.74, 0.86, 2)
    assert (ratio.unit, ratio.better) == ("x", "lower")


def test_without_estimates_starts_are_the_units() -> None:
    cells = [
        cell("baseline", repeat, block=block, figures=metrics(speed))
        for repeat, block, speed in ((0, 0, 40.0), (0, 1, 90.0), (1, 0, 50.0), (1, 1, 72.0))
    ]
    found = points(told("r", cells=tuple(cells)).__class__(**fields_of(cells)))
    speed = found["baseline", "c1", "output_tokens_per_s"]
    assert speed.value == pytest.approx(60.0)  # both starts' geometric means are 60
    assert (speed.ci_low, speed.ci_high) == (pytest.approx(60.0), pytest.approx(60.0))
    assert speed.n == 2


def fields_of(cells: list[Any]) -> dict[str, Any]:
    """A summary of these cells alone, without comparisons or estimates."""
    return {"schema_version": "1.2", "run_id": "r", "title": "", "cells": tuple(cells),
            "comparisons": ()}  # fmt: skip


def test_counts_are_pooled_and_ratios_are_not_averaged() -> None:
    cells = [
        cell("speculative", 0, acceptance=acceptance((30, 20), drafts=100)),
        cell("speculative", 1, acceptance=acceptance((90, 70), drafts=300)),
    ]
    found = points(Summary(**fields_of(cells)))
    length = found["speculative", "c1", "acceptance_length"]
    assert length.value == pytest.approx(1 + 210 / 400)
    assert found["speculative", "c1", "acceptance_rate"].value == pytest.approx(210 / 800)
    assert found["speculative", "c1", "per_position.0"].value == pytest.approx(120 / 400)
    assert found["speculative", "c1", "per_position_conditional.1"].value == pytest.approx(90 / 120)
    assert length.n == 2 and length.ci_low is not None and length.ci_low < 1 + 210 / 400


def test_a_cell_cut_short_is_left_out_where_there_is_a_whole_one() -> None:
    cells = [
        cell("baseline", 0, figures=metrics(50.0)),
        cell("baseline", 1, figures=metrics(5.0, failed=20), status="partial"),
        cell("baseline", 2, figures=None, status="failed"),
    ]
    found = points(Summary(**fields_of(cells)))
    assert found["baseline", "c1", "output_tokens_per_s"].value == pytest.approx(50.0)
    assert found["baseline", "c1", "requests_failed_share"].value == pytest.approx(20 / 72)
    alone = points(Summary(**fields_of(cells[1:2])))
    assert alone["baseline", "c1", "output_tokens_per_s"].value == pytest.approx(5.0)


def test_a_figure_that_nobody_knows_is_no_point() -> None:
    found = points(Summary(**fields_of([cell("baseline", figures=metrics(None, ttft=None))])))
    assert ("baseline", "c1", "output_tokens_per_s") not in found
    assert ("baseline", "c1", "ttft_s.p50") not in found
    assert ("baseline", "c1", "tpot_s.p50") in found


def test_cells_of_a_load_in_one_word_are_pooled() -> None:
    """As a search does, which tries a load again with more requests."""
    again = msgspec.structs.replace(C1, num_requests=99)
    cells = [
        cell("speculative", repeat, load=load, acceptance=acceptance((counted,), drafts=100))
        for repeat, load, counted in ((0, C1, 10), (1, again, 40))
    ]
    length = points(Summary(**fields_of(cells)))["speculative", "c1", "acceptance_length"]
    assert length.value == pytest.approx(1.25)


def test_a_metric_of_another_version_has_no_unit() -> None:
    found = points(told("r", comparisons=(comparison("newer_s", 1.1, 1.0, 1.2),)))
    assert (found["ratio", "c1", "newer_s"].value, found["ratio", "c1", "newer_s"].better) == (
        1.1, None,
    )  # fmt: skip


def test_what_a_start_takes_is_of_no_load() -> None:
    found = points(told("r"))
    start = found["speculative", NO_LOAD, "startup_s"]
    assert (start.value, start.n, start.better) == (pytest.approx(12.4), 2, "lower")
    assert found["speculative", NO_LOAD, "startup_s.load drafter"].value == pytest.approx(1.1)
    assert ("baseline", NO_LOAD, "startup_s.load drafter") not in found


def test_telemetry_becomes_points() -> None:
    gauge = Gauge(mean=1.0, least=0.5, most=2.0, n=3)
    telemetry = Telemetry(
        interval_s=1.0,
        missing={},
        engine={"kv_usage": gauge},
        preemptions=2,
        prefix_hit_rate=0.25,
        host={"memory_used_bytes": gauge},
        host_totals={},
        gpus=tuple(
            GpuFigures(
                index=str(i), name=None, engine=engine, energy_j=None, energy_by=None,
                gauges={"memory_used_bytes": Gauge(mean=1.0, least=1.0, most=most, n=1)},
                throttled=None,
            )
            for i, engine, most in ((0, True, 8.0), (1, True, 9.0), (2, False, 99.0))
        ),
        energy_j=None,
        energy_of=None,
        joules_per_output_token=0.5,
    )  # fmt: skip
    found = points(Summary(**fields_of([cell("baseline", telemetry=telemetry)])))
    assert found["baseline", "c1", "preemptions"].value == 2
    assert found["baseline", "c1", "gpu.memory_used_bytes.most"].value == 9.0
    assert found["baseline", "c1", "engine.kv_usage.most"].value == 2.0
    assert found["baseline", "c1", "joules_per_output_token"].value == 0.5


def test_a_point_knows_whose_it_is() -> None:
    summary = told("r", void="the load generator was the bottleneck")
    fields = manifest(
        summary,
        created="2026-03-04T23:30:00-02:00",
        plan=plan(sets=("speculative.k=5", "load.concurrency=1", "seed=3")),
        digests={"reference": {"target": "aa", "drafter": "bb"}},
        versions={"spec-harness": "0.1.0"},
    )
    found = points_of(summary, fields, Labels(suite="night"))
    baseline = next(p for p in found if p.variant == "baseline")
    drafting = next(p for p in found if p.variant == "speculative")
    assert (baseline.drafter, baseline.drafter_name) == (None, None)
    assert (drafting.drafter, drafting.drafter_name) == ("bb", "drafter-mla")
    assert drafting.created == "2026-03-05T01:30:00+00:00"
    assert drafting.key.profile == "demo [speculative.k=5]"
    assert (drafting.key.suite, drafting.void, drafting.engine_version) == ("night", True, "0.1.0")
    assert (drafting.target, drafting.target_name) == ("aa", "small-target")


@pytest.mark.parametrize(
    "foreign",
    [{}, {"engines": 3}, {"engines": {"reference": [1]}}, {"request": {"sets": [1, "a"]}},
     {"models": {"reference": {"drafter": 4}}, "request": {"profile": ["x"], "urls": 3}}],
)  # fmt: skip
def test_a_plan_of_any_shape_gives_points(foreign: dict[str, Any]) -> None:
    assert points(told("r"), plan=foreign)


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (C4, "c4"),
        (LoadPoint(mode="open", request_rate=2.5, arrival="poisson"), "q2.5"),
        (
            LoadPoint(
                mode="open", request_rate=2.5, arrival="gamma", burstiness=0.5, max_concurrency=64
            ),
            "q2.5-gamma0.5-max64",
        ),
        (
            LoadPoint(mode="closed", concurrency=2, think_time_s=1.5, think_time="exponential"),
            "c2-think~1.5",
        ),
    ],
)
def test_a_load_is_a_word(load: LoadPoint, text: str) -> None:
    assert load_text(load) == text


def test_two_traces_are_two_loads() -> None:
    one, other = (LoadPoint(mode="open", arrival="trace", trace=f"/a/{n}") for n in ("x", "y"))
    moved = msgspec.structs.replace(one, trace="/b/x")
    assert load_text(one) == load_text(moved) != load_text(other)


def test_settings_are_what_moves_figures() -> None:
    sets = ["speculative.k=2", "load.num_requests=8", "load.new_connections=true", "seed=1",
            "compare.launches=1", "speculative.k = 3", "target.path=/x"]  # fmt: skip
    assert settings_of({"sets": sets}) == "load.new_connections=true speculative.k=3"
    assert settings_of({"urls": {"baseline": "http://h:1"}}) == "url=http://h:1"


def test_a_created_that_is_no_date_is_told() -> None:
    with pytest.raises(UsageError, match="'yesterday' is no date and time"):
        points(told("r"), created="yesterday")
    assert utc_text("2026-01-02") == "2026-01-02T00:00:00+00:00"


VALUES = st.lists(
    st.tuples(st.integers(0, 4), st.none() | st.floats(allow_nan=True, allow_infinity=True)),
    max_size=12,
)


@given(values=VALUES, log=st.booleans())
def test_a_mean_lies_in_its_interval_and_is_finite(
    values: list[tuple[int, float | None]], log: bool
) -> None:
    figure = Figure(metric="x", value=None, unit="s", better=None)
    bounded = [(s, v if v is None or not math.isfinite(v) else min(abs(v), 1e9)) for s, v in values]
    found = list(over_starts(figure, bounded, log=log))
    known = [
        (s, v) for s, v in bounded if v is not None and math.isfinite(v) and (v > 0 or not log)
    ]
    assert len(found) == (1 if known else 0)
    for one in found:
        assert one.value is not None and math.isfinite(one.value)
        assert one.n == len({s for s, _ in known})
        assert one.n > 1 or one.ci_low is None
        assert (one.ci_low is None) == (one.ci_high is None)
        low, high = min(v for _, v in known), max(v for _, v in known)
        assert low * (1 - 1e-9) <= one.value <= high * (1 + 1e-9)
        if one.ci_low is not None and one.ci_high is not None:
            assert one.ci_low <= one.value * (1 + 1e-9) + 1e-12
            assert one.value <= one.ci_high * (1 + 1e-9) + 1e-12


def test_points_are_written_as_parquet_and_read_by_others(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    found = list(points(told("r")).values())
    path = tmp_path / "points.parquet"
    write_points(path, found)
    rows = pq.read_table(path).to_pylist()
    assert msgspec.convert(rows, list[Point]) == found
    assert [p.name for p in tmp_path.iterdir()] == ["points.parquet"]
    assert is_current(path)
    path.write_bytes(path.read_bytes()[:-9])
    assert not is_current(path)
    assert not is_current(tmp_path / "none.parquet")


def test_a_ratio_without_a_definition_is_no_reason_to_fail() -> None:
    summary = told("r", comparisons=(comparison("output_tokens_per_s", None, None, None),))
    assert points(summary)["ratio", "c1", "output_tokens_per_s"].value is None
    assert points(summary)["baseline", load_text(C1), "ttft_s.p50"].value


def test_a_run_that_is_summed_up_has_its_points_beside_the_summary(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    pairs = [cell_data(v, repeat, scaled(1 + repeat / 10)) for repeat in (0, 1) for v in VARIANTS]
    summary = conclude(RunFolder(tmp_path), run_of(pairs))
    found = msgspec.convert(pq.read_table(tmp_path / "points.parquet").to_pylist(), list[Point])
    assert found == points_of(summary, run_of(pairs).manifest)
    assert {p.variant for p in found} == {"baseline", "speculative", "ratio"}
    speeds = {e.variant: e.value for e in summary.estimates if e.metric == "output_tokens_per_s"}
    for point in found:
        if point.metric == "output_tokens_per_s" and point.variant != "ratio":
            assert point.value == speeds[point.variant]


def test_a_run_without_a_date_is_summed_up_all_the_same(tmp_path: Path) -> None:
    run = run_of([cell_data("baseline", 0, scaled(1))])
    run = msgspec.structs.replace(run, manifest=msgspec.structs.replace(run.manifest, created=""))
    conclude(RunFolder(tmp_path), run)
    assert (tmp_path / "summary.json").is_file()
    assert not (tmp_path / "points.parquet").exists()
