"""The offline expectation from captured states: the way taken, its prompts, its judgement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from capture_samples import write_samples
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.records import DraftCounts
from training.evaluation import stage
from training.evaluation.compare import chance, checks, offline_row, online_row, rate_error
from training.evaluation.prompts import of_states
from training.evaluation.records import Asked, Offline, Online, Walked
from training.evaluation.way import KEY, way_of
from training.gate import Gate
from training.kept import begin_stage
from training.plan import SamplingSection, TrainingPlan, read_plan
from training.samples import Sample

K = 3
TOO_LARGE = "it would take 512.0 GiB of memory, 96.0 GiB are free"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.evaluation.way.reference_refusal", lambda *a, **k: TOO_LARGE)


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.evaluation.way.reference_refusal", lambda *a, **k: None)


def plan_with(offline: str) -> TrainingPlan:
    return read_plan("demo", [f"evaluate.offline={offline}"])


@pytest.mark.usefixtures("accepted")
def test_auto_takes_the_engine_where_it_loads_the_target(tmp_path: Path) -> None:
    found = way_of(plan_with("auto"), tmp_path, tmp_path / "evaluate")
    assert (found.walked_from, found.why) == ("engine", "the reference engine can load the target")
    assert way_of(plan_with("states"), tmp_path, tmp_path).walked_from == "states"


@pytest.mark.usefixtures("refused")
def test_auto_takes_the_states_where_it_does_not_and_says_why(tmp_path: Path) -> None:
    found = way_of(plan_with("auto"), tmp_path, tmp_path / "evaluate")
    assert found.walked_from == "states" and TOO_LARGE in found.why
    with pytest.raises(UsageError, match=r"512\.0 GiB.*evaluate\.offline=states"):
        way_of(plan_with("engine"), tmp_path, tmp_path)
    with pytest.raises(UsageError, match="a drafter from elsewhere has no expectation"):
        way_of(plan_with("auto"), tmp_path, tmp_path, states=False)


def test_a_drafter_from_elsewhere_has_no_states(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"in the folder of its training"):
        way_of(plan_with("states"), tmp_path, tmp_path, states=False)


@pytest.mark.usefixtures("refused")
def test_a_folder_that_was_begun_goes_on_the_same_way(tmp_path: Path) -> None:
    begin_stage(tmp_path / "engine", "evaluate", {}, {})
    begin_stage(tmp_path / "states", "evaluate", {KEY: "states"}, {})
    for name in ("engine", "states"):
        assert way_of(plan_with("auto"), tmp_path, tmp_path / name).walked_from == name


def test_quantised_weights_are_the_reason_for_the_states(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    found = way_of(plan_with("auto"), tmp_path, tmp_path / "evaluate")
    assert found.walked_from == "states" and "quantised" in found.why


def test_an_engine_that_draws_its_drafts_is_not_compared_with_sampled_answers(
    tmp_path: Path,
) -> None:
    plan = read_plan("demo", ["evaluate.offline=states", "sampling.temperature=1.0"])
    with pytest.raises(UsageError, match=r"evaluate\.engines.*draws its drafts"):
        way_of(plan, tmp_path, tmp_path)
    served = msgspec.structs.replace(plan.evaluate, engines=("vllm",))
    plan = msgspec.structs.replace(plan, evaluate=served)
    assert way_of(plan, tmp_path, tmp_path).walked_from == "states"


class Lengths:
    """A source of states of which nothing but its samples is asked."""

    def __init__(self, samples: Sequence[Sample], most: int) -> None:
        self.aux_layers = (1, 2, 3)
        self.sample_ids = [s.id for s in samples]
        self.lengths = [min(len(s.token_ids), most) for s in samples]


def sample(prompt: int, answer: int, *, number: int = 0, greedy: bool = True) -> Sample:
    return Sample(
        id=f"p{prompt}#{number}",
        prompt_id=f"p{prompt}",
        token_ids=tuple(range(5 + answer)),
        loss_from=5,
        text="",
        greedy=greedy,
        index=10 * prompt + number,
    )


def chosen(
    tmp_path: Path, samples: Sequence[Sample], *, most: int = 99, **sampling: float
) -> list[tuple[str, int, int]]:
    """Prompt, number in the source and limit of what is walked, all prompts but one held out."""
    plan = read_plan("demo", ["train.held_out=1.0", "generate.max_tokens=40"])
    plan = msgspec.structs.replace(plan, sampling=SamplingSection(**sampling))
    write_samples(tmp_path, samples)
    found = of_states(plan, tmp_path, Lengths(samples, most), context=50)  # type: ignore[arg-type]
    assert all(len(held.token_ids) == 5 and held.greedy_ids is None for held, _ in found)
    return [(held.prompt_id, number, held.max_tokens) for held, number in found]


def test_an_answer_is_walked_up_to_k_tokens_before_its_end(tmp_path: Path) -> None:
    samples = [sample(n, 20) for n in range(4)]
    found = chosen(tmp_path, samples)
    assert len(found) == 3 and {limit for _, _, limit in found} == {20 - K}
    assert all(samples[number].prompt_id == prompt for prompt, number, _ in found)
    cut = chosen(tmp_path, samples, most=15)  # ten tokens of each answer have states
    assert {limit for _, _, limit in cut} == {10 - K}
    longer = chosen(tmp_path, [sample(n, 90) for n in range(4)])
    assert {limit for _, _, limit in longer} == {40}  # generate.max_tokens


def test_answers_of_another_sampling_or_too_short_are_left_out(tmp_path: Path) -> None:
    short = [sample(n, K + 1) for n in range(4)]
    with pytest.raises(UsageError, match="no held-out prompt has a greedy answer"):
        chosen(tmp_path, short)
    assert len(chosen(tmp_path, [sample(n, K + 2) for n in range(4)])) == 3
    both = [sample(n, 20, number=i, greedy=i == 0) for n in range(4) for i in range(2)]
    assert {number % 2 for _, number, _ in chosen(tmp_path, both)} == {0}
    assert {number % 2 for _, number, _ in chosen(tmp_path, both, temperature=1.0)} == {1}
    with pytest.raises(UsageError, match="no held-out prompt has a sampled answer"):
        chosen(tmp_path, [sample(n, 20) for n in range(4)], temperature=0.7)


def counts(drafts: int, accepted: int) -> DraftCounts:
    return DraftCounts(drafts=drafts, drafted=K * drafts, accepted=accepted)


def sampled(
    expected: Sequence[DraftCounts], found: Sequence[DraftCounts]
) -> tuple[Offline, Online]:
    """An expectation from sampled answers, and an engine's figures."""

    def whole(parts: Sequence[DraftCounts]) -> DraftCounts:
        return counts(sum(p.drafts for p in parts), sum(p.accepted for p in parts))

    answers = tuple(
        Walked(prompt_id=f"p{n}", category=None, prompt_tokens=4, token_ids=(1,), counts=c)
        for n, c in enumerate(expected)
    )
    offline = Offline(
        answers=answers, counts=whole(expected), proof=0.7, seconds=1.0, least_proof=0.3,
        walked_from="states", greedy=False,
    )  # fmt: skip
    asked = tuple(
        Asked(prompt_id=f"p{n}", token_ids=(1,), output_tokens=1, finish_reason=None, counts=c)
        for n, c in enumerate(found)
    )
    total = whole(found)
    online = Online(
        engine="vllm", answers=asked, counters=total, requests=total, counts=total,
        source="counters", note=None, ready_s=None, seconds=1.0,
    )  # fmt: skip
    return offline, online


