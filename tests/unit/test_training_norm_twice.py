"""A final norm applied twice: states of the right size, whose argmax is often the right one too.

Whatever path brings such states to the training, a gate refuses them: `capture`'s where they come
from the engine, stored or not, and `train`'s proof where they are spoilt behind that gate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from capture_planted import (
    Wrapped,
    check,
    failed,
    planted,
    tiny_samples,  # noqa: F401  # a fixture
    tiny_target,  # noqa: F401  # a fixture
    tiny_work,  # noqa: F401  # a fixture
)
from capture_samples import plan_for, write_samples
from hypothesis import given
from hypothesis import strategies as st

from engines.capture.base import RowStates, open_capturer
from engines.capture.target import capture_target, final_norm
from harness.errors import GateFailed
from training.capture import online, stage
from training.heads import read_facts
from training.norm_count import Votes, count_votes, undone
from training.samples import Sample
from training.states import SampleStates, StoredStates, open_source
from training.train.proof import prove_states
from training.train.target import read_tensors


def twice(target: Path) -> Any:
    """The last states of captured samples, with the final norm once more."""
    facts = capture_target(target)
    norm = facts.norm()

    def again(states: list[RowStates]) -> list[RowStates]:
        return [
            RowStates(
                token_ids=s.token_ids,
                aux=s.aux,
                last_normed=final_norm(s.last_normed, norm, facts.norm_eps),
            )
            for s in states
        ]

    return again


@pytest.mark.parametrize("capture", [{}, {"online": True}, {"dtype": "fp8"}], ids=str)
@pytest.mark.parametrize("greedy", [True, False])
def test_capture_names_it_where_the_proof_lets_it_pass(
    target: Path,
    work: Path,
    samples: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    capture: dict[str, Any],
    greedy: bool,
) -> None:
    write_samples(work, [msgspec.structs.replace(s, greedy=greedy) for s in samples])
    # No proof at all is asked for: what is left must tell it by itself.
    plan = plan_for(target, least_proof=0.0, **capture)
    gate, told = planted(plan, work, monkeypatch, twice(target))
    assert check(gate, "final_norm").passed
    assert {"norm_once", "reference_norm"} <= set(failed(gate))
    assert "the final norm was applied twice" in told


def test_capture_of_once_normed_states_passes_and_tells_by_how_much(
    target: Path, work: Path
) -> None:
    gate = stage.run(plan_for(target, dtype="fp8"), work)
    once = check(gate, "norm_once")
    assert once.value < 10 and "127 only as captured" in once.reason  # 8 bits turn near ties over
    found = check(gate, "reference_norm")
    assert found.value > 0.99 > found.limit


@pytest.mark.parametrize("is_online", [False, True], ids=["stored", "online"])
def test_train_refuses_it_behind_a_gate_that_passed(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch, is_online: bool
) -> None:
    plan = plan_for(target, online=is_online)
    stage.run(plan, work)
    again = twice(target)
    if is_online:
        monkeypatch.setattr(
            online, "open_capturer", lambda name, s: Wrapped(open_capturer(name, s), again)
        )
    else:
        read = StoredStates.read

        def spoilt(self: StoredStates, index: int) -> SampleStates:
            states = read(self, index)
            (row,) = again([states])
            return msgspec.structs.replace(states, last_normed=row.last_normed)

    tensors = read_tensors(read_facts(target))
    source = open_source(plan, work)
    members, greedy = range(len(source.lengths)), frozenset(source.sample_ids)

    def proved() -> float:
        return prove_states(source, members, greedy, tensors, least=0.0, layers=2)

    if not is_online:
        assert proved() > 0.98
        monkeypatch.setattr(StoredStates, "read", spoilt)
    with pytest.raises(GateFailed, match="they passed the final norm twice; capture them again"):
        proved()
    source.close()


@given(st.integers(0, 500), st.integers(0, 500))
def test_votes_that_chance_could_give_are_no_verdict(kept: int, undone: int) -> None:
    votes = Votes(kept=kept, undone=undone, tokens=1000)
    if undone <= kept or undone < 10:
        assert not votes.twice
    if kept == 0 and undone >= 10:
        assert votes.twice


def test_a_constant_norm_gives_no_votes_and_a_zero_weight_no_number_that_is_none() -> None:
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(200, 16, generator=generator), torch.randn(50, 16)
    tokens = (states @ head.T).argmax(-1)
    votes = count_votes([(states, tokens)], head, torch.full((16,), 2.5))
    assert (votes.kept, votes.undone, votes.tokens) == (0, 0, 200)
    weight = torch.ones(16)
    weight[3] = 0
    assert undone(states * weight, weight).isfinite().all()
