"""Kill -9 at random moments of every stage: resumed, the result is the uninterrupted run's.

The whole pipeline runs on the demo target with a handful of prompts. It is killed in the middle of
each stage in turn and started again with the same command, until it ends; what it then made is
compared with what a run that was never interrupted made, byte for byte but for times and paths.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from training.folders import NAMES, STAGES, Stage

SETS = (
    "workload.num_prompts=20",
    "generate.max_tokens=40",
    "generate.concurrency=1",  # so that the order of the samples is the order of the prompts
    "capture.shard_tokens=200",
    "train.epochs=14",  # enough for a few accepted draft tokens: the gate wants more than none
    "train.batch_tokens=256",
    "train.checkpoint_every=16",
    "train.validate_every=16",
    "train.held_out=0.2",
    "train.serve_check=2",
    "evaluate.prompts=4",
    "export.load=false",
)


def command(out: Path) -> list[str]:
    words = [sys.executable, "-m", "training", "pipeline", "--plan", "demo", "--out", str(out)]
    return words + [word for item in SETS for word in ("--set", item)]


def complete(repo: Path, out: Path) -> None:
    done = subprocess.run(command(out), cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def kill_in(repo: Path, out: Path, stage: Stage, after: float) -> bool:
    """Start, and kill `after` seconds into `stage`; False where it had ended before."""
    with open(out.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen(command(out), cwd=repo, stdout=log, stderr=log)
        folder = out / NAMES[stage]
        while process.poll() is None and not folder.is_dir():
            time.sleep(0.01)
        end = time.monotonic() + after
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        if process.poll() is not None:
            assert process.returncode == 0, out.with_suffix(".log").read_text()[-3000:]
            return False
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return True


def made(out: Path) -> dict[str, Any]:
    """What a training came to, times and paths left out."""
    gates = {s: json.loads((out / NAMES[s] / "gate.json").read_text()) for s in STAGES}
    evaluation = json.loads((out / "evaluate" / "evaluation.json").read_text())
    exports = json.loads((out / "export" / "manifest.json").read_text())["exports"]
    return {
        **{stage: gates[stage]["output"] for stage in ("generate", "capture", "vocab", "train")},
        "checks": {stage: [c["value"] for c in gates[stage]["checks"]] for stage in STAGES},
        "rows": evaluation["rows"],
        "answers": [a["token_ids"] for a in evaluation["offline"]["answers"]],
        "exports": {e["format"]: e["files"] for e in exports},
        "weights": (out / "train" / "best" / "model.safetensors").read_bytes(),
    }


def leftovers(out: Path) -> list[str]:
    return [str(p) for p in out.rglob("*partial*")]


@pytest.fixture(scope="module")
def whole(repo: Path, demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "training"
    complete(repo, out)
    return out


def survive(repo: Path, whole: Path, out: Path, kills: int, seed: int) -> int:
    """Kill up to `kills` times, then let it end and compare; how many kills there were."""
    draw = random.Random(seed)
    took = json.loads((whole / "pipeline.json").read_text())["stages"]
    killed = 0
    for number in range(kills):
        stage = STAGES[(number + seed) % len(STAGES)]
        seconds = took[stage]["seconds"]
        if kill_in(repo, out, stage, draw.uniform(0, seconds)):
            killed += 1
        else:
            break
    complete(repo, out)
    expected, found = made(whole), made(out)
    for key, value in expected.items():
        assert found[key] == value, key
    assert leftovers(out) == []
    return killed


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_killed_a_few_times_it_makes_the_same(repo: Path, whole: Path, tmp_path: Path) -> None:
    assert survive(repo, whole, tmp_path / "training", kills=4, seed=0) >= 3


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_killed_thirty_times_it_makes_the_same(repo: Path, whole: Path, tmp_path: Path) -> None:
    killed, life = 0, 0
    while killed < 30:
        killed += survive(repo, whole, tmp_path / f"life-{life}", kills=12, seed=life + 1)
        life += 1


def test_a_finished_training_is_left_as_it_is(repo: Path, whole: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()}
    complete(repo, whole)
    after = {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()}
    assert after == before
