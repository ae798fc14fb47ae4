"""The rows that vLLM's runner hands over, in shapes that the engines' own tests do not reach.

A chunk in the middle of a prompt beside decoding requests, and rejected rows that are left out
(`disable_padded_drafter_batch`): the runner and the drafter are stand-ins with vLLM's own fields.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engines.trace.launch import PLUGIN
from engines.trace.read import read_whole

POSITIONS = torch.tensor([96, 97, 98, 20, 21, 22, 23, 5, 6])
TOKENS = torch.tensor([11, 12, 13, 30, 31, 32, 33, 41, 42])
STATES = torch.arange(18.0).view(9, 2)
CUTS = [0, 3, 7, 9]
"""A chunk of three rows, a verify step of four, the last two rows of a prompt of seven."""


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PLUGIN))
    for name in ("trace_vllm", "trace_files"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import trace_vllm  # type: ignore[import-not-found]

    return trace_vllm


class Drafter:
    def propose(self, **_: Any) -> torch.Tensor:
        return torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])


def metadata(cuts: list[int]) -> Any:
    return SimpleNamespace(query_start_loc_cpu=torch.tensor(cuts))


def make_runner(kept: torch.Tensor | None, cuts: list[int]) -> Any:
    """A runner that hands over all rows, or the `kept` ones cut by `cuts`."""
    batch = SimpleNamespace(
        req_ids=["cmpl-a-0-0123abcd", "cmpl-b-0-0123abcd", "cmpl-c-0-0123abcd"],
        num_prompt_tokens=np.array([300, 10, 7]),
        vocab_size=100,
    )
    runner = SimpleNamespace(
        input_batch=batch,
        input_ids=SimpleNamespace(gpu=TOKENS),
        discard_request_mask=SimpleNamespace(np=np.array([True, False, False])),
        drafter=Drafter(),
        _get_positions=lambda rows: POSITIONS[:rows],
    )

    def propose_draft_token_ids(*_: Any) -> Any:
        states = STATES if kept is None else STATES[kept]
        return runner.drafter.propose(
            target_hidden_states=states, common_attn_metadata=metadata(cuts)
        )

    runner.propose_draft_token_ids = propose_draft_token_ids
    return runner


def trace(plugin: Any, runner: Any, sampled: Any, folder: Path) -> dict[str, Any]:
    worker = SimpleNamespace(model_runner=runner, rank=0)
    told = plugin.VllmTrace.begin_trace(worker, str(folder))
    assert told["traced"]
    plugin.VllmTrace.begin_trace(worker, str(folder))  # again: nothing is wrapped twice
    drafts = runner.propose_draft_token_ids(
        None, sampled, None, None, None, None, None, metadata(CUTS), None
    )
    assert drafts.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    read = read_whole(folder)
    assert read.problems == ()
    assert {name: len(steps) for name, steps in read.steps.items()} == {"a": 1, "b": 1, "c": 1}
    return {name: steps[0] for name, steps in read.steps.items()}


def test_padded_rows_and_a_chunk(plugin: Any, tmp_path: Path) -> None:
    sampled = torch.tensor([[55, -1, -1, -1], [31, 60, -1, -1], [70, -1, -1, -1]])
    steps = trace(plugin, make_runner(None, CUTS), sampled, tmp_path)
    chunk, verify, prompt = steps["a"], steps["b"], steps["c"]
    assert (chunk.kind, chunk.valid, chunk.next_token) == ("prefill", 3, None)
    assert (chunk.positions.tolist(), chunk.drafts.tolist()) == ([96, 97, 98], [])
    assert (verify.kind, verify.valid, verify.next_token) == ("decode", 2, 60)
    assert verify.token_ids.tolist() == [30, 31, 32, 33]
    assert torch.equal(verify.aux, STATES[3:7])
    assert verify.drafts.tolist() == [4, 5, 6]
    assert (prompt.kind, prompt.valid, prompt.next_token) == ("prefill", 2, 70)
    assert {step.batch for step in steps.values()} == {3}


def test_rejected_rows_that_are_left_out(plugin: Any, tmp_path: Path) -> None:
    kept, cuts = torch.tensor([0, 1, 2, 3, 4, 7, 8]), [0, 3, 5, 7]
    steps = trace(plugin, make_runner(kept, cuts), [[], [31, 60], [70]], tmp_path)
    verify = steps["b"]
    assert (verify.valid, verify.next_token) == (2, 60)
    assert verify.positions.tolist() == [20, 21]
    assert verify.token_ids.tolist() == [30, 31]
    assert torch.equal(verify.aux, STATES[3:5])
    assert (steps["a"].next_token, steps["c"].positions.tolist()) == (None, [5, 6])


def test_a_runner_that_drafts_elsewhere_is_refused(plugin: Any, tmp_path: Path) -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace(), rank=0)
    told = plugin.VllmTrace.begin_trace(worker, str(tmp_path))
    assert not told["traced"]
    assert "SimpleNamespace" in told["why"]
