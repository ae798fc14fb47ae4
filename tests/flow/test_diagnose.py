"""`python -m harness diagnose` end to end, on the embedded engine with the demo pair."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import left_running
import pytest

from training.demo import pair as demo

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pair() -> Path:
    return demo.make(*demo.configs("mla", "mla"))


def command(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "harness", "diagnose", "--out", str(out), *more]


def run(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(out, *more), cwd=REPO, capture_output=True, text=True, check=False, timeout=600
    )


def diagnosis(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "diagnosis.json").read_text())
    return told


def shifted(pair: Path, out: Path) -> Path:
    """The demo's drafter, its layer ids each one too low, and nothing that says so."""
    shutil.copytree(pair / "drafter-mla", out)
    file = out / "config.json"
    config = json.loads(file.read_text())
    ids = [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_aux_hidden_state_layer_ids"] = ids
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    del config["drafter_format"]
    file.write_text(json.dumps(config))
    return out


def test_a_healthy_pair_has_nothing_wrong(tmp_path: Path) -> None:
    done = run(tmp_path, "--prompts", "8")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip().splitlines()[-1])
    assert folder.parent == tmp_path / "diagnose"
    told = diagnosis(folder)
    assert (told["cause"], told["collapse"]) == ("none", False)
    dossier = json.loads((folder / "dossier.json").read_text())
    expected = dossier["expected"]["acceptance"]["counts"]
    observed = dossier["observed"]["acceptance"]["counts"]
    # Every prompt was asked twice, and this engine computes what the expectation does.
    assert observed["accepted"] == 2 * expected["accepted"]
    assert dossier["observed"]["identical"]["hits"] == dossier["observed"]["identical"]["of"] == 16
    assert dossier["replay"]["readings"][0]["reading"] == "as declared"
    assert {"diagnosis.md", "diagnosis.html"} <= {p.name for p in folder.iterdir()}


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for words, said in (
        (("--only", "state"), "did you mean 'states'"),
        (("--set", "drafter.path=/nowhere", "--set", "target.path=/nowhere"), "no such folder"),
        ((str(tmp_path),), "manifest.json"),
        (("--fix", str(tmp_path / "file" / "fix")), "is not a folder; choose another"),
    ):
        done = run(tmp_path / "out", *words)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


@pytest.mark.full
def test_shifted_layers_are_named_and_mended(tmp_path: Path, pair: Path) -> None:
    drafter = shifted(pair, tmp_path / "drafter")
    served = ["--set", f"target.path={pair / 'target'}", "--set", f"drafter.path={drafter}"]
    served += ["--set", "workload.dataset=demo", "--set", "engine.dtype=float32"]
    done = run(tmp_path / "out", *served)
    assert done.returncode == 1, done.stderr
    told = diagnosis(Path(done.stdout.strip().splitlines()[-1]))
    assert told["collapse"] and told["cause"].startswith("layers_")
    fixed = run(tmp_path / "out", *served, "--fix", str(tmp_path / "fixed"), "--json")
    assert fixed.returncode == 0, fixed.stderr
    assert json.loads(fixed.stdout)["cause"] == told["cause"]
    mended = json.loads((tmp_path / "fixed" / "mended.json").read_text())
    assert mended["proven"] and abs(mended["after"] - mended["expected"]) <= 0.02
    assert mended["after"] > mended["before"] + 0.05
    assert Path(mended["drafter"]) == tmp_path / "fixed" / "drafter"
    assert (tmp_path / "fixed" / "drafter" / "model.safetensors").is_file()


@pytest.mark.full
def test_what_was_cut_short_goes_on(tmp_path: Path) -> None:
    first = subprocess.Popen(
        command(tmp_path, "--prompts", "6"), cwd=REPO, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("diagnose/*/evidence/observed.json")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=300)
    assert first.returncode == 130 and "the same command goes on" in said
    again = run(tmp_path, "--prompts", "6")
    assert again.returncode in (0, 4), again.stderr
    assert "observed: found before" in again.stderr
    assert len(list((tmp_path / "diagnose").iterdir())) == 1
    assert not left_running.naming(tmp_path)


@pytest.mark.full
def test_a_mending_that_was_killed_goes_on(tmp_path: Path, pair: Path) -> None:
    drafter, fixed = shifted(pair, tmp_path / "drafter"), tmp_path / "fixed"
    words = ["--set", f"target.path={pair / 'target'}", "--set", f"drafter.path={drafter}"]
    words += ["--set", "workload.dataset=demo", "--set", "engine.dtype=float32"]
    words += ["--fix", str(fixed), "--prompts", "8"]
    first = subprocess.Popen(
        command(tmp_path / "out", *words), cwd=REPO, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 600
    while not (tmp_path / ".fixed.partial" / "proof-1" / "evidence" / "expected.json").exists():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.1)
    first.kill()
    first.wait(timeout=60)
    assert not fixed.exists()
    again = run(tmp_path / "out", *words)
    assert again.returncode == 0, again.stderr
    # The diagnosis and the proof are both gone on with.
    assert again.stderr.count("expected: found before") == 2
    assert len(list((tmp_path / "out" / "diagnose").iterdir())) == 1
    assert json.loads((fixed / "mended.json").read_text())["proven"]
    assert not list(tmp_path.glob(".fixed*"))
