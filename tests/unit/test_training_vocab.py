"""The draft vocabulary: which tokens, which order, what they cover, and a drafter's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from training_samples import sample, target

from harness.errors import GateFailed, UsageError
from training import vocab
from training.folders import VOCAB_FILE, stage_folder
from training.gate import Gate, write_gate
from training.generate.judge import digest
from training.generate.shards import ShardWriter
from training.generate.text import read_text
from training.plan import HeadSection, TargetSection, TrainingPlan, VocabSection
from training.samples import Sample, read_samples
from training.targets import target_digest, target_identity


@st.composite
def choices(draw: st.DrawFn) -> tuple[list[int], int, set[int]]:
    counts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=30))
    always = draw(st.sets(st.integers(0, len(counts) - 1), max_size=5))
    size = draw(st.integers(max(1, len(always)), len(counts)))
    return counts, size, always


@given(choices())
def test_the_most_frequent_are_chosen_ties_go_by_id(
    choice: tuple[list[int], int, set[int]],
) -> None:
    counts, size, always = choice
    kept = vocab.choose_vocabulary(counts, size, always)
    assert len(kept) == size and list(kept) == sorted(set(kept)) and always <= set(kept)
    chosen = set(kept) - always
    for left_out in set(range(len(counts))) - set(kept):
        for one in chosen:
            assert (-counts[one], one) < (-counts[left_out], left_out)


@given(choices())
def test_the_file_gives_the_ids_back(choice: tuple[list[int], int, set[int]]) -> None:
    from safetensors.numpy import load

    counts, size, always = choice
    kept = vocab.choose_vocabulary(counts, size, always)
    tensors = load(vocab.vocabulary_file(kept, len(counts)))
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    assert tuple(tensors["d2t"] + np.arange(size)) == kept
    assert tuple(np.flatnonzero(tensors["t2d"])) == kept and tensors["t2d"].shape == (len(counts),)


@pytest.mark.parametrize(
    ("size", "always", "said"),
    [(4, (), "the target has 3 tokens"), (1, (0, 2), "2 end and think tokens alone do not fit")],
)
def test_a_size_that_cannot_be(size: int, always: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        vocab.choose_vocabulary([1, 2, 3], size, always)


class Work:
    """A training with samples that passed their gate, and its target."""

    def __init__(self, root: Path) -> None:
        self.work, self.target = root / "work", target(root / "target")
        self.text = read_text(self.target)
        self.end = next(iter(self.text.end_ids))
        self.think = self.text.think_ids

    def samples(self, *samples: Sample, passed: bool = True) -> None:
        folder = stage_folder(self.work, "generate")
        folder.mkdir(parents=True)
        with ShardWriter(folder, 10) as writer:
            for one in samples:
                writer.append(one)
        inputs = {"target": target_digest(target_identity(self.target))}
        output = digest(read_samples(folder))
        gate = Gate(stage="generate", passed=passed, checks=(), output=output, inputs=inputs)
        write_gate(folder, gate)

    def run(self, drafter: HeadSection | None = None, **section: Any) -> dict[str, Any]:
        plan = TrainingPlan(
            target=TargetSection(path=str(self.target)),
            vocab=VocabSection(**section),
            drafter=drafter or HeadSection(),
        )
        vocab.run(plan, self.work)
        told: dict[str, Any] = json.loads(self.path(vocab.COVERAGE).read_text())
        return told

    def path(self, name: str) -> Path:
        return stage_folder(self.work, "vocab") / name

    def kept(self) -> list[int]:
        d2t = load_file(self.path(VOCAB_FILE))["d2t"]
        return list(d2t + np.arange(d2t.size))


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def answer(name: str, index: int, ids: list[int], category: str) -> Sample:
    return sample(name, index, token_ids=(300, 301, *ids), loss_from=2, category=category)


def test_end_and_think_tokens_are_in_it_and_prompts_count_for_nothing(work: Work) -> None:
    closes = work.think[1]
    assert closes is not None
    ids = [50] * 9 + [60] * 5 + [70] * 4 + [closes, work.end]
    work.samples(answer("a", 0, ids, "x"), answer("b", 1, [80], "y"))
    told = work.run(size=4, least_coverage=0.5)
    assert work.kept() == sorted([50, 60, closes, work.end])
    assert told["tokens"] == 21 and told["coverage"] == pytest.approx(16 / 21)
    assert told["categories"] == {"x": pytest.approx(16 / 20), "y": 0.0}
    assert [(i, n) for i, _, n in told["outside"]] == [(70, 4), (80, 1)]


def test_too_little_coverage_fails_the_gate_and_another_limit_passes_it(work: Work) -> None:
    work.samples(answer("a", 0, [50, 60, work.end], "x"))
    with pytest.raises(GateFailed, match=r"coverage 0.6667 \(wanted >= 0.95\)"):
        work.run(size=2)
    assert work.run(size=2, least_coverage=0.6)["draft_vocab_size"] == 2


def test_no_size_is_the_whole_vocabulary_and_writes_none(work: Work) -> None:
    work.samples(answer("a", 0, [50, work.end], "x"))
    told = work.run()
    assert told["coverage"] == 1.0 and not work.path(VOCAB_FILE).exists()


def test_another_size_or_other_samples_are_never_mixed_in(work: Work) -> None:
    work.samples(answer("a", 0, [50, work.end], "x"))
    work.run(size=2)
    before = work.path(VOCAB_FILE).read_bytes()
    with pytest.raises(UsageError, match=r"vocab.size 2 -> 3; give another --out"):
        work.run(size=3)
    assert work.path(VOCAB_FILE).read_bytes() == before
    folder = stage_folder(work.work, "generate")
    gate = json.loads((folder / "gate.json").read_text())
    with ShardWriter(folder, 10) as writer:
        writer.append(answer("b", 0, [51, work.end], "x"))
    other = digest(read_samples(folder))
    (folder / "gate.json").write_text(json.dumps({**gate, "output": other}))
    with pytest.raises(UsageError, match=f"the samples {gate['output'][:12]} -> {other[:12]}"):
        work.run(size=2)
    (folder / "gate.json").write_text(
        json.dumps({**gate, "output": other, "inputs": {"target": "another"}})
    )
    with pytest.raises(UsageError, match="not of the target"):
        work.run(size=2)


def test_samples_that_did_not_pass_are_refused(work: Work) -> None:
    with pytest.raises(UsageError, match="generate has not ended"):
        work.run()
    work.samples(answer("a", 0, [50], "x"))
    folder = stage_folder(work.work, "generate")
    gate = json.loads((folder / "gate.json").read_text())
    check = {"name": "truncated share", "passed": False}
    (folder / "gate.json").write_text(json.dumps({**gate, "passed": False, "checks": [check]}))
    with pytest.raises(GateFailed, match="did not pass its gate: truncated share"):
        work.run()


def test_a_finetuned_drafter_keeps_its_own_vocabulary(work: Work, tmp_path: Path) -> None:
    ids = np.array([10, 50, work.end] if work.end > 50 else [work.end, 10, 50])
    save_file({"d2t": ids - np.arange(3)}, tmp_path / "model.safetensors")
    work.samples(answer("a", 0, [50, 60, work.end], "x"))
    head = HeadSection(finetune=str(tmp_path))
    with pytest.raises(UsageError, match="drafts 3 tokens, and keeps them"):
        work.run(head, size=4)
    told = work.run(head, least_coverage=0.5)
    assert work.kept() == ids.tolist() and told["coverage"] == pytest.approx(2 / 3)
    assert told["source"] == "the drafter's own"


def test_absolute_ids_in_place_of_offsets_are_refused(work: Work, tmp_path: Path) -> None:
    ids = np.arange(5, 700, 5)  # absolute: read as offsets they run beyond the vocabulary
    save_file({"d2t": ids}, tmp_path / "model.safetensors")
    work.samples(answer("a", 0, [50], "x"))
    with pytest.raises(UsageError, match="d2t is no table of offsets"):
        work.run(HeadSection(finetune=str(tmp_path)))


def test_a_token_beyond_the_targets_vocabulary_is_told(work: Work) -> None:
    work.samples(answer("a", 0, [5000], "x"))
    with pytest.raises(UsageError, match=r"holds token 5000, and the target has \d+"):
        work.run()


def test_samples_that_changed_since_their_gate_are_refused(work: Work) -> None:
    work.samples(answer("a", 0, [50], "x"), answer("b", 0, [51], "x"))
    shard = stage_folder(work.work, "generate") / "samples-00000.jsonl"
    shard.write_bytes(shard.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(UsageError, match="samples changed since generate passed its gate"):
        work.run()
    assert not work.path(VOCAB_FILE).exists()
