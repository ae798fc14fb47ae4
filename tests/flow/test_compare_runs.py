"""Two real runs compared on the command line: what differs, what got worse, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
SMALL = ["--variants", "speculative", "--set", "load.num_requests=8"]
SMALL += ["--set", "load.concurrency=1", "--set", "load.warmup_requests=1"]
SMALL += ["--set", "compare.launches=3", "--set", "load.allow_client_bound=true"]


def harness(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *map(str, words)],
        cwd=REPO, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def run(out: Path, *more: str) -> Path:
    done = harness("run", "--out", out, *SMALL, *more)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


def rows(told: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    return [
        row
        for row in told["comparisons"][0]["rows"]
        if row["metric"] == metric and row["category"] is None
    ]


@pytest.mark.full
def test_a_drafter_that_is_asked_for_less_yields_less(demo_pair: Path, tmp_path: Path) -> None:
    three = run(tmp_path)
    one = run(tmp_path, "--set", "speculative.k=1")
    page = tmp_path / "page.md"
    metrics = ["--metric", "acceptance_length", "--metric", "task_accuracy"]
    done = harness("compare", three, one, *metrics, "--json", "--markdown", page)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    differences = {d["key"]: d for d in told["comparisons"][0]["differences"]}
    assert differences["speculative.k"]["reference"] == "3"
    assert differences["speculative.k"]["candidate"] == "1"
    assert "acceptance" in differences["speculative.k"]["affects"]
    # Two runs one after the other: but for that only what goes on beside the test may differ.
    assert set(differences) <= {
        *("speculative.k", "speculative --k"),
        *("load average at the beginning", "git commit", "uncommitted changes"),
    }
    (length,) = rows(told, "acceptance_length")
    assert (length["verdict"], length["paired"], length["units"]) == ("worse", True, [3, 3])
    assert 1.2 < length["candidate"] <= 2 < length["reference"]
    (accuracy,) = rows(told, "task_accuracy")
    assert accuracy["ratio"] == 1.0  # greedy: the same answers, whatever the drafter proposes
    assert accuracy["units"][0] > 0
    text = page.read_text()
    assert text.index("| speculative.k | 3 | 1 |") < text.index("| acceptance length |")
    assert "What may have moved acceptance" in text

    same = harness("compare", three, three)
    assert same.returncode == 0, same.stderr
    assert "Differences: none that is recorded." in same.stdout
    assert "start-up, s" in same.stdout
    assert "concurrency 1: 3 paired starts" in same.stdout
