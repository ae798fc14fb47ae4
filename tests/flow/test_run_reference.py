"""The whole command line on the embedded engine with the demo pair: as a newcomer runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import slow_engine

from engines.prometheus import parse
from harness.measure.series import read_series

REPO = Path(__file__).resolve().parents[2]
SMALL = ["--set", "load.num_requests=6", "--set", "load.concurrency=1,2"]
SMALL += ["--set", "compare.launches=2", "--set", "load.warmup_requests=1"]
# On a machine that does something else besides, figures may be void: they are not what is tested.
SMALL += ["--set", "load.allow_client_bound=true"]


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "harness", "run", "--out", str(out), *SMALL, *more],
        cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, slow_engine.RUNS: str(out)},
    )  # fmt: skip


def engines_under(pid: int) -> list[int]:
    """The reference engines below a process, by /proc."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    found = []
    for child in parents:
        line = Path(f"/proc/{child}/cmdline")
        above, at = set(), child
        while at in parents and at not in above:
            above.add(at)
            at = parents[at]
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:
            continue
        if pid in above and words[1:3] == [b"-m", b"engines.reference"]:
            found.append(child)
    return found


def answering(pid: int) -> bool:
    """Whether the engine below the process has a request under way, by its own metrics."""
    for engine in engines_under(pid):
        words = Path(f"/proc/{engine}/cmdline").read_text().split("\0")
        port = words[words.index("--port") + 1]
        try:
            page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
        except httpx.TransportError:
            continue
        return any(s.name == "vllm:num_requests_running" and s.value > 0 for s in parse(page))
    return False


def in_the_second_cell(process: subprocess.Popen[str], out: Path) -> int:
    """Wait until a cell is saved and a request of the next is under way; the engine's id."""
    deadline = time.monotonic() + 300
    first_cell_saved = False
    while not (first_cell_saved and answering(process.pid)):  # so that a request is cut short
        assert time.monotonic() < deadline
        assert process.poll() is None
        first_cell_saved = bool(list(out.glob("*/cells/[!.]*/timeline.json")))
        time.sleep(0.02)
    (engine,) = engines_under(process.pid)
    return engine


def result(out: str) -> tuple[Path, dict[str, Any]]:
    folder = Path(out.strip().splitlines()[-1])
    return folder, json.loads((folder / "summary.json").read_text())


def test_the_demo_run(demo_pair: Path, tmp_path: Path) -> None:
    process = start(tmp_path)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    folder, summary = result(out)
    assert [c["variant"] for c in summary["cells"][::2]] == [
        "baseline", "speculative", "speculative", "baseline",
    ]  # fmt: skip
    for cell in summary["cells"]:
        assert cell["status"] == "ok"
        assert cell["metrics"]["task_n"] > 0
        if cell["variant"] == "baseline":
            assert cell["acceptance"] is None
            continue
        acceptance = cell["acceptance"]
        assert acceptance["source"] == "counters"
        assert acceptance["sources"]["counters"] == acceptance["sources"]["per_request"]
        # Each chunk is one verify step, so that the client's count of them is exact.
        assert acceptance["sources"]["client"]["drafts"] == acceptance["drafts"]
        assert acceptance["merged"]["share"] == 0
        assert acceptance["estimates"]["length"]["value"] == acceptance["length"]
        odd = [c["code"] for c in cell["cautions"]]
        assert not [code for code in odd if "counters" in code or "acceptance" in code], odd
        assert 1 < acceptance["length"] < 4
        assert cell["integrity"]["identical"] == cell["integrity"]["compared"] == 6
    assert len([c for c in summary["comparisons"] if c["metric"] == "output_tokens_per_s"]) == 2
    assert "of draft tokens accepted; output identical (24 of 24)" in " ".join(out.split())
    for name in ("manifest.json", "report.html", "report.md", "speculation_profile.json"):
        assert (folder / name).stat().st_size > 0
    assert {"output_tokens", "run_time", "thinking"} <= {
        split["by"] for split in summary["splits"][0]["splits"]
    }
    log = folder / "cells" / summary["cells"][0]["cell_id"] / "engine.log"
    assert "ready" in log.read_text()
    for cell in summary["cells"]:
        sampled = read_series(folder / "cells" / cell["cell_id"] / "telemetry.parquet")
        assert set(sampled.names("engine")) == {"running", "waiting", "kv_usage"}
        assert {"cpu_share", "memory_used_bytes"} <= set(sampled.names("host"))
        for name in ("running", "kv_usage"):
            track = sampled.track("engine", name)
            assert track is not None
            assert len(track.at_ns) >= 2  # before and behind the load, however short it is
        running = sampled.track("engine", "running")
        assert running is not None
        assert running.values.max() <= cell["load"]["concurrency"]
        assert cell["telemetry"]["energy_j"] is None  # it runs on the CPU
        assert ("gpu" in sampled.missing) != bool(sampled.devices("gpu"))


def test_an_engine_killed_in_the_middle(demo_pair: Path, tmp_path: Path) -> None:
    process = start(tmp_path, *slow_engine.option("once_a_cell_is_saved"))
    engine = in_the_second_cell(process, tmp_path)
    os.kill(engine, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 3, err
    folder, summary = result(out)
    assert summary["cells"][0]["status"] == "ok"
    dead = summary["cells"][-1]
    counters = json.loads((folder / "cells" / dead["cell_id"] / "counters.json").read_text())
    assert "SIGKILL" in counters["note"]
    assert dead["status"] in ("partial", "failed")
    assert dead["metrics"]["requests_failed"] > 0
    assert "SIGKILL" in summary["failures"][0]
    (line,) = [text for text in err.splitlines() if text.startswith("harness:")]
    assert "while serving" in line
    assert "engine.log" in line
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_engine_behind(
    demo_pair: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(tmp_path, *slow_engine.option("from_the_first"))
    deadline = time.monotonic() + 300
    while not engines_under(process.pid):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    (engine,) = engines_under(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert not Path(f"/proc/{engine}").exists()
    _, summary = result(out)
    assert summary["cells"] == []


def test_a_signal_in_the_middle_of_a_cell_keeps_the_cells_before(
    demo_pair: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, *slow_engine.option("once_a_cell_is_saved"))
    engine = in_the_second_cell(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Traceback" not in err
    assert not Path(f"/proc/{engine}").exists()
    folder, summary = result(out)
    saved = [entry.name for entry in (folder / "cells").iterdir()]
    assert [cell["cell_id"] for cell in summary["cells"]] == saved[:1] == saved
    assert summary["cells"][0]["status"] == "ok"
    assert summary["failures"] == []
