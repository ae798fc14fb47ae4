"""Gates that were damaged, or are another stage's: each refusal says a way out that works."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from training.files import locked
from training.gate import GATE, Gate, passed_gate, read_gate, write_gate
from training.generate.secret import is_secret


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
