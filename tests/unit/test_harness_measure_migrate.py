"""Runs of earlier schema versions, kept as they were written, read in the newest form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.errors import UsageError
from harness.findings import Summary
from harness.history.points import points_of
from harness.measure.migrate import STEPS, WHOLE_PHASE, migrated, read_stored
from harness.measure.store import RunFolder
from harness.records import SCHEMA_VERSION, Manifest

KEPT = Path(__file__).resolve().parents[1] / "data" / "runs"
VERSIONS = ("1.0", "1.1", "1.2")


def stored(version: str, name: str = "summary") -> bytes:
    return (KEPT / f"schema-{version}" / f"{name}.json").read_bytes()


def kept(version: str) -> tuple[Summary, Manifest]:
    return (
        read_stored(stored(version), Summary),
        read_stored(stored(version, "manifest"), Manifest),
    )


def test_every_version_has_a_step_and_a_kept_example() -> None:
    assert VERSIONS[-1] == SCHEMA_VERSION, "a new version: keep an example of the last one"
    assert {p.name.removeprefix("schema-") for p in KEPT.glob("schema-*")} == set(VERSIONS)
    at = VERSIONS[0]
    while at in STEPS:
        at = STEPS[at][0]
    assert at == SCHEMA_VERSION


@pytest.mark.parametrize("version", VERSIONS)
def test_a_kept_run_reads_in_the_newest_form(version: str) -> None:
    assert msgspec.json.decode(stored(version))["schema_version"] == version
    summary, manifest = kept(version)
    assert summary.schema_version == manifest.schema_version == SCHEMA_VERSION
    assert len(summary.cells) == len(manifest.cells) == 4
    for cell in summary.cells:
        assert cell.metrics is not None and cell.metrics.steady is not None
    for comparison in summary.comparisons:
        assert comparison.corrected_low is not None
    # What was written again is read again, and is the same.
    assert read_stored(msgspec.json.encode(summary), Summary) == summary


@pytest.mark.parametrize("version", VERSIONS)
def test_a_kept_run_gives_the_points_of_its_figures(version: str) -> None:
    summary, manifest = kept(version)
    points = {(p.variant, p.load, p.metric): p for p in points_of(summary, manifest)}
    told = msgspec.json.decode(stored(version))
    ratio = next(c for c in told["comparisons"] if c["metric"] == "output_tokens_per_s")
    point = points["ratio", "c1", "output_tokens_per_s"]
    assert (point.value, point.ci_low, point.ci_high, point.n) == (
        ratio["ratio"], ratio["ci_low"], ratio["ci_high"], ratio["pairs"],
    )  # fmt: skip
    length = points["speculative", "c1", "acceptance_length"].value
    assert length is not None and 1 < length < 5
    assert points["baseline", "all", "startup_s"].value
    assert points["speculative", "all", "diverged_share"].value == 0
    assert (point.profile, point.engine, point.workload) == ("demo", "reference", "demo")
    assert point.git_commit == told_manifest(version)["git_commit"]


def told_manifest(version: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(stored(version, "manifest"))
    return found


def test_what_1_0_measured_over_the_whole_phase_says_so() -> None:
    summary, _ = kept("1.0")
    metrics = summary.cells[0].metrics
    assert metrics is not None and metrics.steady is not None
    assert (metrics.steady.level, metrics.steady.rule) == ("whole", WHOLE_PHASE)
    assert metrics.steady.end_s == metrics.duration_s
    assert metrics.steady.requests == metrics.requests_ok


def test_a_verdict_of_1_0_stands_by_its_plain_interval() -> None:
    comparison = kept("1.0")[0].comparisons[0]
    assert (comparison.corrected_low, comparison.corrected_high) == (
        comparison.ci_low,
        comparison.ci_high,
    )
    assert comparison.family == 1


def test_what_1_1_said_of_its_interval_is_kept() -> None:
    told = msgspec.json.decode(stored("1.1"))["comparisons"][1]
    comparison = kept("1.1")[0].comparisons[1]
    assert comparison.corrected_low == told["corrected_low"] != told["ci_low"]
    assert comparison.family == told["family"] > 1


@pytest.mark.parametrize("version", sorted(STEPS))
def test_every_reader_of_a_kept_run_reads_the_newest_form(version: str) -> None:
    folder = RunFolder(KEPT / f"schema-{version}")
    assert folder.summary() == read_stored(stored(version), Summary)
    assert folder.summary().schema_version == SCHEMA_VERSION
    assert folder.manifest().schema_version == SCHEMA_VERSION


def test_open_loops_of_1_0_were_poisson() -> None:
    told = {
        "schema_version": "1.0",
        "cells": [
            {"load": {"mode": "open", "request_rate": 2.0}},
            {"load": {"mode": "closed", "concurrency": 1}},
            {"load": None},
            7,
        ],
        "comparisons": "none",
    }
    cells = migrated(told)["cells"]
    assert cells[0]["load"]["arrival"] == "poisson"
    assert "arrival" not in cells[1]["load"]
    assert told["schema_version"] == SCHEMA_VERSION


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "no JSON: Input data was truncated"),
        (b"\xff\xfe\x00", "no JSON: "),
        (b"[" * 100_000, "not this harness's: an object is wanted, not a list"),
        (b'{"a": ' + b"[" * 100_000, "no JSON: "),
        (b"[]", "not this harness's: an object is wanted, not a list"),
        (b'{"metrics": 1}', "not this harness's: 'schema_version' is missing"),
        (b'{"schema_version": 1}', "'schema_version': a text is wanted, not a whole number"),
        (b'{"schema_version": "2.0"}', "schema 2.0, of a later harness; this one reads 1.2"),
        (b'{"schema_version": "0.9"}', "schema 0.9, of another harness"),
        (b'{"schema_version": "x"}', "schema x, of another harness"),
        (b'{"schema_version": "1.3", "new": 1}', "schema 1.3: there is no key 'new'"),
        (b'{"schema_version": "1.2"}', "'run_id' is missing"),
        (b'{"schema_version": "1.2", "run_id": NaN}', "no JSON: "),
        (b'{"schema_version": "1.0", "cells": [{"load": 3}]}', "'cells[0].load': an object"),
    ],
)  # fmt: skip
def test_what_is_none_of_ours_is_told_why(data: bytes, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        read_stored(data, Summary)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
