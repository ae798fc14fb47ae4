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

import pytest

from engines.hardware import Gpu, GpuProcess, Gpus
from harness import doctor
from harness.errors import UsageError
from harness.prepare import Request
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
    (target / "tokenizer.json").unlink()
    (target / "tokenizer_config.json").unlink()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        sets = [f"target.path={target}", f"drafter.path={drafter}"]
        sets += [f"engine.port={taken.getsockname()[1]}"]
        told = doctor.doctor(Request(sets=tuple(sets), out=tmp_path), lambda line: None)
    wrong = {f.code: f for f in told.findings if f.severity == "fail"}
    assert told.fails and told.findings[0].severity == "fail"
    assert {"shard", "port", "tokenizer"} <= set(wrong)
    assert any(name.startswith("drafter") for name in wrong)
    assert wrong["shard"].where == str(weights_file) and "cut off" in wrong["shard"].what


def test_the_demo_on_eight_gpus_by_recorded_facts(
    demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole story, the GPUs written by hand: the second is nearly full of another's process."""
    monkeypatch.setenv("SPEC_HARNESS_VENVS", str(tmp_path))
    full = GpuProcess(pid=1, name="python", used_bytes=90 * 2**30)
    gpus = tuple(
        Gpu(
            index=i,
            name="RTX PRO 6000",
            capability="12.0",
            memory_bytes=95 * 2**30,
            free_bytes=(2 if i == 1 else 94) * 2**30,
            processes=(full,) if i == 1 else (),
        )
        for i in range(8)
    )
    monkeypatch.setattr(doctor, "gpus_here", lambda: (Gpus(driver="580", gpus=gpus), gpus))
    sets = ("engine.device=cuda", "engine.tensor_parallel=4")
    request = Request(engines=("sglang",), sets=sets, out=tmp_path)
    report = doctor.doctor(request, lambda line: None)
    failed_at = {(f.code, f.where) for f in report.findings if f.severity == "fail"}
    assert failed_at == {("environment", "environment sglang"), ("fits", "GPU 1")}
    fitting = [f.where for f in report.findings if f.code == "fits" and f.severity == "ok"]
    assert fitting == ["GPU 0", "GPU 2", "GPU 3"]  # four serve
    shared = next(t for t in report.needs[0].terms if t.name == "weights")
    assert "/ 4 tensor parallel" in shared.how
    assert report.text().splitlines()[-1].startswith("2 things would fail")


def test_a_mistake_of_the_users_is_one_line(tmp_path: Path) -> None:
    for words, word in (
        (("--profile", "demoo"), "did you mean 'demo'"),
        (("--arch", "12.0"), "--kernels"),
    ):
        code, report, said = ask(*words, cwd=tmp_path)
        assert (code, report) == (2, {}), said
        assert word in said and len(said.strip().splitlines()) == 1
    with pytest.raises(UsageError, match=r"engine\.port"):
        doctor.doctor(Request(sets=("engine.prt=1",)), lambda line: None)
    with pytest.raises(UsageError, match="openai"):
        doctor.doctor(Request(engines=("openai",)), lambda line: None)
    with pytest.raises(UsageError, match="attach: servers that run already"):
        doctor.doctor(Request(profile="attach"), lambda line: None)


def test_a_planted_fault_ends_with_1(tmp_path: Path) -> None:
    code, report, said = ask("--set", f"target.path={tmp_path / 'gone'}", cwd=tmp_path)
    assert code == 1 and report["fails"] and "folder" in failed(report), said
