"""Samples by real vLLM and SGLang: token for token those of the reference engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.base import EngineUsageError
from engines.install import engine_python
from training.gate import Gate
from training.generate import stage
from training.plan import read_plan
from training.samples import Sample, read_samples

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

PROMPTS = 8


def generated(out: Path, engine: str, *more: str) -> tuple[Gate, list[Sample]]:
    sets = [f"generate.engine={engine}", f"workload.num_prompts={PROMPTS}", "engine.dtype=float32"]
    sets += ["engine.max_model_len=1024", "engine.kv_cache_gib=1", "generate.concurrency=4"]
    gate = stage.run(read_plan("demo", [*sets, *more]), out / engine)
    return gate, list(read_samples(out / engine / "samples"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """What the embedded engine answers, its thinking between think tokens."""
    return generated(tmp_path_factory.mktemp("reference"), "reference")[1]


@pytest.mark.parametrize(
    ("engine", "environment", "more", "seen"),
    [
        # The parser puts the thinking into a field of its own.
        ("vllm", "vllm-cpu", ("engine.reasoning_parser=deepseek_r1",), ("deepseek_r1",)),
        ("sglang", "sglang-cpu", (), ()),
    ],
)
def test_the_same_samples_as_the_reference_engines(
    engine: str,
    environment: str,
    more: tuple[str, ...],
    seen: tuple[str, ...],
    reference: list[Sample],
    tmp_path: Path,
) -> None:
    try:
        engine_python(environment)
    except EngineUsageError as error:
        pytest.skip(str(error))
    gate, samples = generated(tmp_path, engine, *more)
    assert samples == reference and len(samples) == PROMPTS
    assert all(one.ids_from == "server" and one.agrees for one in samples)
    assert all(check.passed for check in gate.checks)
    assert all(word in (tmp_path / engine / "samples" / "engine.log").read_text() for word in seen)
    manifest = (tmp_path / engine / "samples" / "manifest.json").read_text()
    assert '"version": null' not in manifest  # the engine was asked for its own
