"""An export holds the checkpoint's very tensors; one that cannot, or does not, fails the gate."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import checkpoint
from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterError, DrafterSpec
from training.export import check_format, describe, different_tensors, write_format

SPEC = DrafterSpec(
    kind="llama",
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=40,
    draft_vocab_size=24,
    aux_layers=(2, 4, 5),
    bos_token_id=1,
    eos_token_id=2,
)
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    return folder


def saved(folder: Path, **more: object) -> Path:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(msgspec.structs.replace(SPEC, **more))
    drafter.set_vocabulary(torch.arange(24) + 5)
    drafter.share(embeddings=torch.randn(40, 16))
    checkpoint.save(drafter, folder)
    return folder


@pytest.mark.parametrize(("name", "ids"), [("vllm", (2, 4, 5)), ("sglang", (1, 3, 4))])
def test_an_export_is_whole_and_the_same_drafter(
    name: str, ids: tuple[int, ...], target: Path, tmp_path: Path
) -> None:
    source, out = saved(tmp_path / "best"), tmp_path / "export" / name
    out.parent.mkdir()
    write_format(source, name, target, out)  # type: ignore[arg-type]
    assert not any(path.is_symlink() for path in out.iterdir())
    assert list(different_tensors(source, out)) == []
    exported = describe(name, out)  # type: ignore[arg-type]
    assert exported.layer_ids == ids  # what the engine calls the same layers of a Llama
    assert set(exported.files) == {"config.json", "model.safetensors"}
    checks = check_format(source, name, target, out)  # type: ignore[arg-type]
    assert all(check.passed for check in checks), checks
    write_format(source, name, target, out)  # type: ignore[arg-type]
    assert describe(name, out) == exported  # type: ignore[arg-type]


def test_a_changed_bit_is_found(target: Path, tmp_path: Path) -> None:
    source, out = saved(tmp_path / "best"), tmp_path / "vllm"
    write_format(source, "vllm", target, out)
    tensors = load_file(out / "model.safetensors")
    tensors["fc.weight"][0, 0] += 1e-6
    (out / "model.safetensors").unlink()
    save_file(tensors, out / "model.safetensors")
    assert list(different_tensors(source, out)) == ["fc.weight"]
    failed = [c for c in check_format(source, "vllm", target, out) if not c.passed]
    assert [c.reason for c in failed] == ["fc.weight"]


def test_a_drafter_that_does_not_fit_the_target_fails(target: Path, tmp_path: Path) -> None:
    source, out = saved(tmp_path / "best"), tmp_path / "vllm"
    write_format(source, "vllm", target, out)
    (target / "config.json").write_text(json.dumps({**TARGET, "num_hidden_layers": 4}))
    failed = [c for c in check_format(source, "vllm", target, out) if not c.passed]
    assert len(failed) == 1 and "aux layers" in failed[0].reason


def test_a_form_that_cannot_hold_the_drafter_refuses_it(target: Path, tmp_path: Path) -> None:
    source = saved(tmp_path / "best", norm_before_residual=True)
    with pytest.raises(DrafterError, match="norm_before_residual"):
        write_format(source, "sglang", target, tmp_path / "sglang")
    assert not (tmp_path / "sglang").exists()
