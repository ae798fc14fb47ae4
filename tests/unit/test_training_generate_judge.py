"""What a plan asks for, what is left of it, what is wrong with a sample, and the gate's checks."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_samples import FORGETFUL, sample, target

from harness.errors import UsageError
from harness.load.prompts.prompt import Prompt
from training.generate.judge import Found, checks_of, examine, faults_of
from training.generate.meter import Meter
from training.generate.shards import ShardWriter
from training.generate.text import TargetText, read_text
from training.generate.wanted import talks, wanted_samples
from training.plan import GenerateSection, SamplingSection, TrainingPlan
from training.samples import Sample, read_samples

USER = {"role": "user", "content": "and then?"}


def plan(samples: int | None = None, temperature: float = 0.0, **more: Any) -> TrainingPlan:
    return TrainingPlan(
        generate=GenerateSection(samples=samples, **more),
        sampling=SamplingSection(temperature=temperature),
        seed=5,
    )


def prompts(turns: list[int]) -> list[Prompt]:
    return [
        Prompt(id=f"p#{i}", text=f"prompt {i}", turns=(USER,) * more)
        for i, more in enumerate(turns)
    ]


@given(turns=st.lists(st.integers(0, 3), min_size=1, max_size=6), count=st.integers(1, 40))
def test_as_many_as_asked_all_different_and_the_same_every_time(
    turns: list[int], count: int
) -> None:
    asked = wanted_samples(prompts(turns), plan(count, temperature=1.0))
    assert [one.index for one in asked] == list(range(count))
    assert len({one.id for one in asked}) == len({one.seed for one in asked}) == count
    assert asked == wanted_samples(prompts(turns), plan(count, temperature=1.0))
    rounds = Counter(one.round for one in asked)
    assert max(rounds) == (count - 1) // sum(1 + n for n in turns)


def test_a_prompt_asked_again_needs_a_temperature() -> None:
    assert [w.seed for w in wanted_samples(prompts([0, 0]), plan())] == [None, None]
    with pytest.raises(UsageError, match=r"generate.samples=3: there are 2 prompts, and at temp"):
        wanted_samples(prompts([0, 0]), plan(3))
    own = [Prompt(id="p", text="x", sampling={"temperature": 0.0})]
    with pytest.raises(UsageError, match=r"set sampling\.temperature"):
        wanted_samples(own, plan(2, temperature=1.0))


@given(turns=st.lists(st.integers(0, 3), min_size=1, max_size=5), data=st.data())
def test_what_is_left_is_asked_where_each_conversation_stopped(
    turns: list[int], data: st.DataObject
) -> None:
    asked = wanted_samples(prompts(turns), plan())
    have = {
        one.id: f"answer {one.id}"
        for one in asked
        if one.turn < data.draw(st.integers(0, 4), label="turns there")
    }
    left = talks(asked, have)
    for talk in left:
        first, number = talk.wanted[0], len(talk.wanted)
        assert first.id not in have and len(talk.prompt.turns) == number - 1
        messages = talk.prompt.messages or ()
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        assert len(said) == first.turn and all(text.startswith("answer ") for text in said)
        assert len(messages) == (2 * first.turn + 1 if first.turn else 0)
    assert len({talk.prompt.id for talk in left}) == len(left)
    heads = {one.prompt.id for one in asked if one.id not in have}
    assert {talk.wanted[0].prompt.id for talk in left} == heads


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TargetText:
    return read_text(target(tmp_path_factory.mktemp("target"), FORGETFUL))


def answer(text: TargetText, said: str, finish: str = "stop", **more: Any) -> Sample:
    prompt = text.prompt_ids([{"role": "user", "content": "x"}], {})
    ids = text.encode(said)
    parts = text.parts(prompt, ids)
    fields: dict[str, Any] = {"token_ids": (*prompt, *ids), "loss_from": len(prompt)}
    fields |= {"text": parts.text, "reasoning": parts.reasoning, "answer": parts.answer}
    return sample("x", finish_reason=finish, **{**fields, **more})


@pytest.mark.parametrize(
    ("said", "finish", "faults"),
    [
        ("a b</think>it is 3<|end|>", "stop", []),
        ("a b</think>it is", "length", ["truncated"]),
        ("a b", "length", ["truncated"]),
        ("a b</think><|end|>", "stop", ["empty"]),
        ("a b</think> \n<|end|>", "stop", ["empty"]),
        ("a b</think>it is 3", "stop", ["misplaced"]),
        ("a<|end|>b</think>it is 3<|end|>", "stop", ["misplaced"]),
        ("a b</think>it</think> is 3<|end|>", "stop", ["misplaced"]),
        ("<think>a b</think>it is 3<|end|>", "stop", ["misplaced"]),
        ("a b<|end|>", "stop", ["empty", "misplaced"]),
        ("a b</think>" + "it is 3 and " * 30 + "<|end|>", "stop", ["degenerate"]),
    ],
)
def test_what_is_wrong_with_a_sample(
    text: TargetText, said: str, finish: str, faults: list[str]
) -> None:
    assert faults_of(answer(text, said, finish), text) == faults


def test_everything_is_counted_and_what_is_wrong_left_out(text: TargetText, tmp_path: Path) -> None:
    asked = wanted_samples([Prompt(id=f"p{i}", text="x") for i in range(5)], plan())
    good = "a b</think>it is 3<|end|>"
    told = [
        answer(text, good, agrees=True),
        answer(text, "a</think>it is", "length", agrees=True),
        answer(text, good, agrees=False),  # the first one's double
        answer(text, "c</think>a<|end|>", "stop"),
    ]
    told[3] = Sample(**{**_fields(told[3]), "text": "another text"})
    with ShardWriter(tmp_path, 2) as writer:  # in the order in which they happened to end
        for i in (3, 2, 0, 1):
            writer.append(
                Sample(**{**_fields(told[i]), "id": f"p{i}#0", "prompt_id": f"p{i}", "index": i})
            )
    found = examine(tmp_path, text, plan(), asked)
    assert found.dropped == {"p1#0": "truncated", "p2#0": "duplicate"}
    assert [one.id for one in read_samples(tmp_path)] == ["p0#0", "p3#0"]
    assert (found.samples, found.kept, found.decoded) == (4, 2, 3)
    assert (found.agreeing, found.agreeing_of) == (2, 3)
    checks = {check.name: check for check in checks_of(found, GenerateSection(), 5, {"p4#0": "no"})}
    assert checks["failed share"].value == pytest.approx(0.2) and not checks["failed share"].passed
    assert "mostly: no" in checks["failed share"].advice
    assert checks["duplicate share"].value == pytest.approx(0.25)
    assert not checks["ids give the text"].passed and not checks["truncated share"].passed
    with pytest.raises(UsageError, match="which the plan does not ask for"):
        examine(tmp_path, text, plan(), asked[:2])


def test_a_cut_answer_may_be_kept_but_one_in_circles_is_not(
    text: TargetText, tmp_path: Path
) -> None:
    keeping = plan(keep_truncated=True)
    asked = wanted_samples([Prompt(id=f"p{i}", text="x") for i in range(3)], keeping)
    cut = ["a</think>it is", "a b</think>" + "it is 3 and " * 30, ""]
    with ShardWriter(tmp_path, 3) as writer:
        for i, said in enumerate(cut):
            one = _fields(answer(text, said, "length"))
            writer.append(Sample(**{**one, "id": f"p{i}#0", "prompt_id": f"p{i}", "index": i}))
    found = examine(tmp_path, text, keeping, asked)
    assert found.faults == {"truncated": 3, "degenerate": 1}
    assert found.dropped == {"p1#0": "degenerate", "p2#0": "truncated"}  # cut before any token
    assert [one.id for one in read_samples(tmp_path)] == ["p0#0"]


def _fields(one: Sample) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_no_samples_at_all_never_pass() -> None:
    checks = checks_of(Found(), GenerateSection(), 3, {})
    assert not {c.name: c for c in checks}["kept samples"].passed
    assert not {c.name: c for c in checks}["truncated share"].passed


def test_progress_tells_rates_and_time_left_at_a_steady_pace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    meter = Meter(100, 40, clock=lambda: now[0])
    for second in range(60):
        now[0] = float(second)
        if second % 2:
            meter.add(tokens=50)
        meter.tick()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5  # every ten seconds, whether samples end or not
    assert lines[-1].startswith("generate: 65/100 samples  0.50 samples/s  25 tokens/s  1:10 left")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar_with_the_same_words() -> None:
    now, stream = [0.0], Terminal()
    meter = Meter(10, 4, stream=stream, clock=lambda: now[0])
    now[0] = 2.0
    meter.add(tokens=30)
    meter.fail()
    meter.close()
    assert "5/10 samples, 1 failed  0.50 samples/s  15 tokens/s  0:08 left" in stream.getvalue()
