"""What vLLM and SGLang accept of a trained drafter, beside the trainer's own expectation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.base import EngineUsageError
from engines.install import engine_python
from training.evaluation.stage import run_drafter
from training.plan import read_plan

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_accepts_what_is_expected(engine: str, demo_pair: Path, tmp_path: Path) -> None:
    try:
        engine_python(f"{engine}-cpu")
    except EngineUsageError as error:
        pytest.skip(str(error))
    sets = ["evaluate.prompts=16", "generate.concurrency=4", f"evaluate.engines={engine}"]
    plan = read_plan("demo", sets)
    gate = run_drafter(plan, tmp_path, drafter=demo_pair / "drafter-mla")
    assert gate.passed
    offline, online = json.loads((tmp_path / "evaluation.json").read_text())["rows"]
    assert online["answered"] == 16
    assert abs(online["gap"]) <= 0.03
    # float32, greedy: the same text, and the same verify steps to the last one
    assert online["same_outputs"] == 16
    assert online["drafts"] == offline["drafts"]
