"""Samples and a draft vocabulary from the demo pair by the command line, with the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from training.generate.text import read_text
from training.samples import read_samples

REPO = Path(__file__).resolve().parents[2]
PROMPTS = 12


def training(
    stage: str, out: Path, *sets: str, count: int = PROMPTS
) -> subprocess.CompletedProcess[str]:
    sets = (*sets, f"workload.num_prompts={count}", "engine.threads=1")
    more = [part for item in sets for part in ("--set", item)]
    return subprocess.run(
        [sys.executable, "-m", "training", stage, "--out", str(out), *more],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def made(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training's folder with its samples."""
    out = tmp_path_factory.mktemp("training")
    done = training("generate", out)
    assert done.returncode == 0, done.stderr
    return out


def test_samples_are_the_targets_own_greedy_answers(made: Path, demo_pair: Path) -> None:
    text = read_text(demo_pair / "target")
    samples = list(read_samples(made / "samples"))
    assert len(samples) == PROMPTS
    for one in samples:
        assert one.messages is not None and one.greedy and one.ids_from == "server"
        assert list(one.token_ids[: one.loss_from]) == text.prompt_ids(one.messages, {})
        assert text.decode(one.answer_ids) == one.text == _text(one.reasoning, one.answer)
        assert one.finish_reason == "stop" and one.token_ids[-1] in text.end_ids
    # What the pair's makers wrote down as right answers the target mostly gives.
    gate = json.loads((made / "samples" / "gate.json").read_text())
    assert gate["passed"] and all(check["passed"] for check in gate["checks"])
    manifest = json.loads((made / "samples" / "manifest.json").read_text())
    assert manifest["counts"]["kept"] == PROMPTS and manifest["engine"]["engine"] == "reference"


def _text(reasoning: str | None, answer: str | None) -> str:
    return f"{reasoning}</think>{answer}<|im_end|>"


def test_the_answers_are_those_of_the_models_own_forward(made: Path, demo_pair: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_pair / "target", dtype=torch.float32)
    for one in list(read_samples(made / "samples"))[:4]:
        with torch.no_grad():
            logits = model(torch.tensor([one.token_ids])).logits[0]  # [T, V]
        best = logits[one.loss_from - 1 : -1].argmax(-1).tolist()
        assert best == list(one.answer_ids)


def test_a_finished_stage_does_nothing_and_another_plan_is_refused(made: Path) -> None:
    shard = made / "samples" / "samples-00000.jsonl"
    before = shard.stat().st_mtime_ns
    again = training("generate", made)
    assert again.returncode == 0 and "nothing to do" in again.stderr
    other = training("generate", made, "sampling.temperature=0.5")
    assert other.returncode == 2 and other.stderr.startswith("training: ")
    assert "sampling.temperature 0.0 -> 0.5" in other.stderr
    assert shard.stat().st_mtime_ns == before


def test_a_draft_vocabulary_from_them(made: Path) -> None:
    done = training("vocab", made, "vocab.size=256")
    assert done.returncode == 0, done.stderr
    told = json.loads((made / "vocab" / "coverage.json").read_text())
    assert told["draft_vocab_size"] == 256 and told["coverage"] == 1.0
    assert (made / "vocab" / "vocab.safetensors").is_file()


@pytest.mark.full
def test_sampled_answers_differ_and_come_again_by_their_seeds(
    demo_pair: Path, tmp_path: Path
) -> None:
    sets = ["sampling.temperature=1.5", "generate.samples=8", "generate.most_duplicate=1"]
    sets += ["generate.most_degenerate=1", "generate.most_misplaced=1", "generate.most_empty=1"]
    sets += ["generate.most_truncated=1", "generate.least_samples=1", "generate.max_tokens=64"]
    for name in ("one", "two"):
        done = training("generate", tmp_path / name, *sets, count=4)
        assert done.returncode == 0, done.stderr
    one, two = (
        list(read_samples(tmp_path / name / "samples", dropped=True)) for name in ("one", "two")
    )
    assert len(one) == 8 and [s.seed for s in one] == list(range(8))
    assert [s.token_ids for s in one] == [s.token_ids for s in two]
    assert not any(s.greedy for s in one) and len({s.token_ids for s in one}) > 4


def test_an_engine_that_cannot_start_is_one_line(tmp_path: Path, demo_pair: Path) -> None:
    done = training("generate", tmp_path, "engine.max_model_len=100000")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("training: ")
    assert "engine.max_model_len=100000" in done.stderr and "Traceback" not in done.stderr
