"""A question to the history of many runs, beside reading every run's summary for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from streams import side_by_side

from harness.findings import Summary
from harness.history.store import open_history

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from history_runs import write_many

RUNS = 1000
KEPT = Path(__file__).resolve().parents[1] / "data" / "runs" / "schema-1.2" / "summary.json"
METRIC = "acceptance_length"


def answer(root: Path) -> int:
    """One metric's series, from an index that is current."""
    series = open_history(root).series(metric=METRIC)
    return sum(map(len, series.values()))


def every_summary(root: Path) -> int:
    """The same without an index or types: each summary's JSON is parsed and looked at."""
    found = 0
    for path in root.glob("*/summary.json"):
        told = msgspec.json.decode(path.read_bytes())
        found += sum(one["metric"] == METRIC for one in told["estimates"])
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("history")
    kept = msgspec.json.decode(KEPT.read_bytes(), type=Summary)
    write_many(path, RUNS, msgspec.structs.replace(kept, run_id="RUN-ID"))
    open_history(path)
    return path


def test_a_question_to_the_history(benchmark: Any, root: Path) -> None:
    assert benchmark(lambda: answer(root)) == every_summary(root) == RUNS
    ratio = side_by_side(lambda: answer(root), lambda: every_summary(root), rounds=5)
    benchmark.extra_info["over reading every summary"] = round(ratio, 3)
    assert ratio <= 0.8
