"""kill -9 of the harness: no process of the engine stays, and `resume` finishes the run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import slow_engine
from attached import harness

REPO = Path(__file__).resolve().parents[2]
MARK = "KILLED_RUN_TEST"
PLAN = ["--set", "load.num_requests=6", "--set", "load.concurrency=1,2"]
PLAN += ["--set", "compare.launches=2", "--set", "load.warmup_requests=1"]
# On a machine that does something else besides, figures may be void: they are not what is tested.
PLAN += ["--set", "load.allow_client_bound=true"]
SLOW = slow_engine.option("once_a_cell_is_saved")


class Killed:
    """One run that is begun, killed and gone on with; all its processes bear a mark."""

    def __init__(self, out: Path, *more: str) -> None:
        self.out, self.more = out, more
        self.mark = uuid.uuid4().hex

    @property
    def folder(self) -> Path | None:
        return next((p.parent for p in self.out.glob("*/manifest.json")), None)

    def start(self) -> subprocess.Popen[bytes]:
        """`run`, or `resume` where there is something to go on with."""
        known = self.folder
        words = (
            ["resume", str(known)] if known else ["run", "--out", str(self.out), *PLAN, *self.more]
        )
        return subprocess.Popen(
            [sys.executable, "-m", "harness", *words],
            cwd=REPO,
            env={**os.environ, MARK: self.mark, slow_engine.RUNS: str(self.out)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def left(self) -> list[int]:
        """The live processes that bear the mark."""
        needle, found = f"{MARK}={self.mark}".encode(), []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if needle in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
            except OSError:
                continue
        return found

    def assert_nothing_left(self) -> None:
        """Within the engine's grace and what a busy machine needs besides."""
        end = time.monotonic() + 300
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.1)
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        assert not left, commands

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.assert_nothing_left()


def assert_finished(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    planned = json.loads((folder / "manifest.json").read_text())["cells"]
    assert [c["cell_id"] for c in summary["cells"]] == [c["cell_id"] for c in planned]
    assert {c["status"] for c in summary["cells"]} == {"ok"}
    assert summary["void"] is None


def test_killed_once_refused_when_changed_and_finished(demo_pair: Path, tmp_path: Path) -> None:
    run = Killed(tmp_path, *SLOW)  # by whom it is gone on with, it is slow no more
    process = run.start()
    end = time.monotonic() + 300
    while not list(tmp_path.glob("*/cells/[!.]*/timeline.json")):  # its engine serves
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    assert len(run.left()) > 1
    run.kill(process)

    folder = run.folder
    assert folder is not None
    manifest = (folder / "manifest.json").read_bytes()
    told = json.loads(manifest)
    told["versions"]["numpy"] = "0.1"
    told["digests"]["reference"]["drafter"] = "another"
    (folder / "manifest.json").write_text(json.dumps(told))
    refused = harness("resume", str(folder))
    assert refused.returncode == 2
    assert "numpy was 0.1 and is" in refused.stderr
    assert "the files of reference's drafter are not those" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1

    (folder / "manifest.json").write_bytes(manifest)
    kept = {p: p.stat().st_mtime_ns for p in folder.glob("cells/[!.]*/requests.parquet")}
    done = harness("resume", str(folder))
    assert done.returncode == 0, done.stderr
    assert_finished(folder)
    assert {p: p.stat().st_mtime_ns for p in kept} == kept


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_killed_twenty_times_at_random_moments(demo_pair: Path, tmp_path: Path) -> None:
    chance = random.Random(6)
    runs = [Killed(tmp_path / "0")]
    for _ in range(20):
        run = runs[-1]
        process = run.start()
        try:
            process.wait(timeout=chance.uniform(0.0, 25.0))
        except subprocess.TimeoutExpired:
            run.kill(process)
        else:  # finished before its moment came: another one
            assert process.returncode == 0
            run.assert_nothing_left()
            runs.append(Killed(tmp_path / str(len(runs))))
    last = runs[-1]
    assert last.start().wait(timeout=900) == 0
    for run in runs:
        assert run.folder is not None
        assert_finished(run.folder)
