"""Gates that were damaged, or are another stage's: each refusal says a way out that works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from capture_samples import write_samples

from engines.secret import is_secret
from harness.errors import UsageError
from training import samples as sample_files
from training.files import locked
from training.gate import GATE, Gate, passed_gate, read_gate, write_gate
from training.plan import TrainingPlan
from training.samples import Sample
from training.unchanged import check_same_samples, unchanged_samples


@pytest.mark.parametrize("data", [b'{"stage": "train", "pas', b"[1]", b"\xff\x00", b""])
def test_a_damaged_gate_is_to_be_removed(tmp_path: Path, data: bytes) -> None:
    (tmp_path / GATE).write_bytes(data)
    with pytest.raises(UsageError, match="remove it and run the stage again"):
        read_gate(tmp_path)


def test_the_gate_of_another_stage_opens_nothing(tmp_path: Path) -> None:
    write_gate(tmp_path, Gate.of("evaluate", (), output="x", inputs={}))
    with pytest.raises(UsageError, match="is the gate of evaluate, not of train"):
        passed_gate(tmp_path, "train")


def test_a_folder_within_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is --out a file"):
        read_gate(tmp_path / "file" / "train")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UsageError, match="another process"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("OPENAI_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("--api-key", True),
        ("PASSWORD", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("--max-num-batched-tokens", False),
        ("NCCL_DEBUG", False),
        ("KEYBOARD", False),
    ],
)
def test_which_names_hold_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def some_samples(count: int) -> list[Sample]:
    return [
        Sample(id=f"s{i}", prompt_id=f"p{i}", token_ids=(1, 2, i), loss_from=1, text="")
        for i in range(count)
    ]


def test_samples_are_proved_while_they_are_read_and_refused_at_their_end(tmp_path: Path) -> None:
    write_samples(tmp_path, some_samples(5))
    gate, samples = unchanged_samples(tmp_path)
    assert gate.stage == "generate" and list(samples) == some_samples(5)
    shard = tmp_path / "samples" / "samples-00000.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b"[1,2,3]", b"[1,2,9]"))
    taken: list[str] = []
    with pytest.raises(UsageError, match="samples changed since generate passed its gate"):
        for sample in unchanged_samples(tmp_path)[1]:
            taken.append(sample.id)
    assert len(taken) == 5
    shard.write_bytes(b"".join(shard.read_bytes().splitlines(keepends=True)[:-1]))  # one is gone
    with pytest.raises(UsageError, match="samples changed"):
        list(unchanged_samples(tmp_path)[1])


def test_a_stage_of_other_samples_than_are_kept_now_is_refused(tmp_path: Path) -> None:
    write_samples(tmp_path, some_samples(5))
    now = passed_gate(tmp_path / "samples", "generate").output
    for inputs in ({}, {"generate": now}):
        (tmp_path / "train").mkdir(exist_ok=True)
        write_gate(tmp_path / "train", Gate.of("train", (), output="x", inputs=inputs))
        check_same_samples(tmp_path, "train")
    write_samples(tmp_path, some_samples(6))  # one more is kept
    with pytest.raises(UsageError, match=r"train: was made from other samples"):
        check_same_samples(tmp_path, "train")


def test_stages_read_the_samples_once_and_evaluate_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training.evaluation.prompts import of_samples
    from training.train import stage as train

    write_samples(tmp_path, some_samples(40))
    reads: list[Path] = []
    original = sample_files.read_samples

    def counted(folder: Path) -> Iterator[Sample]:
        reads.append(folder)
        return original(folder)

    monkeypatch.setattr(sample_files, "read_samples", counted)
    monkeypatch.setattr("training.evaluation.prompts.read_samples", counted)
    assert of_samples(TrainingPlan(), tmp_path, 100)
    assert len(reads) == 2  # which prompts are held out is known once all were seen; then those
    reads.clear()
    monkeypatch.setattr("training.unchanged.check_same_samples", lambda work, *stages: None)
    for name in ("passed_gate", "unchanged_vocabulary"):  # the other stages' folders are not there
        where = "training.train.stage" if name == "passed_gate" else "training.unchanged"
        gate = Gate(stage="x", passed=True, checks=(), output="o")
        monkeypatch.setattr(f"{where}.{name}", lambda *given, gate=gate: gate)
    monkeypatch.setattr("training.targets.target_folder", lambda plan: tmp_path)
    monkeypatch.setattr("training.heads.read_facts", lambda folder: SimpleNamespace(vocab_size=9))
    inputs, asked = train._inputs(TrainingPlan(), tmp_path)
    assert len(reads) == 1 and inputs["capture"] == "o"
    assert asked["s7"] == ("p7", True) and len(asked) == 40
