"""Drafter folders: round trips, each engine's reading of the layer ids, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drafter_folders import build, edit, specs
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import checkpoint, formats, validate
from drafters.eagle3 import Eagle3Drafter
from drafters.headers import read_header, read_headers
from drafters.spec import DrafterError, DrafterSpec

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 32,
    "vocab_size": 50,
    "num_hidden_layers": 6,
}


@given(spec=specs(), own=st.booleans())
@settings(max_examples=25, deadline=None)
def test_save_and_load_give_the_same_drafter(
    spec: DrafterSpec, own: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("drafter")
    drafter = build(spec)
    if not own:
        drafter.share(embeddings=torch.randn(30, 16))
    checkpoint.save(drafter, folder)
    again = checkpoint.load(folder)
    assert again.spec == spec
    assert again.owns_embeddings is own
    for name, tensor in drafter.state_dict().items():
        if own or name != "embed_tokens.weight":
            assert torch.equal(tensor, again.state_dict()[name]), name
    assert torch.equal(again.rope_cos, drafter.rope_cos)


@given(
    aux=st.lists(st.integers(2, 60), min_size=1, max_size=5),
    architecture=st.sampled_from(["LlamaForCausalLM", "Qwen3MoeForCausalLM"]),
)
def test_sglang_reads_our_ids_back_as_the_same_layers(aux: list[int], architecture: str) -> None:
    ids = formats.aux_ids_for("sglang", tuple(aux), architecture)
    assert [i + 1 for i in ids] == aux  # the rule of sglang's models/llama.py
    ids = formats.aux_ids_for("sglang", tuple(aux), "DeepseekV3ForCausalLM")
    captured = [i + 1 for i in ids] if ids[0] == 1 else ids  # of models/deepseek_v2.py
    assert captured == aux
    assert formats.aux_ids_for("vllm", tuple(aux), architecture) == aux


def test_ids_sglang_cannot_express_are_refused() -> None:
    with pytest.raises(DrafterError, match="begin at 2"):
        formats.aux_ids_for("sglang", (1, 29, 57), "KimiK25ForConditionalGeneration")
    with pytest.raises(DrafterError, match="embedding"):
        formats.aux_ids_for("sglang", (0, 2), "LlamaForCausalLM")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A Llama drafter and a DeepSeek target's config beside it."""
    spec = DrafterSpec(
        kind="llama",
        hidden_size=32,
        target_hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        vocab_size=50,
        draft_vocab_size=50,
        aux_layers=(2, 4, 5),
    )
    drafter, target = tmp_path / "drafter", tmp_path / "target"
    checkpoint.save(Eagle3Drafter(spec), drafter)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    return drafter, target


def test_a_fitting_drafter_fits(folders: tuple[Path, Path]) -> None:
    assert list(validate.misfits(*folders)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 64}, "hidden_size 32"),
        ({"vocab_size": 51}, "vocab_size 50"),
        ({"num_hidden_layers": 4}, "not all within the 4 layers"),
    ],
)
def test_another_target_is_refused(
    folders: tuple[Path, Path], changes: dict[str, int], reason: str
) -> None:
    drafter, target = folders
    edit(target, **changes)
    with pytest.raises(DrafterError, match=reason):
        validate.check_fit(drafter, target)


def test_misshapen_and_missing_tensors_are_named(folders: tuple[Path, Path]) -> None:
    drafter, target = folders
    edit(drafter, intermediate_size=40)
    with pytest.raises(DrafterError, match=r"mlp\.gate_proj\.weight has shape \[48, 32\]"):
        validate.check_fit(drafter, target)
    edit(drafter, intermediate_size=48, fc_norm=True)
    with pytest.raises(DrafterError, match=r"fc_norm\.0\.weight \[32\] is missing"):
        validate.check_fit(drafter, target)
    with pytest.raises(DrafterError, match=r"fc_norm\.0\.weight is missing"):
        checkpoint.load(drafter)


def test_a_drafter_without_layer_ids_is_refused(folders: tuple[Path, Path]) -> None:
    drafter, target = folders
    edit(drafter, eagle_config={})
    with pytest.raises(DrafterError, match="each engine would guess"):
        validate.check_fit(drafter, target)


@pytest.mark.parametrize("cut", [0, 4, 40, -1])
def test_a_cut_off_file_is_named(folders: tuple[Path, Path], cut: int) -> None:
    drafter, target = folders
    file = drafter / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DrafterError, match=r"model\.safetensors"):
        validate.check_fit(drafter, target)


@given(data=st.binary(max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_bytes_crash_the_header_reader(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("bytes") / "x.safetensors"
    file.write_bytes(data)
    try:
        assert isinstance(read_header(file), dict)
    except DrafterError as error:
        assert str(file) in str(error) and "\n" not in str(error)


def test_missing_weights_and_broken_index_are_named(folders: tuple[Path, Path]) -> None:
    drafter, target = folders
    (drafter / "model.safetensors").rename(drafter / "part.bin")
    with pytest.raises(DrafterError, match="weights are missing"):
        validate.check_fit(drafter, target)
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    (drafter / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DrafterError, match="model-00001-of-00002"):
        read_headers(drafter)
    with pytest.raises(DrafterError, match="is missing"):
        validate.check_fit(drafter, target.parent / "nowhere")


def test_for_engine_writes_ids_and_links_the_weights(folders: tuple[Path, Path]) -> None:
    drafter, target = folders
    edit(target, architectures=["LlamaForCausalLM"])
    out = formats.for_engine(drafter, "sglang", target, target.parent / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert "eagle_aux_hidden_state_layer_ids" not in config
    for_vllm = formats.for_engine(drafter, "vllm", target, target.parent / "out-vllm")
    config = json.loads((for_vllm / "config.json").read_text())
    # at the top level too, the only place where vLLM's model runner V2 looks
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert (out / "model.safetensors").read_bytes() == (drafter / "model.safetensors").read_bytes()
    assert json.loads((drafter / "config.json").read_text())["eagle_config"][
        "eagle_aux_hidden_state_layer_ids"
    ] == [2, 4, 5]


def test_flags_an_engine_ignores_are_refused(folders: tuple[Path, Path]) -> None:
    drafter, target = folders
    edit(drafter, norm_before_residual=True)
    with pytest.raises(DrafterError, match="SGLang ignores norm_before_residual"):
        formats.for_engine(drafter, "sglang", target, target.parent / "out")
    formats.for_engine(drafter, "vllm", target, target.parent / "out")


def test_midlayer_names_are_read(folders: tuple[Path, Path]) -> None:
    from safetensors.torch import load_file, save_file

    drafter, target = folders
    file = drafter / "model.safetensors"
    renamed = {k.replace("layers.0.", "midlayer."): v for k, v in load_file(file).items()}
    save_file(renamed, file)
    validate.check_fit(drafter, target)
    assert checkpoint.load(drafter).layer.mlp.up_proj.weight.shape == (48, 32)
