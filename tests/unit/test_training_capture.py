"""The capture stage on tiny random targets: what is stored, resumed, refused and proved."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from capture_planted import (
    Wrapped,
    check,
    tiny_samples,  # noqa: F401  # a fixture
    tiny_target,  # noqa: F401  # a fixture
    tiny_work,  # noqa: F401  # a fixture
)
from capture_samples import plan_for, write_samples
from reference_models import build_drafter

from drafters.checkpoint import save
from engines.base import EngineUsageError
from engines.capture.base import Capturer, CaptureSpec, RowStates, open_capturer
from engines.capture.target import capture_target
from harness.errors import GateFailed, UsageError
from training.capture import stage, store
from training.capture.store import read_index
from training.errors import TrainingError
from training.gate import read_gate
from training.plan import HeadSection
from training.samples import Sample, read_samples
from training.states import open_source, open_states


def test_stored_states_are_the_targets(
    target: Path, work: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(target, dtype="float32", shard_tokens=120)
    gate = stage.run(plan, work)
    made = read_gate(work / "samples")
    assert gate.passed and made and gate.inputs == {"generate": made.output}
    states = open_states(work / "states")
    assert list(states.sample_ids) == [sample.id for sample in samples]
    assert list(states.lengths) == [len(sample.token_ids) for sample in samples]
    assert len(list((work / "states").glob("*.safetensors"))) > 2
    other = open_capturer(
        "transformers",
        CaptureSpec(target=target, aux_layers=(1, 2), max_length=100, batch=1, workdir=work),
    )
    for number, sample in enumerate(samples):
        found = states.read(number)
        wanted = other.capture([sample.token_ids])[0]
        assert found.token_ids.tolist() == list(sample.token_ids)
        assert (found.loss_from, found.category) == (sample.loss_from, sample.category)
        torch.testing.assert_close(found.aux, wanted.aux, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.last_normed, wanted.last_normed, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_fewer_bytes_and_what_they_cost(target: Path, work: Path, dtype: str) -> None:
    stage.run(plan_for(target, dtype="float32"), work)
    exact = open_states(work / "states")
    (work / "exact").mkdir()
    (work / "states").rename(work / "exact/states")
    gate = stage.run(plan_for(target, dtype=dtype), work)
    states = open_states(work / "states")
    for number in range(len(states.lengths)):
        found, true = states.read(number), exact.read(number)
        error = (found.aux.float() - true.aux).norm() / true.aux.norm()
        assert error < (0.003 if dtype == "bfloat16" else 0.035)
    if dtype == "fp8":
        assert found.aux.dtype == torch.float32
        assert check(gate, "fp8_error").value < 0.035
        # 64 numbers a row share a scale of 4 bytes here; of a real target's 7168 it is nothing.
        assert check(gate, "fp8_bytes").value < 0.6


def test_stream_keeps_the_order_asked_for(target: Path, work: Path) -> None:
    stage.run(plan_for(target, shard_tokens=120), work)
    states = open_states(work / "states")
    order = [3, 3, 9, 0, 5, 1]
    found = list(states.stream(order))
    assert [item.sample_id for item in found] == [states.sample_ids[i] for i in order]
    torch.testing.assert_close(found[2].aux, states.read(9).aux)


def test_a_damaged_shard_is_named(target: Path, work: Path) -> None:
    stage.run(plan_for(target, shard_tokens=120), work)
    shard = work / "states/states-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(TrainingError, match=r"states-00001\.safetensors holds"):
        open_states(work / "states")
    shard.unlink()
    with pytest.raises(TrainingError, match=r"states-00001\.safetensors is missing"):
        open_states(work / "states")
    stage.run(plan_for(target, shard_tokens=120), work)  # captures that shard anew
    open_states(work / "states")


def _digests(work: Path) -> list[str]:
    index = read_index(work / "states")
    assert index is not None
    return [shard.sha256 for shard in index.shards]


def test_an_interrupted_capture_goes_on_to_the_same_bits(
    target: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(target, shard_tokens=120)
    whole = tmp_path / "whole"
    write_samples(whole, list(stage_samples(work)))
    stage.run(plan, whole)
    calls = []

    def counted(name: str, spec: CaptureSpec) -> Capturer:
        return Wrapped(open_capturer(name, spec), lambda states: states, calls)

    class Cut(Exception):
        pass

    def cut(name: str, spec: CaptureSpec) -> Capturer:
        def change(states: list[RowStates]) -> list[RowStates]:
            if len(calls) > 3:
                raise Cut
            return states

        return Wrapped(open_capturer(name, spec), change, calls)

    monkeypatch.setattr(stage, "open_capturer", cut)
    with pytest.raises(Cut):
        stage.run(plan, work)
    assert read_gate(work / "states") is None
    have = len(_digests(work))
    assert 0 < have < len(_digests(whole))
    assert not list((work / "states").glob(".*.partial"))
    (work / "states/.states-00004.safetensors.partial").write_bytes(b"left by a kill")
    with pytest.raises(UsageError, match="shards are captured"):
        open_states(work / "states")
    calls.clear()
    monkeypatch.setattr(stage, "open_capturer", counted)
    stage.run(plan, work)
    assert _digests(work) == _digests(whole)
    assert not list((work / "states").glob(".*.partial"))
    calls.clear()
    assert stage.run(plan, work).passed  # finished: does nothing
    assert not calls


def stage_samples(work: Path) -> Any:
    return read_samples(work / "samples")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float32"}, "capture.dtype bfloat16 -> float32"),
        ({"aux_layers": (0, 2)}, r"capture.aux_layers \[1, 2\] -> \[0, 2\]"),
        ({"max_length": 60}, "capture.max_length 200 -> 60"),
    ],
)
def test_another_plan_is_never_mixed_in(
    target: Path, work: Path, change: dict[str, Any], said: str
) -> None:
    stage.run(plan_for(target), work)
    with pytest.raises(UsageError, match=said):
        stage.run(plan_for(target, **change), work)


def test_other_samples_are_never_mixed_in(target: Path, work: Path, samples: list[Sample]) -> None:
    stage.run(plan_for(target), work)
    write_samples(work, samples[:4])
    with pytest.raises(UsageError, match="the samples changed"):
        stage.run(plan_for(target), work)


def test_limits_alone_measure_anew(target: Path, work: Path) -> None:
    stage.run(plan_for(target), work)
    before = _digests(work)
    with pytest.raises(GateFailed, match="proof"):
        stage.run(plan_for(target, least_proof=1.0, least_parity=1.0), work)
    assert _digests(work) == before


def test_long_samples_are_cut_and_prompts_without_answer_left_out(
    target: Path, work: Path, samples: list[Sample]
) -> None:
    stage.run(plan_for(target, max_length=60), work)
    states = open_states(work / "states")
    kept = [sample for sample in samples if sample.loss_from < 60]
    assert list(states.sample_ids) == [sample.id for sample in kept]
    assert list(states.lengths) == [min(60, len(sample.token_ids)) for sample in kept]


def test_mistakes_are_said_in_one_line(target: Path, work: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the stage generate has not ended"):
        stage.run(plan_for(target), tmp_path / "empty")
    with pytest.raises(EngineUsageError, match=r"aux layer 9: .* has 3 layers"):
        stage.run(plan_for(target, aux_layers=(2, 9)), work)
    with pytest.raises(UsageError, match=r"\[2, 1, 2\] names a layer twice"):
        stage.run(plan_for(target, aux_layers=(2, 1, 2)), work)
    with pytest.raises(UsageError, match="no sample has a token that carries loss"):
        stage.run(plan_for(target, max_length=3), work)
    with pytest.raises(UsageError, match="3 layers, too few for the usual aux layers"):
        stage.run(plan_for(target, aux_layers=None), work)
    assert not (work / "states").exists()


def test_a_finetuned_drafters_own_layers_are_captured(
    target: Path, work: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "drafter"
    save(build_drafter("llama", aux_layers=(2, 0)), folder)
    plan = msgspec.structs.replace(
        plan_for(target, aux_layers=None), drafter=HeadSection(finetune=str(folder))
    )
    stage.run(plan, work)
    assert open_states(work / "states").aux_layers == (2, 0)


def test_the_embeddings_and_the_last_state_are_layers_too(target: Path, work: Path) -> None:
    gate = stage.run(plan_for(target, aux_layers=(3, 0), dtype="float32"), work)
    states = open_states(work / "states").read(1)
    torch.testing.assert_close(states.aux[:, :64], states.last_normed)
    embedding = capture_target(target).embedding()
    torch.testing.assert_close(states.aux[:, 64:], embedding[states.token_ids])
    assert check(gate, "layers").value == "[3, 0, 3]"


def test_too_small_a_disk_is_said_before(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(stage.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(UsageError, match=r"bytes a token.*are free: make room"):
        stage.run(plan_for(target), work)


def test_a_disk_that_fills_up_keeps_what_is_whole(
    target: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(target, shard_tokens=120)
    real, left = store._write, [25]

    def full(file: int, data: Any, at: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, data, at)

    monkeypatch.setattr(store, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        stage.run(plan, work)
    have = _digests(work)
    assert have and not list((work / "states").glob(".*.partial"))
    monkeypatch.setattr(store, "_write", real)
    stage.run(plan, work)
    assert _digests(work)[: len(have)] == have


def test_online_gives_what_is_stored(target: Path, work: Path, tmp_path: Path) -> None:
    stage.run(plan_for(target, dtype="float32"), work)
    stored = open_states(work / "states")
    other = tmp_path / "online"
    write_samples(other, list(stage_samples(work)))
    plan = plan_for(target, online=True, buffer_samples=2, batch=3)
    assert stage.run(plan, other).passed
    assert not list((other / "states").glob("*.safetensors"))
    source: Any = open_source(plan, other)
    assert list(source.lengths) == list(stored.lengths)
    assert list(source.sample_ids) == list(stored.sample_ids)
    order = [9, 2, 2, 7, 0]
    for index, found in zip(order, source.stream(order), strict=True):
        wanted = stored.read(index)
        assert found.sample_id == wanted.sample_id
        torch.testing.assert_close(found.aux, wanted.aux, atol=1e-4, rtol=1e-4)
    assert source.served == 5 and source.waited_s >= 0
    torch.testing.assert_close(
        source.read(4).last_normed, stored.read(4).last_normed, atol=1e-4, rtol=1e-4
    )
    for _ in source.stream(range(10)):
        break  # the thread ends with the loop
    source.close()
