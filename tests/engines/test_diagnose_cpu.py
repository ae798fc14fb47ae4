"""`python -m harness diagnose` on vLLM and SGLang themselves, on the CPU, with the demo pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineUsageError
from engines.install import engine_python

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

REPO = Path(__file__).resolve().parents[2]
ENVIRONMENTS = {"vllm": "vllm-cpu", "sglang": "sglang-cpu"}
MADE = {"audit", "expected", "observed", "states", "replay"}
"""What a trace and the target's own text are looked at for."""


def diagnose(engine: str, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    try:
        engine_python(ENVIRONMENTS[engine])
    except EngineUsageError as error:
        pytest.skip(str(error))
    words = [sys.executable, "-m", "harness", "diagnose", "--engine", engine, "--out", str(out)]
    return subprocess.run(
        [*words, *more], cwd=REPO, capture_output=True, text=True, check=False, timeout=1800
    )


def record(folder: Path, name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / name).read_text())
    return told


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_healthy_pair_has_nothing_wrong(engine: str, demo_pair: Path, tmp_path: Path) -> None:
    done = diagnose(engine, tmp_path, "--prompts", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(done.stdout.strip().splitlines()[-1])
    told, dossier = record(folder, "diagnosis.json"), record(folder, "dossier.json")
    assert (told["cause"], told["collapse"], told["stage"]) == ("none", False, None)
    assert {name for name in MADE if dossier[name] is None} == set()
    # In float32 the engines compute what the expectation does: no token is another one.
    observed = dossier["observed"]
    assert observed["identical"]["hits"] == observed["identical"]["of"] > 0
    counts, wanted = observed["acceptance"]["counts"], dossier["expected"]["acceptance"]["counts"]
    assert counts["drafts"] == 2 * wanted["drafts"]
    assert counts["accepted"] == 2 * wanted["accepted"]
    assert observed["counted_otherwise"] is None
    best = dossier["replay"]["readings"][0]
    assert best["reading"] == "as declared"
    facts = dossier["audit"]["log_facts"]
    assert facts["method"].lower() == "eagle3"
    assert facts["k"] == "3"


UNSERVED = "layers_unnamed.1.s0"
"""Of the demo's six layers vLLM's defaults are two and one of them twice: it dies of a request."""
PLANTED = [
    ("vllm", "layers_plus_one.1.s0"),
    ("vllm", "layers_descending.1.s0"),
    ("vllm", UNSERVED),
    ("vllm", "d2t_absolute.1.s0"),
    ("vllm", "vllm_states_moved.1.s0"),
    ("vllm", "vllm_drafts_swapped.1.s0"),
    ("sglang", "layers_descending.1.s0"),
    ("sglang", "embeddings_overwritten.1.s0"),
    ("sglang", "sglang_states_zero.1.s0"),
]


@pytest.mark.full
@pytest.mark.parametrize(("engine", "case"), PLANTED)
def test_what_is_planted_is_named(engine: str, case: str, tmp_path: Path) -> None:
    """Exit code 0: the cause that is called is the right one."""
    done = diagnose(engine, tmp_path, "--self-test", "--seeds", "1", "--only", case)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = record(tmp_path / "self-test" / engine / "cases", f"{case}.json")
    assert kept["called"] in kept["right"]
    assert kept["observed"] is not None or case == UNSERVED
