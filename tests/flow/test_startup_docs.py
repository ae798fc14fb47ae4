"""The commands of docs/start-up.md run as they stand; its tables say what the code does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engines.activity import budgets

PAGE = Path(__file__).resolve().parents[2] / "docs" / "start-up.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.S | re.M)


def in_bash(block: str, repo: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block of the page from the top, as a user does."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euc", block],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(repo), "PATH": path},
        capture_output=True,
        text=True,
    )


def test_a_run_tells_its_starts(repo: Path, demo_pair: Path, tmp_path: Path) -> None:
    done = in_bash(BLOCKS[0], repo, tmp_path)
    # Where this machine does something else besides, its figures may be void.
    assert done.returncode == 0 or "load.allow_client_bound" in done.stdout, done.stderr
    assert done.stdout.count("Start-up, seconds by stage") == 2
    (folder,) = (tmp_path / "results").glob("*")
    launches = [json.loads(p.read_text()) for p in folder.glob("launches/*/launch.json")]
    assert len(launches) == 2
    for launch in launches:
        phases = launch["phases"]
        told = sum(p["end_s"] - p["start_s"] for p in phases)
        assert told == pytest.approx(launch["ready_s"], rel=0.02)
        assert launch["wall_s"] == launch["ready_s"]
        assert sum(p["cpu_s"] or 0 for p in phases) > 0
        loads = {p["phase"]: p["weight_bytes"] for p in phases if p["weight_bytes"]}
        drafter = {"load_drafter"} if launch["variant"] == "speculative" else set()
        assert set(loads) == {"load_target", *drafter}
    assert 'id="startup"' in (folder / "report.html").read_text()


def test_a_planted_stall_is_told(repo: Path, demo_pair: Path, tmp_path: Path) -> None:
    done = in_bash(BLOCKS[1], repo, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing moves since" in done.stdout
    assert "<module> (sitecustomize.py:1)" in done.stdout or "planted" in done.stdout
    (stall,) = (tmp_path / "stalled").glob("*/launches/*/stall")
    for name in re.findall(r"^\| `([\w.-]+\.txt)`", TEXT, re.M):
        if "PID" not in name:
            assert (stall / name).is_file(), name
    assert list(stall.glob("stack-*.txt"))
    (record,) = (tmp_path / "stalled").glob("*/launches/*/launch.json")
    launch = json.loads(record.read_text())
    assert launch["phases"][-1]["end_s"] is None
    assert launch["wall_s"] > 4
    assert "stalled: nothing moves" in launch["failure"]


def test_the_budgets_of_the_page_are_those_of_the_code() -> None:
    named = {
        "compilation, graph capture, warm-up of a compiled model": (
            *("compile", "capture_graphs", "graph_capture", "warm_up"),
        ),
        "memory profiling": ("profile_memory",),
        "distributed init": ("distributed",),
        "any other": ("load_weights", "launch"),
    }
    for row, phases in named.items():
        found = re.search(rf"^\| {row} \| (\d+) s \| (\d+) s \|", TEXT, re.M)
        assert found is not None
        for phase in phases:
            assert budgets(phase) == (float(found[1]), float(found[2])), phase
