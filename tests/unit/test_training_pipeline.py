"""The pipeline's order, what it keeps, and what it tells; with stages that only leave a gate."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness.errors import GateFailed, UsageError
from training.folders import STAGES, Stage, stage_folder
from training.gate import Check, Gate, read_gate, write_gate
from training.pipeline import Run, elapsed, key_figures, outcome, run, table
from training.plan import TrainingPlan, read_plan
from training.took import read_times, timed, tokens_of


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TrainingPlan:
    target = tmp_path / "target"
    target.mkdir()
    monkeypatch.setattr("training.targets.target_folder", lambda plan: target)
    monkeypatch.setattr("training.pipeline.adapter_named", lambda name: Anything())
    return read_plan("demo")


class Anything:
    def check(self, spec: object) -> None:
        """It is installed."""


def stages(done: list[Stage], *, fail: Stage | None = None, stop: Stage | None = None) -> dict[
    Stage, Run
]:  # fmt: skip
    def one(stage: Stage) -> Callable[[TrainingPlan, Path], Gate]:
        def made(plan: TrainingPlan, work: Path) -> Gate:
            folder = stage_folder(work, stage)
            kept = read_gate(folder)
            if kept is not None and kept.passed:
                return kept
            done.append(stage)
            folder.mkdir(parents=True, exist_ok=True)
            if stage == stop:
                raise KeyboardInterrupt
            check = Check(name=f"{stage} share", passed=stage != fail, value=0.5, advice="look")
            gate = Gate.of(stage, (check,), output="x", inputs={})
            write_gate(folder, gate)
            if not gate.passed:
                raise GateFailed(stage)
            return gate

        return made

    return {stage: one(stage) for stage in STAGES}


def test_every_stage_in_order_then_nothing(plan: TrainingPlan, tmp_path: Path) -> None:
    out, done = tmp_path / "out", []
    found = run(plan, out, runs=stages(done))
    assert done == list(STAGES)
    assert found.next is not None and found.next.startswith("python -m harness run --engine")
    first = read_times(out)
    again = run(plan, out, runs=stages(done))
    assert done == list(STAGES)
    assert read_times(out) == first and again.stages[0].gate == found.stages[0].gate
    lines = table(again).splitlines()
    assert [line.split()[0] for line in lines[1:7]] == list(STAGES)
    assert all("passed" in line for line in lines[1:7])


def test_an_interruption_goes_on_and_its_time_counts(plan: TrainingPlan, tmp_path: Path) -> None:
    out, done = tmp_path / "out", []
    with pytest.raises(KeyboardInterrupt):
        run(plan, out, runs=stages(done, stop="vocab"))
    assert done == ["generate", "capture", "vocab"]
    before = read_times(out).stages["vocab"]
    assert not before.ended and before.seconds > 0
    run(plan, out, runs=stages(done))
    assert done == ["generate", "capture", "vocab", "vocab", "train", "evaluate", "export"]
    after = read_times(out).stages["vocab"]
    assert after.ended and after.seconds > before.seconds


def test_the_table_tells_tokens_and_rates_also_of_stages_that_ran_by_themselves(
    plan: TrainingPlan, tmp_path: Path
) -> None:
    out, done = tmp_path / "out", []
    runs = stages(done)

    def generate() -> Gate:
        gate = runs["generate"](plan, out)
        record = {"tokens": {"answer": 12_000, "kept": 50}}
        (out / "samples" / "manifest.json").write_bytes(msgspec.json.encode(record))
        return gate

    assert not timed(out, "generate", generate).kept  # as the stage's own command does
    alone = read_times(out).stages["generate"]
    found = run(plan, out, runs=runs)
    assert read_times(out).stages["generate"] == alone and alone.ended
    first = found.stages[0]
    assert first.tokens == 12_000 and first.seconds == alone.seconds
    assert first.tokens_per_s == pytest.approx(12_000 / alone.seconds)
    lines = table(found).splitlines()
    assert lines[0].split() == ["stage", "time", "tokens", "tokens/s", "gate", "figures"]
    took = elapsed(found.stages[5].seconds or 0.0).split()
    assert "12,000" in lines[1] and lines[6].split()[:4] == ["export", *took, "passed"]


def test_tokens_come_from_each_stages_own_records(tmp_path: Path) -> None:
    for stage in STAGES:
        assert tokens_of(tmp_path, stage) is None
        stage_folder(tmp_path, stage).mkdir(parents=True)
        assert tokens_of(tmp_path, stage) is None
    (tmp_path / "vocab" / "coverage.json").write_text('{"tokens": 77}')
    assert tokens_of(tmp_path, "vocab") == 77
    lines = [{"kind": "update", "update": i, "tokens": 10 * i} for i in (1, 2)]
    told = [*lines, {"kind": "validation", "update": 2}]
    metrics = b"".join(msgspec.json.encode(line) + b"\n" for line in told)
    (tmp_path / "train" / "metrics.jsonl").write_bytes(metrics)
    assert tokens_of(tmp_path, "train") == 30
    for damaged in ("", "[]", '{"tokens": {}}', "nonsense"):
        (tmp_path / "vocab" / "coverage.json").write_text(damaged)
        (tmp_path / "samples" / "manifest.json").write_text(damaged)
        assert tokens_of(tmp_path, "vocab") is None and tokens_of(tmp_path, "generate") is None


def test_damaged_times_are_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "pipeline.json").write_text("{")
    with pytest.raises(UsageError, match=r"pipeline\.json: cannot be read .*; remove it"):
        timed(tmp_path, "train", lambda: pytest.fail("the work was begun"))


def test_times_that_cannot_be_written_hide_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def failing() -> Gate:
        raise GateFailed("what ended the stage")

    stage_folder(tmp_path, "train").mkdir(parents=True)
    monkeypatch.setattr("training.took.write_record", full)
    with pytest.raises(GateFailed, match="what ended the stage"):
        timed(tmp_path, "train", failing)


def test_only_the_first_of_several_processes_counts_time(
    plan: TrainingPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    timed(tmp_path, "train", lambda: stages([])["train"](plan, tmp_path))
    assert not (tmp_path / "pipeline.json").exists()


def test_a_failed_gate_ends_it_and_the_table_tells(plan: TrainingPlan, tmp_path: Path) -> None:
    out, done = tmp_path / "out", []
    with pytest.raises(GateFailed):
        run(plan, out, runs=stages(done, fail="capture"))
    assert done == ["generate", "capture"]
    found = outcome(plan, out)
    assert found.next is None
    lines = table(found).splitlines()
    assert "FAILED" in lines[2] and "capture share 0.5; look" in lines[2]
    assert "not reached" in lines[3]


def test_what_would_end_a_late_stage_is_said_first(tmp_path: Path) -> None:
    wrong = read_plan("demo", ["evaluate.engines=openai"])
    with pytest.raises(UsageError, match=r"evaluate\.engines"):
        run(wrong, tmp_path / "out", runs={})
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="not a folder"):
        run(read_plan("demo"), file, runs={})


def test_times_and_figures_are_short() -> None:
    assert (elapsed(4.26), elapsed(63), elapsed(3723)) == ("4.3 s", "1:03", "1:02:03")
    checks = tuple(Check(name=f"c{i}", passed=True, value=i) for i in range(5))
    assert key_figures(Gate.of("train", checks, output="", inputs={})) == "c0 0; c1 1; c2 2"
