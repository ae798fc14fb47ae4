"""The engine's own forward pass against transformers', and the reading of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import LLAMA3, VOCAB, build_target, load_target
from safetensors.torch import load_file, save_file

from engines.base import EngineUsageError
from engines.capture.target import capture_target
from engines.reference.cache import Batch
from engines.reference.config import read_config
from engines.reference.tokenizer import Tokenizer

CONFIGS = {
    "llama": ("llama", {}),
    "llama-tied-bias-llama3": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": LLAMA3},
    ),
    "llama-multi-head-mlp-bias": ("llama", {"num_key_value_heads": 4, "mlp_bias": True}),
    "deepseek": ("deepseek", {}),
    "deepseek-no-q-lora-no-groups": (
        "deepseek",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek-many-experts": ("deepseek", {"n_routed_experts": 32, "n_shared_experts": 2}),
    "deepseek-plain-rope": (
        "deepseek",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_states_and_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = CONFIGS[name]
    theirs = build_target(family, tmp_path, **changes)
    ours = load_target(tmp_path)
    ours.prepare_rope(256)
    cache = ours.new_cache(slots=3, length=256)
    ids = torch.randint(0, VOCAB, (2, 60), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(ids, output_hidden_states=True)
    layers = tuple(range(4))
    with torch.inference_mode():
        # 40 at once (keys expanded), then 13, then 7 (absorbed), in slots 1 and 2
        for start, end in ((0, 40), (40, 53), (53, 60)):
            batch = Batch(
                cache, first_slot=1, starts=[start, start], tokens=end - start, device="cpu"
            )
            states, aux = ours.forward(ids[:, start:end], batch, cache, layers)
            logits = ours.logits(states)
            torch.testing.assert_close(logits, expected.logits[:, start:end], atol=3e-5, rtol=0)
            hidden = torch.cat(expected.hidden_states, dim=-1)[:, start:end]
            torch.testing.assert_close(aux, hidden, atol=3e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_rows_of_different_length_do_not_disturb_each_other(family: str, tmp_path: Path) -> None:
    theirs = build_target(family, tmp_path)
    ours = load_target(tmp_path)
    ours.prepare_rope(256)
    cache = ours.new_cache(slots=2, length=256)
    ids = torch.randint(0, VOCAB, (2, 50), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = theirs(ids).logits
        batch = Batch(cache, first_slot=0, starts=[0, 0], tokens=50, device="cpu")
        ours.forward(ids, batch, cache)
        # rewind the rows by different lengths: what lies beyond must be invisible
        batch = Batch(cache, first_slot=0, starts=[46, 20], tokens=4, device="cpu")
        states, _ = ours.forward(torch.stack((ids[0, 46:50], ids[1, 20:24])), batch, cache)
        logits = ours.logits(states)
    torch.testing.assert_close(logits[0], expected[0, 46:50], atol=3e-5, rtol=0)
    torch.testing.assert_close(logits[1], expected[1, 20:24], atol=3e-5, rtol=0)


def _rewrite(folder: Path, change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


PARTS = ("gate", "up", "down")


def test_kimi_wrapper_sharded_with_experts_fused(tmp_path: Path) -> None:
    plain, wrapped = tmp_path / "plain", tmp_path / "wrapped"
    build_target("deepseek", plain)
    wrapped.mkdir()
    text = json.loads((plain / "config.json").read_text())
    text["rope_scaling"] = {"type": "yarn", **text.pop("rope_parameters")}
    text["rope_theta"] = text["rope_scaling"].pop("rope_theta")
    text["rope_scaling"].pop("rope_type")
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (wrapped / "config.json").write_text(json.dumps(outer))
    held = load_file(plain / "model.safetensors")  # transformers saves each expert apart
    apart = [name for name in held if ".mlp.experts." in name]
    tensors = {f"language_model.{n}": t for n, t in held.items() if n not in apart}
    for stem in {name.split(".experts.")[0] + ".experts" for name in apart}:
        parts = {p: [held[f"{stem}.{e}.{p}_proj.weight"] for e in range(8)] for p in PARTS}
        joined = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"language_model.{stem}.gate_up_proj"] = torch.stack(joined)
        tensors[f"language_model.{stem}.down_proj"] = torch.stack(parts["down"])
    tensors["vision_tower.weight"] = torch.zeros(2)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n].contiguous() for n in part}, wrapped / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (wrapped / "model.safetensors.index.json").write_text(json.dumps(index))

    outputs = []
    for folder in (plain, wrapped):
        model = load_target(folder)
        model.prepare_rope(64)
        cache = model.new_cache(slots=1, length=64)
        batch = Batch(cache, first_slot=0, starts=[0], tokens=9, device="cpu")
        with torch.inference_mode():
            states, _ = model.forward(torch.arange(9)[None] + 5, batch, cache)
            outputs.append(model.logits(states))
    torch.testing.assert_close(outputs[0], outputs[1], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
        (lambda c: c.pop("architectures"), "does not serve a model without architectures"),
        (lambda c: c.update(quantization_config={"bits": 4}), "quantised"),
        (lambda c: c.pop("hidden_size"), "hidden_size"),
        (lambda c: c.update(hidden_act="gelu"), "gelu"),
    ],
)
def test_a_config_that_cannot_be_served_says_why(change: Any, words: str, tmp_path: Path) -> None:
    build_target("llama", tmp_path)
    _rewrite(tmp_path, change)
    with pytest.raises(EngineUsageError, match=words):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "the key 'hidden_size' is missing"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps: could not convert"),
        ({"rope_theta": 0}, "rope_theta is 0, not a positive number"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x', not an object"),
    ],
)
def test_a_config_that_cannot_be_read_names_its_key(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    plain: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    plain |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    plain |= {"vocab_size": 32, "intermediate_size": 64}
    config = {key: value for key, value in {**plain, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read in (read_config, capture_target):
        with pytest.raises(EngineUsageError) as told:
            read(tmp_path)
        assert said in str(told.value) and "Error" not in str(told.value)
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert read_config(tmp_path).rope_theta == 10000.0
    assert capture_target(tmp_path).norm_eps == 1e-6


def test_a_tokenizer_that_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(EngineUsageError, match=r"no usable tokenizer: .*; fetch the tokenizer"):
        Tokenizer(tmp_path)


def test_checkpoints_that_are_not_whole_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EngineUsageError, match="no such file"):
        read_config(tmp_path / "nowhere")
    build_target("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(4)}
    save_file(extra, tmp_path / "model.safetensors")
    with pytest.raises(EngineUsageError, match="q_norm"):
        load_target(tmp_path)
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineUsageError, match=r"model\.norm\.weight"):
        load_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EngineUsageError, match=r"model\.safetensors"):
        load_target(tmp_path)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    build_target("llama", tmp_path)
    assert read_config(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_config(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(bad: float, tmp_path: Path) -> None:
    """Every answer would be one token, and a drafter that proposes it perfect."""
    build_target("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 2] = bad
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(EngineUsageError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN or"):
        load_target(tmp_path)
