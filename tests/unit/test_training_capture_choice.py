"""The target's choice beside its states: computed once, stored, proved, and what lacks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from capture_planted import (
    check,
    failed,
    tiny_samples,  # noqa: F401  # a fixture
    tiny_target,  # noqa: F401  # a fixture
    tiny_work,  # noqa: F401  # a fixture
)
from capture_samples import plan_for, write_samples
from reference_models import build_target

from engines.capture.base import RowStates, open_capturer
from engines.capture.target import capture_target
from harness.errors import GateFailed
from training.capture import stage
from training.capture.choice import WithChoice
from training.capture.inputs import read_inputs
from training.capture.store import Layout, read_index
from training.errors import TrainingError
from training.gate import Gate, read_gate
from training.samples import Sample
from training.states import SampleStates, open_source, open_states
from training.train.feed import load_row, to_device
from training.train.rows import Row


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_every_row_has_the_argmax_of_the_states_before_storing(
    target: Path, work: Path, samples: list[Sample], dtype: str
) -> None:
    gate = stage.run(plan_for(target, dtype="float32"), work)
    exact = open_states(work / "states")
    head = capture_target(target).head()
    wanted = [(exact.read(i).last_normed @ head.T).argmax(-1) for i in range(len(samples))]
    if dtype != "float32":
        (work / "states").rename(work / "exact")
        gate = stage.run(plan_for(target, dtype=dtype), work)
    found = check(gate, "choice")
    assert found.passed and found.value >= 0.98
    assert open_states(work / "states").layout.choice
    for number, states in enumerate(open_states(work / "states").stream(range(len(samples)))):
        assert states.choice is not None and states.choice.dtype == torch.int32
        same = states.choice.long() == wanted[number]
        assert same.float().mean() > 0.97  # batches round otherwise
        answer = list(samples[number].token_ids[samples[number].loss_from :])
        assert states.choice[samples[number].loss_from - 1 : -1].tolist() == answer  # greedy


def test_online_states_bring_it_too(target: Path, work: Path, samples: list[Sample]) -> None:
    plan = plan_for(target, online=True)
    assert check(stage.run(plan, work), "choice").value == 1.0
    source = open_source(plan, work)
    for number, states in enumerate(source.stream(range(len(samples)))):
        assert states.choice is not None and len(states.choice) == len(states.token_ids)
        answer = list(samples[number].token_ids[samples[number].loss_from :])
        assert states.choice[samples[number].loss_from - 1 : -1].tolist() == answer
    source.close()


def _planted(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    class Wrong(WithChoice):
        def capture(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
            return [
                RowStates(
                    token_ids=s.token_ids,
                    aux=s.aux,
                    last_normed=s.last_normed,
                    choice=change(s.choice),  # type: ignore[arg-type]
                )
                for s in super().capture(rows)
            ]

    monkeypatch.setattr(stage, "WithChoice", Wrong)


@pytest.mark.parametrize(
    "change",
    [lambda c: c.roll(1), lambda c: torch.full_like(c, 2**31 - 1), lambda c: c * 0 - 1],
    ids=["a row late", "no token", "less than none"],
)
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_choices_of_other_rows_are_named(
    target: Path,
    work: Path,
    samples: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    greedy: bool,
) -> None:
    write_samples(work, [msgspec.structs.replace(s, greedy=greedy) for s in samples])
    _planted(monkeypatch, change)
    with pytest.raises(GateFailed, match="the choices are of other rows"):
        stage.run(plan_for(target), work)
    assert failed(read_gate(work / "states")) == ["choice"]


def test_a_folder_without_choices_is_finished_as_it_was_begun(
    target: Path, work: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(target, shard_tokens=120)
    inputs = read_inputs(plan, work)
    old = msgspec.structs.replace(
        inputs, layout=msgspec.structs.replace(inputs.layout, choice=False)
    )
    with monkeypatch.context() as patched:
        patched.setattr(stage, "read_inputs", lambda plan, work: old)
        before: Gate = stage.run(plan, work)
    index = read_index(work / "states")
    assert index is not None and "choice" not in (work / "states/index.json").read_text()
    again = stage.run(plan, work)  # done already, by its digest
    assert again == before
    (work / "states" / index.shards[1].file).unlink()
    assert stage.run(plan, work).passed
    found = open_states(work / "states")
    assert read_index(work / "states") == index
    assert found.read(0).choice is None


def test_a_layout_without_choices_is_written_as_before() -> None:
    old = Layout(aux_layers=(1, 2), hidden_size=4, dtype="fp8")
    assert b"choice" not in msgspec.json.encode(old)
    assert msgspec.json.decode(msgspec.json.encode(old), type=Layout) == old
    new = msgspec.structs.replace(old, choice=True)
    assert msgspec.json.decode(msgspec.json.encode(new), type=Layout) == new
    assert new.size(3, 10) == old.size(3, 10) + 4 * 10


class _Source:
    """One row of given states, in the place of an engine."""

    name = "given"

    def __init__(self, last: torch.Tensor) -> None:
        self.last, self.closed = last, False

    def capture(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        return [
            RowStates(token_ids=torch.tensor(row), aux=self.last, last_normed=self.last)
            for row in rows
        ]

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounded", [True, False], ids=["bfloat16 head", "float32 head"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_neither_states_nor_head_are_rounded(
    states: torch.dtype, rounded: bool, stored: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    last = torch.randn(300, 32, generator=generator).to(states)
    head = torch.randn(700, 32, generator=generator)
    head = head.bfloat16().float() if rounded else head
    head = head.to(stored)

    class Target:
        def head(self) -> torch.Tensor:
            return head

    source = _Source(last)
    capturer = WithChoice(source, Target(), "cpu")  # type: ignore[arg-type]
    for _ in range(2):
        (found,) = capturer.capture([[7] * 300])
        assert found.choice is not None
        exact = (last.double() @ head.double().T).argmax(-1)
        assert torch.equal(found.choice.long(), exact)
        assert torch.equal(found.last_normed, last) and found.token_ids.tolist() == [7] * 300
    capturer.close()
    assert source.closed


def test_a_head_is_read_as_it_is_stored(tmp_path: Path) -> None:
    model = build_target("llama", tmp_path)
    assert capture_target(tmp_path).head().dtype == torch.float32
    model.bfloat16().save_pretrained(tmp_path)
    facts = capture_target(tmp_path)
    assert torch.equal(facts.head(), model.lm_head.weight)  # of one type too
    assert torch.equal(facts.embedding(), model.model.embed_tokens.weight)
    assert facts.norm().dtype == torch.float32


def test_a_gpu_without_room_leaves_the_head_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from training import loss

    head, last = torch.eye(6), torch.randn(9, 6)

    class Target:
        def head(self) -> torch.Tensor:
            return head

    calls = []

    def full(states: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        calls.append(len(states))
        if len(calls) == 1:
            raise torch.cuda.OutOfMemoryError("full")
        return (states @ lm_head.T).argmax(-1)

    monkeypatch.setattr(loss, "target_choice", full)
    capturer = WithChoice(_Source(last), Target(), "cpu")  # type: ignore[arg-type]
    for _ in range(2):
        (found,) = capturer.capture([[1] * 9])
        assert found.choice is not None and found.choice.tolist() == last.argmax(-1).tolist()
    assert len(calls) == 3  # the second batch does not try again
    assert capsys.readouterr().err.count("no room for the target's head") == 1


def _sample(length: int, choice: list[int] | None) -> SampleStates:
    return SampleStates(
        sample_id=f"s{length}",
        category=None,
        token_ids=torch.arange(length),
        loss_from=1,
        aux=torch.zeros(length, 8),
        last_normed=torch.zeros(length, 4),
        choice=None if choice is None else torch.tensor(choice, dtype=torch.int32),
    )


def test_a_row_has_choices_where_all_its_samples_do() -> None:
    row = Row(number=0, indices=(0, 1), tokens=5)
    loaded = load_row(row, [_sample(2, [4, 5]), _sample(3, [6, 7, 8])], 9)
    assert loaded.captured.choice is not None
    assert loaded.captured.choice.tolist() == [[4, 5, 6, 7, 8]]
    moved = to_device(loaded.captured, torch.device("cpu"), torch.bfloat16)
    assert moved.choice is not None and moved.choice.dtype == torch.int64
    mixed = load_row(row, [_sample(2, [4, 5]), _sample(3, None)], 9).captured
    assert mixed.choice is None
    assert to_device(mixed, torch.device("cpu"), torch.float32).choice is None
    for wrong, said in (([4], "but 1 choices"), ([4, 9], "outside"), ([-1, 0], "outside")):
        with pytest.raises(TrainingError, match=said):
            load_row(row, [_sample(2, wrong), _sample(3, [1, 2, 3])], 9)


def test_the_engine_itself_gives_none(target: Path, work: Path) -> None:
    from training.capture.inputs import capture_spec

    plan = plan_for(target)
    spec = capture_spec(plan, read_inputs(plan, work), work)
    assert open_capturer("reference", spec).capture([[1, 2, 3]])[0].choice is None
