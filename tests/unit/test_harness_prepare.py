"""What an engine is told to serve for each variant."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tiny_tokenizers import save

from engines.catalog import adapter
from engines.supervise import parents
from harness.errors import UsageError
from harness.plan.load import build, read_profile
from harness.plan.schema import (
    CompareSection,
    EngineSection,
    LoadSection,
    Plan,
    TargetSection,
    WorkloadSection,
)
from harness.prepare import Prepared, Request, own_tokenizer, prepare, prompts_for
from harness.records import VARIANTS

REPO = Path(__file__).resolve().parents[2]


def test_the_baseline_knows_the_drafter_it_is_compared_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    drafter = tmp_path / "drafter"
    prepared = Prepared(
        name="vllm",
        adapter=adapter("vllm"),
        plan=Plan(),
        why="",
        target=tmp_path,
        drafter=drafter,
        urls={},
        prompts=[],
        cells=[],
    )
    baseline, speculative = prepared.spec("baseline"), prepared.spec("speculative")
    assert (baseline.drafter, baseline.pair_drafter) == (None, drafter)
    assert speculative.drafter == drafter
    assert baseline.max_model_len == speculative.max_model_len == 512


def folder(path: Path, context: int) -> Path:
    save(path)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return path


def test_made_prompts_are_as_many_as_one_start_asks(tmp_path: Path) -> None:
    plan = Plan(
        target=TargetSection(path=str(folder(tmp_path / "t", 512))),
        workload=WorkloadSection(dataset="synthetic", input_tokens=20),
        load=LoadSection(concurrency=(1, 2), num_requests=10, warmup_requests=3),
        compare=CompareSection(blocks=2),
    )
    prompts = prompts_for(plan, None)
    assert len(prompts) == 2 * 2 * 10 + 3
    few = msgspec.structs.replace(plan.workload, num_prompts=5)
    assert len(prompts_for(msgspec.structs.replace(plan, workload=few), None)) == 5


def test_a_prompt_must_fit_the_context_that_is_served(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "the" + " the" * 99}))
    plan = Plan(
        target=TargetSection(path=str(folder(tmp_path / "t", 100))),
        workload=WorkloadSection(dataset=str(file)),
    )
    with pytest.raises(UsageError, match="context is 100"):
        prompts_for(plan, None)
    wider = msgspec.structs.replace(plan, engine=EngineSection(max_model_len=200))
    assert len(prompts_for(wider, None)) == 1
    assert len(prompts_for(plan, None, attached=True)) == 1, "its server may have a longer one"


def test_the_demo_pair_gives_the_tokenizer_where_no_target_is_named(tmp_path: Path) -> None:
    plan = Plan(workload=WorkloadSection(dataset="random", input_tokens=9, num_prompts=2))
    folder(tmp_path / "target", 512)
    assert len(prompts_for(plan, tmp_path)) == 2
    with pytest.raises(UsageError, match=r"target\.path=DIR"):
        prompts_for(plan, None)


@pytest.mark.parametrize(
    ("sets", "needle"),
    [
        (("workload.dataset=no.jsonl", "workload.max_input_tokens=9"), "no such file"),
        (("workload.dataset=random",), r"workload\.input_tokens=512"),
        (("workload.dataset=demo", "workload.input_tokens=5"), r"workload\.input_tokens"),
    ],
)
def test_a_mistake_is_told_before_the_demo_pair_is_made(
    sets: tuple[str, ...], needle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.prepare.demo_pair", lambda plan: pytest.fail("made the pair"))
    with pytest.raises(UsageError, match=needle):
        prepare(Request(sets=sets), "reference")


@pytest.mark.parametrize(
    ("sets", "own"),
    [
        ((), False),
        (("engine.extra_args=--tokenizer,/elsewhere",), True),
        (("engine.extra_args=--tokenizer=/elsewhere",), True),
        (("engine.extra_args=--seed,3,--skip-tokenizer-init",), True),
        (("engine.flags.--tokenizer-path={value='/elsewhere', why='w'}",), True),
        (("engine.flags.--skip_tokenizer_init={why='w'}",), True),
        (("engine.flags.--tokenizer={value=false, why='w'}",), False),
        (("engine.flags.--tokenizer={value='/x', why='w', variant='speculative'}",), False),
        (("engine.extra_args=--tokenizer-mode,slow",), False),
    ],
)
def test_a_tokenizer_from_elsewhere_is_seen_wherever_the_plan_says_it(
    sets: tuple[str, ...], own: bool
) -> None:
    engine = build(read_profile("demo"), "vllm", list(sets)).engine
    assert (own_tokenizer(engine, VARIANTS) is not None) is own


def test_a_tokenizer_given_to_one_variant_is_enough_where_it_runs_alone() -> None:
    flag = "engine.flags.--tokenizer={value='/x', why='w', variant='baseline'}"
    engine = build(read_profile("demo"), "vllm", [flag]).engine
    assert own_tokenizer(engine, ("baseline",)) == "--tokenizer"
    assert own_tokenizer(engine, ("speculative",)) is None


def test_who_makes_the_demo_pair_does_not_outlive_who_waits_for_it(tmp_path: Path) -> None:
    """Whoever is killed ends nobody; the kernel does."""
    maker, note = tmp_path / "python", tmp_path / "pid"
    maker.write_text(f"#!/bin/sh\necho $$ > {note}.partial && mv {note}.partial {note}\nexec cat\n")
    maker.chmod(0o755)
    code = (
        f"import sys\nsys.executable = {str(maker)!r}\n"
        "from harness.plan.schema import Plan\nfrom harness.prepare import demo_pair\n"
        "demo_pair(Plan())\n"
    )
    waiting = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPO, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while not note.exists():
            assert waiting.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        pid = int(note.read_text())
        assert Path(f"/proc/{pid}").exists()
        waiting.kill()
        waiting.wait()
        # Its standard input is still open here: nothing but the death of its parent ends it.
        while pid in parents():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        waiting.kill()
        waiting.wait()
        assert waiting.stdin is not None
        waiting.stdin.close()
