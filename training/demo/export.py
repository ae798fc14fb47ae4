"""Write the demo's target in the Hugging Face layout that transformers, vLLM and SGLang load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.demo import corpus
from training.demo.config import LATENT_ON_DISK, TargetConfig
from training.demo.model import DemoTarget
from training.demo.tokenizer import save_tokenizer


def pad_latent(tensors: dict[str, Tensor], latent: int, width: int = LATENT_ON_DISK) -> None:
    """Widen every MLA latent in `tensors` from `latent` to `width` with zeros, in place.

    Exact: the norm divides by the wider mean square, so its weight shrinks by
    sqrt(latent / width); the model must have used an eps `width / latent` times the config's.
    """
    for name, tensor in list(tensors.items()):
        missing = width - latent
        if name.endswith("kv_a_proj_with_mqa.weight"):
            nope, rope = tensor[:latent], tensor[latent:]
            tensors[name] = torch.cat((nope, tensor.new_zeros(missing, tensor.shape[1]), rope))
        elif name.endswith("kv_a_layernorm.weight"):
            tensors[name] = torch.cat((tensor * (latent / width) ** 0.5, tensor.new_ones(missing)))
        elif name.endswith("kv_b_proj.weight"):
            tensors[name] = torch.cat((tensor, tensor.new_zeros(tensor.shape[0], missing)), dim=1)


def target_tensors(model: DemoTarget) -> dict[str, Tensor]:
    """The model's tensors under transformers' names and in its shapes."""
    config = model.config
    out: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        full = name if name.startswith("lm_head") else f"model.{name}"
        if name.endswith("mlp.bias"):
            out[full.replace("mlp.bias", "mlp.gate.e_score_correction_bias")] = tensor
        elif ".mlp.experts." in name:
            out.update(_split_experts(full, tensor, config))
        else:
            out[full] = tensor
    if config.kind == "mla":
        pad_latent(out, config.latent)
    return {name: tensor.detach().contiguous().clone() for name, tensor in out.items()}


def _split_experts(name: str, tensor: Tensor, config: TargetConfig) -> dict[str, Tensor]:
    """One side-by-side matrix -> the routed experts' and the shared expert's own."""
    dim = 1 if "down_proj" in name else 0
    blocks = tensor.chunk(config.experts + 1, dim)
    before, after = name.split(".mlp.experts.")
    split = {f"{before}.mlp.experts.{i}.{after}": b for i, b in enumerate(blocks[:-1])}
    split[f"{before}.mlp.shared_experts.{after}"] = blocks[-1]
    return split


def target_config(config: TargetConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The target's config.json."""
    c = config
    common: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "hidden_act": "silu",
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": tokenizer.token_to_id(corpus.BOS),
        "eos_token_id": tokenizer.token_to_id(corpus.IM_END),
        "pad_token_id": tokenizer.token_to_id(corpus.EOS),
        "torch_dtype": "float32",
    }
    return {**common, **(_mla_config(c) if c.kind == "mla" else _llama_config(c))}


def _llama_config(c: TargetConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "mlp_bias": False,
    }


def _mla_config(c: TargetConfig) -> dict[str, Any]:
    scaling = dict(c.rope_scaling or {})
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": c.heads,
        "q_lora_rank": c.q_rank,
        "kv_lora_rank": LATENT_ON_DISK,
        "qk_nope_head_dim": c.head_dim,
        "qk_rope_head_dim": c.rope_dim,
        "v_head_dim": c.head_dim,
        # `type` is what readers older than transformers 5 look for
        "rope_scaling": {**scaling, "type": scaling["rope_type"]},
        "n_routed_experts": c.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": c.experts_per_token,
        "moe_intermediate_size": c.expert_size,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": c.routed_scale,
        "num_nextn_predict_layers": 0,
        "ep_size": 1,
    }


def export_target(model: DemoTarget, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, generation config, weights and tokenizer into `folder`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(target_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    config = target_config(model.config, tokenizer)
    _write_json(folder / "config.json", config)
    ends = [config["eos_token_id"], tokenizer.token_to_id(corpus.EOS)]
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": ends}
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder, model.config.context)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_target(folder: Path, config: TargetConfig) -> DemoTarget:
    """The model of an exported folder, its latent cut back to the rank trained. In eval mode."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    model = DemoTarget(config)
    state = {}
    for name, old in model.state_dict().items():
        state[name] = _read_back(tensors, name, old, config)
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def _read_back(tensors: dict[str, Tensor], name: str, old: Tensor, config: TargetConfig) -> Tensor:
    full = name if name.startswith("lm_head") else f"model.{name}"
    if name.endswith("mlp.bias"):
        return tensors[full.replace("mlp.bias", "mlp.gate.e_score_correction_bias")]
    if ".mlp.experts." in name:
        before, after = full.split(".mlp.experts.")
        blocks = [tensors[f"{before}.mlp.experts.{i}.{after}"] for i in range(config.experts)]
        blocks.append(tensors[f"{before}.mlp.shared_experts.{after}"])
        return torch.cat(blocks, dim=1 if "down_proj" in name else 0)
    tensor = tensors[full]
    if name.endswith("kv_a_proj_with_mqa.weight"):
        return torch.cat((tensor[: config.latent], tensor[LATENT_ON_DISK:]))
    if name.endswith("kv_a_layernorm.weight"):
        return tensor[: config.latent] * (LATENT_ON_DISK / config.latent) ** 0.5
    if name.endswith("kv_b_proj.weight"):
        return tensor[:, : config.latent]
    return tensor
