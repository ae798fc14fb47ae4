"""`python -m harness doctor` on this very machine: the demo as it is, and with planted faults."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.drafter_folders import edit


def ask(*words: str, cwd: Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, the report, and what stood on standard error."""
    command = [sys.executable, "-m", "harness", "doctor", "--json", *words]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def failed(report: dict[str, Any]) -> set[str]:
    return {f["code"] for f in report["findings"] if f["severity"] == "fail"}


def test_the_demo_and_what_is_broken_of_it(demo_pair: Path, tmp_path: Path) -> None:
    code, report, said = ask("--profile", "demo", cwd=tmp_path)
    assert (code, report["fails"], failed(report)) == (0, False, set()), said
    need = report["needs"][0]
    held = sum(f.stat().st_size for f in (demo_pair / "target").glob("*.safetensors"))
    weights = next(t["bytes"] for t in need["terms"] if t["name"] == "weights")
    # The file is the tensors and a header of some kilobytes.
    assert held - 2**17 < weights < held
    areas = {f["area"] for f in report["findings"]}
    assert areas >= {"checkpoint", "disk", "host", "gpu", "memory", "engine", "models", "port"}
    assert "validating the drafter" in said and "Traceback" not in said

    # A copy with a file cut off, a drafter for another target, and a port that is taken.
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    shutil.copytree(demo_pair / "target", target)
    shutil.copytree(next(demo_pair.glob("drafter-*")), drafter)
    weights_file = target / "model.safetensors"
    os.truncate(weights_file, weights_file.stat().st_size - 100)
    edit(drafter, target_hidden_size=17)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        sets = [f"target.path={target}", f"drafter.path={drafter}"]
        sets += [f"engine.port={taken.getsockname()[1]}"]
        words = [word for item in sets for word in ("--set", item)]
        code, report, said = ask(*words, cwd=tmp_path)
    assert code == 1 and report["fails"]
    assert {"shard", "port"} <= failed(report)
    assert any(name.startswith("drafter") for name in failed(report))
    first = report["findings"][0]
    assert first["severity"] == "fail"
    shard = next(f for f in report["findings"] if f["code"] == "shard")
    assert shard["where"] == str(weights_file) and "cut off" in shard["what"]


def test_a_mistake_of_the_users_is_one_line(tmp_path: Path) -> None:
    for words, word in (
        (("--profile", "demoo"), "did you mean 'demo'"),
        (("--engine", "vlm"), "vlm"),
        (("--set", "engine.prt=1"), "engine.port"),
        (("--arch", "12.0"), "--kernels"),
        (("--kernels", "x.whl"), "--arch"),
    ):
        code, report, said = ask(*words, cwd=tmp_path)
        assert (code, report) == (2, {}), said
        assert word in said and len(said.strip().splitlines()) == 1
