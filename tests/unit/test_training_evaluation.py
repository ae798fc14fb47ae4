"""The evaluation's verdicts, its choice of prompts, and what a stage keeps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from capture_samples import write_samples
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import GateFailed, UsageError
from harness.records import DraftCounts
from training.evaluation.compare import checks, offline_row, online_row, table
from training.evaluation.prompts import of_samples
from training.evaluation.records import Asked, Offline, Online, Walked
from training.files import folder_digest
from training.gate import Check, Gate, read_gate, write_gate
from training.held_out import held_out_prompts
from training.kept import begin_stage
from training.plan import EvaluateSection, TrainingPlan, read_plan

K = 3


def counts(drafts: int, *at_least: int) -> DraftCounts:
    return DraftCounts(
        drafts=drafts, drafted=K * drafts, accepted=sum(at_least), per_position=at_least
    )


def offline(found: DraftCounts, *, proof: float = 1.0) -> Offline:
    answer = Walked(
        prompt_id="a", category=None, prompt_tokens=4, token_ids=(1, 2, 3), counts=found
    )
    return Offline(answers=(answer,), counts=found, proof=proof, seconds=1.0)


def online(found: DraftCounts | None, **more: object) -> Online:
    answer = Asked(
        prompt_id="a", token_ids=(1, 2, 3), output_tokens=3, finish_reason="stop", counts=found
    )
    whole = Online(
        engine="vllm",
        answers=(answer,),
        counters=found,
        requests=found,
        counts=found,
        source="counters",
        note=None,
        ready_s=1.0,
        seconds=2.0,
    )
    return msgspec.structs.replace(whole, **more)


EXPECTED = counts(100, 80, 60, 40)  # 180 of 300: 60%


def judge(found: Online, expected: Offline) -> tuple[str, list[Check]]:
    rows = (offline_row(expected), online_row(found, expected, K, 0.03))
    return rows[1].verdict, list(checks(rows, expected, (found,), 0.03))


@pytest.mark.parametrize(
    ("found", "verdict", "passed"),
    [
        (counts(100, 80, 60, 40), "as expected, to the draft", True),
        (counts(101, 80, 60, 40), "as expected", True),
        (counts(100, 70, 50, 30), "TOO LOW", False),
        (counts(100, 90, 70, 50), "TOO HIGH", False),
        (None, "not told", False),
    ],
)
def test_a_gap_to_either_side_fails_the_gate(
    found: DraftCounts | None, verdict: str, passed: bool
) -> None:
    said, told = judge(online(found), offline(EXPECTED))
    gap = next(check for check in told if "offline - online" in check.name)
    assert (said, gap.passed) == (verdict, passed)
    assert gap.advice


def test_other_things_that_fail_the_gate() -> None:
    wrong = offline(EXPECTED, proof=0.4)
    failed = [check.name for check in judge(online(EXPECTED), wrong)[1] if not check.passed]
    assert failed == ["the states' argmax is the answer's next token"]
    nothing = counts(100, 0, 0, 0)
    told = judge(online(nothing), offline(nothing))[1]
    assert [c.name for c in told if not c.passed] == ["expected acceptance length"]
    silent = Asked(
        prompt_id="a", token_ids=None, output_tokens=None, finish_reason=None, counts=None,
        error="connection reset",
    )  # fmt: skip
    told = judge(online(EXPECTED, answers=(silent,)), offline(EXPECTED))[1]
    failed = [check for check in told if not check.passed]
    assert [check.name for check in failed] == ["vllm: prompts answered"]
    assert failed[0].reason == "connection reset"
    apart = judge(online(EXPECTED, counters=counts(100, 70, 60, 40)), offline(EXPECTED))[1]
    assert [c.name for c in apart if not c.passed] == ["vllm: counters and requests apart"]


def test_other_answers_are_told_and_not_judged() -> None:
    other = Asked(
        prompt_id="a", token_ids=(1, 2, 4), output_tokens=3, finish_reason="stop", counts=None
    )
    told = judge(online(EXPECTED, answers=(other,)), offline(EXPECTED))[1]
    same = next(check for check in told if "answers equal" in check.name)
    assert same.passed and same.value == 0.0


def test_the_table_shows_what_is_missing_as_a_dash_and_gaps_by_their_sign() -> None:
    expected = offline(EXPECTED)
    silent = online(None, requests=None, counters=None)
    rows = (
        offline_row(expected),
        online_row(online(counts(100, 78, 60, 40)), expected, K, 0.03),
        online_row(silent, expected, K, 0.03),
    )
    lines = table(rows, K).splitlines()
    assert "60.0%" in lines[1] and "2.800" in lines[1]
    assert "-0.67 pt" in lines[2] and "1/1" in lines[2]
    assert lines[3].split()[:3] == ["vllm", "–", "–"]  # noqa: RUF001


@given(
    ids=st.sets(st.text(min_size=1, max_size=6), min_size=2, max_size=60),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_held_out_prompts_depend_on_nothing_but_ids_and_seed(
    ids: set[str], share: float, seed: int
) -> None:
    chosen = held_out_prompts(sorted(ids), share, seed)
    assert chosen == held_out_prompts([*sorted(ids, reverse=True), *ids], share, seed)
    assert 1 <= len(chosen) < len(ids)
    assert abs(len(chosen) - share * len(ids)) <= 1


def test_without_samples_there_is_nothing_to_evaluate_on(tmp_path: Path) -> None:
    write_samples(tmp_path, [])
    with pytest.raises(UsageError, match="run `generate` first"):
        of_samples(TrainingPlan(), tmp_path, 100)


def test_a_stage_is_kept_refused_when_changed_and_told_when_failed(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    sections = {"evaluate": EvaluateSection(), "engine.dtype": "auto"}
    assert begin_stage(folder, "evaluate", sections, {"train": "a"}) is None
    assert begin_stage(folder, "evaluate", sections, {"train": "a"}) is None  # it never ended
    gate = Gate.of("evaluate", (), output="x", inputs={"train": "a"})
    write_gate(folder, gate)
    assert begin_stage(folder, "evaluate", sections, {"train": "a"}) == gate
    changed = {**sections, "evaluate": EvaluateSection(k=5)}
    with pytest.raises(UsageError, match=r"evaluate\.k 3 -> 5"):
        begin_stage(folder, "evaluate", changed, {"train": "a"})
    with pytest.raises(UsageError, match="the output of train changed"):
        begin_stage(folder, "evaluate", sections, {"train": "b"})
    failed = Check(name="gap", passed=False, value=0.2, limit=0.03, relation="<=")
    write_gate(folder, Gate.of("evaluate", (failed,), output="x", inputs={}))
    assert read_gate(folder) is not None
    with pytest.raises(GateFailed, match="remove the folder"):
        begin_stage(folder, "evaluate", sections, {"train": "a"})


def test_a_damaged_record_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "stage.json").write_text("{")
    with pytest.raises(UsageError, match=r"stage\.json: cannot be read"):
        begin_stage(tmp_path, "evaluate", {}, {})


def test_a_folders_digest_follows_its_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    first = folder_digest(tmp_path)
    (tmp_path / "engine.log").write_text("no part of it")
    assert folder_digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"12346")
    assert folder_digest(tmp_path) != first


def test_the_plan_for_drafters_from_elsewhere_is_read() -> None:
    plan = read_plan("evaluate", ["evaluate.engines=reference,vllm"])
    assert plan.evaluate.engines == ("reference", "vllm")
