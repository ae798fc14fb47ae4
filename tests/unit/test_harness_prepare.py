"""What an engine is told to serve for each variant."""

from __future__ import annotations

import json
from pathlib import Path

from engines.catalog import adapter
from harness.plan.schema import Plan
from harness.prepare import Prepared


def test_the_baseline_knows_the_drafter_it_is_compared_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    drafter = tmp_path / "drafter"
    prepared = Prepared(
        name="vllm",
        adapter=adapter("vllm"),
        plan=Plan(),
        why="",
        target=tmp_path,
        drafter=drafter,
        urls={},
        prompts=[],
        cells=[],
    )
    baseline, speculative = prepared.spec("baseline"), prepared.spec("speculative")
    assert (baseline.drafter, baseline.pair_drafter) == (None, drafter)
    assert speculative.drafter == drafter
    assert baseline.max_model_len == speculative.max_model_len == 512
