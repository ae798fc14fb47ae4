"""A diagnosis that ends after any of its experiments goes on behind it, to the same verdict.

What each experiment is made of is scripted in tests/unit/test_diagnose_story.py, which is run every
day; here the engine, the target and the trace are real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import left_running
import pytest

from harness.diagnose.catalogue import EXPERIMENTS

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]


def diagnose(pair: Path, folder: Path, *stop: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "stopped_diagnosis.py"), str(pair), str(folder), *stop],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def verdict(folder: Path) -> dict[str, Any]:
    """What a diagnosis says; scores may differ in their last digits, for batches differ."""
    told: dict[str, Any] = json.loads((folder / "diagnosis.json").read_text())
    ranked = {(r["cause"], r["strength"]) for r in told["ranked"]}
    shares = [(s["name"], round(s["length"], 6)) for s in told["waterfall"]]
    kept = {key: told[key] for key in ("verdict", "cause", "stage", "collapse")}
    return {**kept, "ranked": ranked, "waterfall": shares}


def found(folder: Path) -> set[str]:
    """The experiments that are kept."""
    return {path.stem for path in (folder / "evidence").glob("*.json")} & set(EXPERIMENTS)


@pytest.fixture(scope="module")
def whole(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The verdict of a diagnosis that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    done = diagnose(demo_pair, folder)
    assert done.returncode == 0, done.stderr
    assert found(folder) == set(EXPERIMENTS)
    return verdict(folder)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_real_one_that_ends_after_every_experiment_goes_on(
    number: signal.Signals, demo_pair: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    names = list(EXPERIMENTS)
    for place, name in enumerate(names):
        done = diagnose(demo_pair, folder, name, str(int(number)))
        # Where Python ends of a Ctrl-C that nobody catches, the signal is what it ends of.
        assert done.returncode in (-number, 130), done.stderr
        assert found(folder) == set(names[: place + 1])
        told = done.stderr
        assert all(f"{known}: found before" in told for known in names[:place]), told
        assert not (folder / "diagnosis.json").exists()
    done = diagnose(demo_pair, folder)
    assert done.returncode == 0, done.stderr
    assert all(f"{name}: found before" in done.stderr for name in names)
    assert verdict(folder) == whole
    deadline = time.monotonic() + 300
    while left := left_running.naming(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
