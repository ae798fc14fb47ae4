"""Experiments on the demo pair without a server: sampling, the target's parity, controls, mending.

The engine runs in this process; what it accepts is held against what the experiments imply.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from diagnose_planted import LENGTH, SLOTS, prompts_of, subject_of, target_engine

from drafters.checkpoint import load, load_spec
from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterError
from engines.reference.draft import EagleProposer
from engines.reference.engine import Engine
from engines.reference.sampling import SamplingParams
from harness.diagnose.experiments.asking import Answered, Asked, Question, Way
from harness.diagnose.experiments.controls import (
    foreign,
    repeated_questions,
    shuffled,
    walked,
)
from harness.diagnose.experiments.known import Knowledge, know
from harness.diagnose.experiments.materialise import ascending, made_as, write_reading
from harness.diagnose.experiments.sampling import chances_of, sampled
from harness.diagnose.experiments.target import dtype_of, parity, scores
from harness.diagnose.readings import layers_reading
from harness.diagnose.records import Proportion, Subject
from harness.measure.logprobs import LogprobReader, NoLogprobs
from harness.records import DraftCounts

TEMPERATURE = 0.8
K = 3


@pytest.fixture(scope="module")
def engine(demo_pair: Path) -> Engine:
    torch.set_num_threads(1)
    return target_engine(demo_pair)


@pytest.fixture(scope="module")
def knowledge(demo_pair: Path, engine: Engine) -> Knowledge:
    prompts = prompts_of(engine, demo_pair, 10)
    return know(subject_of(demo_pair), prompts, max_tokens=40, engine=engine)


def sampled_by(
    engine: Engine, proposer: EagleProposer, prompts: list[list[int]], *, ends: bool
) -> Asked:
    served = Engine(
        engine.model,
        tokenizer=engine.tokenizer,
        proposer=proposer,
        max_len=LENGTH,
        slots=SLOTS,
    )
    params = SamplingParams(max_tokens=40, temperature=TEMPERATURE, ignore_eos=not ends)
    answers = []
    for i, request in enumerate(served.generate(prompts, params)):
        assert request.drafts is not None
        steps = tuple(request.drafts.accepted)
        counts = DraftCounts(drafts=len(steps), drafted=K * len(steps), accepted=sum(steps))
        answers.append(
            Answered(
                request=str(i),
                question=str(i),
                prompt_tokens=len(request.prompt),
                token_ids=tuple(request.output),
                counts=counts,
                steps=steps,
            )
        )
    return Asked(way=Way(name="sampled", temperature=TEMPERATURE), answers=tuple(answers))


class Likeliest(EagleProposer):
    """Drafts greedily, whatever the temperature, as vLLM does unless it is told otherwise."""

    def propose(self, rows: int, params: Any, uniform: Any) -> Any:
        drafts, _ = super().propose(rows, None, None)
        chances = torch.zeros(*drafts.shape, self.vocab_size)
        return drafts, chances.scatter_(-1, drafts[..., None], 1.0)


def judged(knowledge: Knowledge, engine: Engine, kind: type[EagleProposer], *, ends: bool) -> Any:
    prompts = [text.prompt for text in knowledge.texts] * 2
    vocabulary = knowledge.drafter.spec.vocab_size
    proposer = kind(knowledge.drafter, k=K, slots=SLOTS, length=LENGTH, vocab_size=vocabulary)
    asked = sampled_by(engine, proposer, prompts, ends=ends)
    found = sampled(knowledge, asked, {str(i): p for i, p in enumerate(prompts)})
    assert found is not None and found.observed.length is not None
    assert found.implied_sampled is not None and found.implied_greedy is not None
    return found


@pytest.mark.parametrize("kind", [EagleProposer, Likeliest])
def test_what_is_accepted_at_a_temperature_is_what_the_distributions_imply(
    knowledge: Knowledge, engine: Engine, kind: type[EagleProposer]
) -> None:
    found = judged(knowledge, engine, kind, ends=False)
    assert found.implied_sampled > found.implied_greedy + 0.1
    own, other = found.implied_sampled, found.implied_greedy
    if kind is Likeliest:
        own, other = other, own
    assert abs(found.observed.length - own) < 0.12  # 390 steps: 0.03 standard error
    assert abs(found.observed.length - own) < abs(found.observed.length - other)


def test_answers_that_end_imply_no_more_than_is_accepted(
    knowledge: Knowledge, engine: Engine
) -> None:
    found = judged(knowledge, engine, EagleProposer, ends=True)
    assert abs(found.observed.length - found.implied_sampled) < 0.2  # 150 steps: 0.06


def test_answers_too_short_for_a_step_imply_nothing(knowledge: Knowledge) -> None:
    answer = Answered(request="a", question="0", prompt_tokens=1, token_ids=(5,), steps=())
    asked = Asked(way=Way(name="sampled", temperature=0.5), answers=(answer,))
    assert sampled(knowledge, asked, {"0": [1]}) is None


def test_a_drafters_chances_are_found_whatever_the_order_of_its_table() -> None:
    table = torch.tensor([4, 1, 5])  # the target's ids of draft ids 0, 1, 2
    spec = SimpleNamespace(vocab_size=6, draft_vocab_size=3)
    drafter = cast(Eagle3Drafter, SimpleNamespace(spec=spec, to_target=lambda ids: table[ids]))
    q = torch.tensor([[0.5, 0.3, 0.2]] * 3)
    assert chances_of(q, drafter, torch.tensor([5, 2, 4])).tolist() == pytest.approx([0.2, 0, 0.5])


class Computing:
    """A server's log-probabilities as the reference computes them, `off` nats away in a place."""

    def __init__(self, knowledge: Knowledge, **off: float) -> None:
        self.knowledge, self.off = knowledge, off

    def continued(self, prefix: list[int], tokens: int) -> tuple[list[int], list[float]]:
        text = next(t for t in self.knowledge.texts if t.prompt == list(prefix))
        made = text.answer[:tokens]
        own = scores(self.knowledge, [*prefix, *made])[len(prefix) - 1 :]
        said = own.gather(1, torch.tensor(made)[:, None])[:, 0] + self.off.get("decode", 0.0)
        return made, said.tolist()

    def scored(self, ids: list[int]) -> list[float | None]:
        own = scores(self.knowledge, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return [None, *(own + self.off.get("prefill", 0.0)).tolist()]


def held(knowledge: Knowledge, **off: float) -> Any:
    return parity(knowledge, cast(LogprobReader, Computing(knowledge, **off)))


def test_a_right_target_is_told_from_one_that_is_off_in_prefill_or_decode(
    knowledge: Knowledge,
) -> None:
    right = held(knowledge)
    assert right.prompt_gap == right.decode_gap == right.rescored_gap == 0.0
    assert right.argmax is not None and right.argmax.share == 1.0
    decode = held(knowledge, decode=0.5)
    assert (decode.prompt_gap, decode.decode_gap) == (0.0, pytest.approx(0.5, abs=1e-5))
    prefill = held(knowledge, prefill=0.5)
    assert (prefill.decode_gap, prefill.prompt_gap) == (0.0, pytest.approx(0.5, abs=1e-5))
    assert prefill.rescored_gap == pytest.approx(0.5, abs=1e-5)


class Silent:
    def continued(self, prefix: list[int], tokens: int) -> None:
        raise NoLogprobs("/generate answers 404")


def test_a_server_that_tells_no_log_probabilities_is_no_parity(knowledge: Knowledge) -> None:
    with pytest.raises(NoLogprobs, match="404"):
        parity(knowledge, cast(LogprobReader, Silent()))


def answered(knowledge: Knowledge, **changes: Any) -> tuple[Question, Answered]:
    text = knowledge.texts[0]
    told: dict[str, Any] = {"token_ids": tuple(text.answer), **changes}
    answer = Answered(
        request="r", question="000", category=None, prompt_tokens=len(text.prompt), **told
    )
    return Question(name="000", token_ids=tuple(text.prompt)), answer


def test_what_the_target_chose_otherwise_is_counted_apart_from_what_was_accepted(
    knowledge: Knowledge,
) -> None:
    """Steps of two accepted drafts and a token of the target's own, behind the first token."""
    answer = list(knowledge.texts[0].answer)
    count = (len(answer) - 1) // 3
    other = (answer[3] + 1) % 768  # the end of the first step
    drafted = [*answer[:2], (answer[2] + 1) % 768, *answer[3:]]

    def overruled(tokens: list[int], steps: tuple[int, ...] | None) -> Proportion:
        one = answered(knowledge, token_ids=tuple(tokens), steps=steps)
        found = parity(knowledge, cast(LogprobReader, Silent()), [one]).overruled
        assert found is not None
        return found

    steps = (2,) * count
    assert (overruled(answer, None).hits, overruled(answer, None).of) == (0, len(answer))
    assert (overruled(answer, steps).hits, overruled(answer, steps).of) == (0, 1 + count)
    assert overruled([*answer[:3], other, *answer[4:]], steps).hits >= 1
    accepted = overruled(drafted[:3], (2,))
    assert (accepted.hits, accepted.of) == (0, 1)  # what was accepted is no word of the target's
    assert overruled(drafted[:3], None).hits == 1


def test_vllms_auto_makes_bfloat16_of_float32_and_sglangs_float16(demo_pair: Path) -> None:
    subject = subject_of(demo_pair)
    assert dtype_of(subject) == "float32"
    assert dtype_of(msgspec.structs.replace(subject, engine="vllm")) == "bfloat16"
    assert dtype_of(msgspec.structs.replace(subject, engine="sglang")) == "float16"
    assert dtype_of(msgspec.structs.replace(subject, engine="vllm", dtype="float16")) == "float16"
    assert dtype_of(msgspec.structs.replace(subject, engine="vllm", dtype="half")) == "float16"
    assert dtype_of(msgspec.structs.replace(subject, engine="sglang", dtype="float")) == "float32"


def test_what_is_broken_is_accepted_seldom(knowledge: Knowledge) -> None:
    own = walked(knowledge, knowledge.drafter, knowledge.captured())
    for broken in (shuffled(knowledge), foreign(knowledge)):
        assert broken.length is not None and own.length is not None
        assert broken.length < 1.5 < 2.0 < own.length


def test_repeated_questions_hold_their_own_answer() -> None:
    questions = [Question(name="a", token_ids=(1, 2, 3)), Question(name="b", token_ids=(1,) * 90)]
    (again,) = repeated_questions(questions, {"a": [4, 5, 6, 7, 8], "b": [4] * 20})
    assert again.token_ids[:11] == (1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3)
    assert again.token_ids[-3:] == (1, 2, 3)


def drafts_of(drafter: Eagle3Drafter, knowledge: Knowledge) -> list[tuple[int, ...]]:
    captured = knowledge.captured(drafter.spec.aux_layers)
    return [tuple(walked(knowledge, drafter, captured).counts.per_position or ())]


def test_layers_in_another_order_are_written_ascending_and_draft_the_same(
    knowledge: Knowledge,
) -> None:
    width = knowledge.drafter.spec.target_hidden_size
    turned = copy.deepcopy(knowledge.drafter)
    turned.owns_embeddings = turned.owns_lm_head = False
    a, b, c = knowledge.aux_layers
    weight = knowledge.drafter.fc.weight
    turned.fc.weight = torch.nn.Parameter(
        torch.cat([weight[:, 2 * width :], weight[:, :width], weight[:, width : 2 * width]], 1),
        requires_grad=False,
    )
    turned.spec = msgspec.structs.replace(turned.spec, aux_layers=(c, a, b))
    before = drafts_of(turned, knowledge)
    made = ascending(turned)
    assert made.spec.aux_layers == (a, b, c)
    assert torch.equal(made.fc.weight, weight)
    assert drafts_of(made, knowledge) == before == drafts_of(knowledge.drafter, knowledge)


@pytest.mark.parametrize(
    ("reading", "field", "value"),
    [
        ("norm_output toggled", "norm_output", True),
        ("norm_before_residual toggled", "norm_before_residual", True),
        ("layers off by +1 (3, 5, 6)", "aux_layers", (3, 5, 6)),
        ("fc norm added", "fc_norm", True),
    ],
)
def test_a_reading_is_written_down_and_read_back_as_itself(
    knowledge: Knowledge, tmp_path: Path, reading: str, field: str, value: object
) -> None:
    changes = write_reading(knowledge, reading, tmp_path / "drafter")
    assert any(field in change for change in changes)
    spec = load_spec(tmp_path / "drafter")
    assert getattr(spec, field) == value
    again = load(tmp_path / "drafter")
    again.share(embeddings=knowledge.engine.model.embedding)
    own = knowledge.drafter
    assert torch.equal(again.fc.weight, own.fc.weight)
    assert again.owns_lm_head == own.owns_lm_head and again.spec.dtype == own.spec.dtype


def test_the_targets_head_is_written_as_the_drafters_own(
    knowledge: Knowledge, tmp_path: Path
) -> None:
    changes = write_reading(knowledge, "target's lm_head", tmp_path / "drafter")
    assert any("lm_head" in change for change in changes)
    again = load(tmp_path / "drafter")
    assert again.owns_lm_head
    assert torch.equal(again.lm_head.weight, knowledge.engine.model.head.weight.t())


@pytest.mark.parametrize("reading", ["tokens not shifted", "rope without mscale", "as declared"])
def test_what_no_checkpoint_can_state_is_not_written(
    knowledge: Knowledge, tmp_path: Path, reading: str
) -> None:
    with pytest.raises(DrafterError, match="no checkpoint can state"):
        write_reading(knowledge, reading, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_other_layers_keep_the_weights(knowledge: Knowledge) -> None:
    made = made_as(knowledge, layers_reading("other layers", (1, 3, 5)))
    assert made.spec.aux_layers == (1, 3, 5)
    assert torch.equal(made.fc.weight, knowledge.drafter.fc.weight)
    assert knowledge.aux_layers != (1, 3, 5)


def test_a_subject_says_how_its_engine_is_started(demo_pair: Path) -> None:
    from harness.diagnose.experiments.asking import spec_of, with_arguments

    subject = Subject(
        engine="sglang",
        target=str(demo_pair / "target"),
        drafter=str(demo_pair / "drafter-mla"),
        k=4,
        temperature=0.7,
    )
    spec = spec_of(with_arguments(subject, "--x", Y="1"), 1234)
    # On a CPU adapters refuse a temperature beside a drafter; what comes of it is to be seen.
    assert spec.temperature == 0.0
    assert (spec.k, spec.extra_args, spec.extra_env) == (4, ("--x",), {"Y": "1"})
    assert spec.max_model_len == 2048
    other = msgspec.structs.replace(subject, engine="vllm", max_model_len=64)
    assert spec_of(other, 1).temperature == 0.0
    assert spec_of(other, 1).max_model_len == 64
