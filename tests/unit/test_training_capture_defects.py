"""Each way in which captured states can be wrong is named by the check that should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from capture_planted import (
    LENGTHS,
    Wrapped,
    check,
    failed,
    planted,
    tiny_samples,  # noqa: F401  # a fixture
    tiny_target,  # noqa: F401  # a fixture
    tiny_work,  # noqa: F401  # a fixture
)
from capture_samples import plan_for, write_samples

from engines.capture.base import CaptureSpec, RowStates, open_capturer
from engines.capture.target import capture_target, final_norm
from harness.errors import GateFailed
from training.capture import stage
from training.capture.checks import stacked
from training.errors import TrainingError
from training.samples import Sample


def _last(change: Callable[[Any], Any]) -> Callable[[list[RowStates]], list[RowStates]]:
    def changed(states: list[RowStates]) -> list[RowStates]:
        return [
            RowStates(token_ids=s.token_ids, aux=s.aux, last_normed=change(s.last_normed))
            for s in states
        ]

    return changed


def test_a_missing_final_norm_is_named(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = capture_target(target).norm()
    # Back to before the norm, at a length of its own: what an engine's pre-norm states are.
    gate, told = planted(plan_for(target), work, monkeypatch, _last(lambda last: last / norm * 7.5))
    assert {"proof", "final_norm"} <= set(failed(gate))
    assert "the final norm is missing" in told and "applied once more the share is 1.000" in told


def test_a_final_norm_applied_twice_is_named(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = capture_target(target)
    gate, told = planted(
        plan_for(target),
        work,
        monkeypatch,
        _last(lambda last: final_norm(last, facts.norm(), facts.norm_eps)),
    )
    assert "proof" in failed(gate)
    assert "the final norm was applied twice" in told


def test_layers_off_by_one_are_named(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(spec: CaptureSpec) -> CaptureSpec:
        return CaptureSpec(
            target=spec.target,
            aux_layers=tuple(layer - 1 for layer in spec.aux_layers),
            max_length=spec.max_length,
            batch=spec.batch,
            workdir=spec.workdir,
        )

    gate, told = planted(plan_for(target), work, monkeypatch, spec=shifted)
    assert failed(gate) == ["layers"]
    assert "1 is the reference's 0, 2 is the reference's 1" in told
    assert "off by one (-1)" in told


def test_states_swapped_between_samples_are_named(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(states: list[RowStates]) -> list[RowStates]:
        # Neighbours of one length change their states, not their token ids.
        out = list(states)
        for i in range(len(states) - 1):
            a, b = out[i], out[i + 1]
            if len(a.token_ids) == len(b.token_ids) and states[i] is a:
                out[i] = RowStates(token_ids=a.token_ids, aux=b.aux, last_normed=b.last_normed)
                out[i + 1] = RowStates(token_ids=b.token_ids, aux=a.aux, last_normed=a.last_normed)
        return out

    gate, _ = planted(plan_for(target), work, monkeypatch, swapped)
    assert {"proof", "own_sample", "batch_parity"} <= set(failed(gate))
    assert "s006 holds the states of s007" in check(gate, "own_sample").reason
    assert "norm is not the cause" in check(gate, "proof").advice


def test_zero_rows_and_numbers_that_are_none_are_named(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeroed(states: list[RowStates]) -> list[RowStates]:
        for s in states:
            if len(s.token_ids) == 64:  # s001: the second layer's row of one token
                s.aux[3, 64:] = 0
            if len(s.token_ids) == 74:  # s005
                s.aux[70, 5] = float("nan")
        return states

    gate, _ = planted(plan_for(target), work, monkeypatch, zeroed)
    assert "samples with a row of zeros: s001" in check(gate, "zero_rows").reason
    assert "s005" in check(gate, "finite").reason


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_numbers_that_are_none_survive_storing(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def broken(states: list[RowStates]) -> list[RowStates]:
        for s in states:
            s.last_normed[0, 0] = float("inf")
        return states

    gate, _ = planted(plan_for(target, dtype=dtype), work, monkeypatch, broken)
    assert check(gate, "finite").value == len(LENGTHS)


def test_wrong_token_ids_are_named(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(states: list[RowStates]) -> list[RowStates]:
        for s in states:
            if len(s.token_ids) == 64:
                s.token_ids[0] += 1
        return states

    gate, _ = planted(plan_for(target), work, monkeypatch, other)
    assert failed(gate) == ["token_ids"]
    assert ": s001" in check(gate, "token_ids").reason


def test_a_changed_shard_is_named_by_its_checksum(target: Path, work: Path) -> None:
    plan = plan_for(target, shard_tokens=120)
    stage.run(plan, work)
    shard = work / "states/states-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(bytes(data))
    (work / "states/gate.json").unlink()
    with pytest.raises(GateFailed, match=r"checksums.*states-00002.*remove the shard"):
        stage.run(plan, work)


def test_states_of_another_length_stop_the_stage(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(states: list[RowStates]) -> list[RowStates]:
        return [
            RowStates(token_ids=s.token_ids, aux=s.aux[:-1], last_normed=s.last_normed)
            for s in states
        ]

    monkeypatch.setattr(
        stage, "open_capturer", lambda name, s: Wrapped(open_capturer(name, s), short)
    )
    with pytest.raises(TrainingError, match="gave states of the shapes"):
        stage.run(plan_for(target, batch=8), work)
    assert not list((work / "states").glob("*.partial"))


def test_a_large_capture_of_wrong_states_ends_at_its_beginning(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, told = planted(plan_for(target, batch=2), work, monkeypatch, _last(lambda last: last * 3))
    assert "final_norm" in failed(gate) and "nothing more was captured" in told
    assert not list((work / "states").glob("*.safetensors"))


def test_sampled_answers_are_proved_among_the_likeliest(
    target: Path, work: Path, samples: list[Sample]
) -> None:
    sampled = [msgspec.structs.replace(sample, greedy=False) for sample in samples]
    write_samples(work, sampled)
    gate = stage.run(plan_for(target), work)
    assert "no sample is greedy" in check(gate, "proof").reason


def test_stacked_lays_layers_apart() -> None:
    aux, last = torch.arange(8.0).view(2, 4), torch.arange(4.0).view(2, 2)
    assert stacked(aux, last).tolist() == [[[0, 1], [2, 3], [0, 1]], [[4, 5], [6, 7], [2, 3]]]
