"""`python -m training capture` on the demo target: proved, killed at any moment, refused."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capture_samples import demo_samples, plan_for, write_samples

from training.capture import stage
from training.capture.store import read_index
from training.gate import read_gate
from training.samples import Sample
from training.states import open_states

SAMPLES = 16
LAYERS = (2, 4, 5)
KILLS = 3

# The command line. Given a number, the process kills itself at that many writes or renames: any
# moment that a file can be caught at.
RUNNER = """
import os, signal, sys
left = int(sys.argv.pop(1))
if left >= 0:
    from training.capture import store
    def counted(real):
        def call(*args, **kwargs):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    store._write, os.replace = counted(store._write), counted(os.replace)
from training.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def samples(demo_pair: Path) -> list[Sample]:
    """Greedy answers of the demo target."""
    return demo_samples(demo_pair, SAMPLES, 32)


def capture(
    work: Path, *sets: str, kill_at: int = -1, code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    repo = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", RUNNER, str(kill_at), "capture", "--out", str(work)]
    for item in sets:
        command += ["--set", item]
    told = subprocess.run(
        command,
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(repo), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert code is None or told.returncode == code, told.stderr[-3000:]
    assert "Traceback" not in told.stderr
    return told


def passed_checks(told: str) -> set[str]:
    """The names of the checks that the stage says it passed."""
    lines = (line.removeprefix("capture: ").split() for line in told.splitlines())
    return {words[1] for words in lines if len(words) > 1 and words[0] == "ok"}


def digests(work: Path) -> list[str]:
    index = read_index(work / "states")
    assert index is not None
    return [shard.sha256 for shard in index.shards]


def test_killed_at_any_moment_it_ends_with_the_same_bits(
    samples: list[Sample], tmp_path: Path
) -> None:
    sets = ("capture.shard_tokens=200", "capture.batch=3")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for work in (whole, cut):
        write_samples(work, samples)
    first = capture(whole, *sets)
    assert {"proof", "layers"} <= passed_checks(first.stderr)
    chance = random.Random(5)
    for _ in range(KILLS):
        told = capture(cut, *sets, kill_at=chance.randrange(20), code=None)
        assert told.returncode == -signal.SIGKILL
        assert read_gate(cut / "states") is None
    capture(cut, *sets)
    assert digests(cut) == digests(whole)
    assert len(digests(whole)) > 4
    assert read_gate(cut / "states") == read_gate(whole / "states")
    leftovers = [path.name for path in (cut / "states").iterdir() if "partial" in path.name]
    assert not leftovers


def test_transformers_and_the_reference_engine_capture_the_same(
    samples: list[Sample], tmp_path: Path, demo_pair: Path
) -> None:
    found = {}
    for engine in ("reference", "transformers"):
        work = tmp_path / engine
        write_samples(work, samples[:8])
        plan = plan_for(demo_pair / "target", engine=engine, dtype="float32", aux_layers=LAYERS)
        assert stage.run(plan, work).passed
        found[engine] = open_states(work / "states")
    for i in range(8):
        a, b = (found[engine].read(i) for engine in ("reference", "transformers"))
        assert torch.cosine_similarity(a.aux, b.aux, dim=-1).min() > 0.99999
        assert torch.cosine_similarity(a.last_normed, b.last_normed, dim=-1).min() > 0.99999


def test_fp8_halves_the_bytes_of_the_demo_target(
    samples: list[Sample], tmp_path: Path, demo_pair: Path
) -> None:
    write_samples(tmp_path, samples[:8])
    plan = plan_for(demo_pair / "target", dtype="fp8", aux_layers=LAYERS)
    gate = stage.run(plan, tmp_path)
    values = {check.name: check.value for check in gate.checks}
    assert isinstance(values["fp8_bytes"], float) and values["fp8_bytes"] < 0.55
    assert isinstance(values["fp8_error"], float) and values["fp8_error"] < 0.035


def test_a_mistake_ends_with_one_line(tmp_path: Path) -> None:
    told = capture(tmp_path, code=2)
    assert "the stage generate has not ended" in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1