def test_sampled_answers_may_differ_by_chance_and_no_more() -> None:
    scattered = [counts(20, 20), counts(20, 40), counts(20, 30), counts(20, 30)]
    offline, online = sampled(scattered, scattered[::-1])
    assert chance(offline, online) > 0.1
    near = [counts(20, c.accepted - 6) for c in scattered]
    offline, online = sampled(scattered, near)  # ten points less
    row = online_row(online, offline, K, 0.03)
    assert row.verdict == "as expected" and row.same_outputs is None
    told = checks((offline_row(offline), row), offline, (online,), 0.03)
    assert all(check.passed for check in told)
    gap = next(c for c in told if "offline - online" in c.name)
    assert gap.limit == row.most and "sampled" in gap.reason
    steady = [counts(2000, 3000)] * 4
    offline, online = sampled(steady, [counts(2000, 2400)] * 4)
    row = online_row(online, offline, K, 0.03)
    assert row.verdict == "TOO LOW" and row.most == pytest.approx(0.03)
    told = checks((offline_row(offline), row), offline, (online,), 0.03)
    assert [c.name for c in told if not c.passed] == ["vllm: |offline - online| acceptance rate"]


def test_states_of_other_tokens_fail_sampled_answers_too() -> None:
    offline, online = sampled([counts(20, 30)] * 4, [counts(20, 30)] * 4)
    wrong = msgspec.structs.replace(offline, proof=0.1)
    row = online_row(online, wrong, K, 0.03)
    told = checks((offline_row(wrong), row), wrong, (online,), 0.03)
    assert [c.name for c in told if not c.passed] == [
        "the states' argmax is the answer's next token"
    ]


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=2, max_size=30))
def test_the_error_of_a_rate_is_that_of_repeating_the_answers(
    told: list[tuple[int, float]],
) -> None:
    answers = [counts(drafts, round(share * K * drafts)) for drafts, share in told]
    error = rate_error(answers)
    assert 0 <= error <= 1.5
    n = len(answers)
    factor = ((2 * n) / (2 * n - 1) * (n - 1) / n / 2) ** 0.5  # twice as many of the same
    assert rate_error(answers * 2) == pytest.approx(error * factor, abs=1e-12)


def test_the_engine_of_online_states_is_closed_before_others_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Source:
        def close(self) -> None:
            told.append("closed")

    def walk(*given: object) -> Offline:
        told.append("walked")
        return offline

    def done(expected: stage.Expectation, folder: Path, inputs: dict[str, str]) -> Gate:
        expected.walk()
        told.append("engines asked")
        return gate

    gate = Gate(stage="train", passed=True, checks=(), output="x")
    offline, _ = sampled([counts(20, 30)], [counts(20, 30)])
    monkeypatch.setattr(stage, "unchanged_best", lambda work: gate)
    monkeypatch.setattr(stage, "check_same_samples", lambda work, name: None)
    monkeypatch.setattr(stage, "passed_gate", lambda folder, name: gate)
    monkeypatch.setattr(stage, "target_folder", lambda plan: tmp_path)
    monkeypatch.setattr(stage, "context_of", lambda plan, positions: 50)
    monkeypatch.setattr(stage, "read_facts", lambda target: SimpleNamespace(max_positions=50))
    monkeypatch.setattr(stage, "open_source", lambda plan, work: Source())
    monkeypatch.setattr(stage, "of_states", lambda *given: [])
    monkeypatch.setattr(stage, "walk_captured", walk)
    monkeypatch.setattr(stage, "_run", done)
    assert stage.run(plan_with("states"), tmp_path) is gate
    assert told == ["walked", "closed", "engines asked"]


def test_the_kimi_plans_walk_over_states() -> None:
    for kind in ("llama", "mla"):
        plan = read_plan(f"kimi-k2.5-{kind}")
        assert plan.evaluate.offline == "states" and plan.sampling.temperature == 1.0
