"""Which prompts a server that runs already is asked, and what is told of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import save

from harness.attach import fitting_prompts, served_models
from harness.errors import UsageError
from harness.plan.schema import EngineSection, Plan, TargetSection


def test_built_in_prompts_beyond_the_servers_context_are_left_out_and_counted() -> None:
    every, notes = fitting_prompts(Plan(), None, [None])
    assert notes == ()
    kept, (note,) = fitting_prompts(Plan(), None, [None, 8192, 2048])
    assert 0 < len(kept) < len(every)
    left = len(every) - len(kept)
    assert note.startswith(f"{left} of {len(every)} built-in prompts are left out")
    assert "context of 2048 tokens by a safe estimate (target.path makes it exact)" in note
    assert fitting_prompts(Plan(), None, [100_000]) == (every, ())


def test_the_plans_context_wins_over_the_servers() -> None:
    plan = Plan(engine=EngineSection(max_model_len=2048))
    kept, (note,) = fitting_prompts(plan, None, [100_000])
    assert "2048" in note
    assert kept == fitting_prompts(Plan(), None, [2048])[0]


def test_with_the_tokenizer_lengths_are_exact(tmp_path: Path) -> None:
    save(tmp_path)
    plan = Plan(target=TargetSection(path=str(tmp_path)))
    kept, (note,) = fitting_prompts(plan, None, [1000])
    assert "estimate" not in note
    assert len(kept) >= len(fitting_prompts(Plan(), None, [1000])[0])


def test_a_context_that_surely_fits_no_prompt_is_told() -> None:
    with pytest.raises(UsageError, match=r"context of 200 tokens; set target\.path"):
        fitting_prompts(Plan(), None, [200])


@pytest.mark.parametrize(
    ("owner", "engine"),
    [("vllm", "vllm"), ("sglang", "sglang"), ("spec-harness", "reference"), ("me", None)],
)
def test_a_server_says_which_engine_it_is(owner: str, engine: str | None) -> None:
    body = f'{{"data": [{{"id": "m", "owned_by": "{owner}"}}]}}'.encode()
    assert served_models(body)[0].engine == engine
    odd = served_models(b'{"data": [{"id": "m", "owned_by": {}}, {"id": "n"}]}')
    assert [model.engine for model in odd] == [None, None]
