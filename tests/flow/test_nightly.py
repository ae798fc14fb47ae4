"""Nights on the embedded engine with the demo pair: killed, gone on with, judged, accepted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
SUITE = """
name = "small"
results = "{results}"
confirm_blocks = 2
{more}
[[gates]]
metric = "acceptance_length"
min = {least}

[[entries]]
name = "first"
priority = 1
variants = ["speculative"]
set = ["load.num_requests=4", "load.concurrency=1", "compare.launches=1", "workload.output_tokens=16", "load.warmup_requests=1", "load.allow_client_bound=true"]

[[entries]]
name = "second"
variants = ["speculative"]
set = ["load.num_requests=4", "load.concurrency=1,2", "compare.launches=1", "workload.output_tokens=16", "load.warmup_requests=1", "load.allow_client_bound=true"]
"""  # noqa: E501


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write(tmp_path)


def write(folder: Path, least: float = 1.05, more: str = "") -> Path:
    path = folder / "small.toml"
    path.write_text(SUITE.format(results=folder / "results", least=least, more=more))
    return path


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "harness", "nightly", *arguments],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, out + err
    return out


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "night.json").read_text())
    return found


def below(pid: int) -> list[int]:
    """Every live process below one, by /proc."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = place.read_text().rpartition(")")
            if rest.split()[0] not in "ZX":
                parents[int(head.split()[0])] = int(rest.split()[1])
        except (OSError, IndexError, ValueError):
            continue
    found, todo = [], [pid]
    while todo:
        children = [c for c, p in parents.items() if p in todo]
        found += children
        todo = children
    return found


def wait_for(told: Any, process: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + 400
    while not told():
        assert time.monotonic() < deadline, what
        assert process.poll() is None, what
        time.sleep(0.1)


@pytest.mark.full
def test_a_killed_night_is_gone_on_with_and_measures_nothing_twice(
    suite: Path, tmp_path: Path, demo_pair: Path
) -> None:
    results = tmp_path / "results"
    process = start("--suite", str(suite))

    def in_the_second() -> bool:
        runs = sorted(p for p in results.glob("2*") if (p / "manifest.json").exists())
        return len(runs) == 2 and bool(list(runs[1].glob("cells/[!.]*/timeline.json")))

    wait_for(in_the_second, process, "the second entry's first cell is not saved")
    children = below(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert children
    deadline = time.monotonic() + 300
    while any(Path(f"/proc/{child}/cmdline").exists() for child in children):
        assert time.monotonic() < deadline, "a run outlives the night"
        time.sleep(0.2)
    (folder,) = (results / "nightly" / "small").glob("2*")
    before = state(folder)
    assert [e["status"] for e in before["entries"]] == ["done", "running"]
    runs = sorted(p.name for p in results.glob("2*"))

    out = finish(start("--suite", str(suite)), 0)
    assert out.splitlines()[-1] == str(folder)
    after = state(folder)
    assert [e["status"] for e in after["entries"]] == ["done", "done"]
    assert after["entries"][0]["attempt"] == before["entries"][0]["attempt"]
    assert sorted(p.name for p in results.glob("2*")) == runs  # none was begun anew
    assert after["spent_s"] > after["entries"][0]["attempt"]["seconds"]
    page = (folder / "index.html").read_text()
    assert "first/reference/speculative/c1/output_tokens_per_s" in page
    link = results / "baselines" / "small" / "second"
    assert link.is_symlink() and (link / "summary.json").exists()


def test_a_gate_that_fails_is_confirmed_cried_and_then_known(
    tmp_path: Path, demo_pair: Path
) -> None:
    suite = write(tmp_path, least=60.0, more="[webhook]\nurl_env = 'NOT_SET_HERE'\n")
    text = suite.read_text()
    suite.write_text(text[: text.rindex("[[entries]]")])  # the first entry alone
    process = start("--suite", str(suite), "--json")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 1, err
    told = json.loads(out)
    assert told["exit_code"] == 1
    assert {g["status"] for g in told["gates"]} == {"fail"}
    assert "webhook: not sent, $NOT_SET_HERE is not set" in err
    folder = Path(err.strip().splitlines()[-1])
    (entry,) = state(folder)["entries"]
    assert len(entry["fresh"]) >= 1
    assert "<failure" in (folder / "junit.xml").read_text()

    wrong = start("accept", "first/reference/x", "--suite", str(suite), "--reason", "r")
    assert "no such series" in wrong.communicate()[1] and wrong.returncode == 2
    done = subprocess.run(
        [sys.executable, "-m", "harness", "nightly", "accept", "first", "--suite", str(suite),
         "--reason", "a drafter that is known to be weak", "--known-bad"],
        cwd=REPO, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "small.accepted.toml").exists()
    assert "first/* (" in done.stdout
    finish(start("--suite", str(suite)), 0)


def test_mistakes_are_told_before_anything_is_run(tmp_path: Path) -> None:
    suite = write(tmp_path, more='time_budget = "1h"')
    process = start("--suite", str(suite))
    _, err = process.communicate()
    assert process.returncode == 2
    assert err.strip().endswith("unknown key 'time_budget'; did you mean 'time_budget_min'?")
    assert not (tmp_path / "results").exists()
    process = start()
    assert "give --suite FILE" in process.communicate()[1] and process.returncode == 2
    assert os.listdir(tmp_path) == ["small.toml"]
