"""Read a target model's `config.json` into one flat record, whatever family it is of.

Two families are served: Llama (grouped-query attention, dense) and DeepSeek-V3, which is also
Kimi-K2's text model (multi-head latent attention, mixture of experts). Kimi-K2.5 wraps the latter
as `text_config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from drafters.reading import wrong_number
from engines.base import EngineUsageError
from engines.checkpoint import read_as, read_json

LLAMA_ARCHITECTURES = ("LlamaForCausalLM",)
DEEPSEEK_ARCHITECTURES = ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")
WRAPPERS = ("KimiK25ForConditionalGeneration",)


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Routing and sizes of the experts; `first_dense` layers before them have a plain MLP."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_experts: int
    groups: int
    groups_kept: int
    normalise: bool
    scaling: float
    first_dense: int


class MlaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: ranks of the latents, widths of a head's parts."""

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    interleaved_rope: bool


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the forward pass needs to know. `mla` and `moe` None: a Llama."""

    family: Literal["llama", "deepseek"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    weight_prefix: str
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None


def read_config(model: Path) -> ModelConfig:
    """Read `model/config.json` (and the end tokens of `generation_config.json`).

    Raises EngineUsageError for a missing or unreadable file and for an unknown architecture.
    """
    raw = read_json(model / "config.json")
    architecture = (raw.get("architectures") or ["a model without architectures"])[0]
    prefix = ""
    text = raw
    if architecture in WRAPPERS:
        text, prefix = raw.get("text_config") or {}, "language_model."
        architecture = (text.get("architectures") or ["DeepseekV3ForCausalLM"])[0]
    if architecture not in LLAMA_ARCHITECTURES + DEEPSEEK_ARCHITECTURES:
        known = ", ".join(LLAMA_ARCHITECTURES + DEEPSEEK_ARCHITECTURES + WRAPPERS)
        raise EngineUsageError(
            f"{model / 'config.json'}: the reference engine does not serve {architecture}; "
            f"it serves {known}"
        )
    if text.get("quantization_config") or raw.get("quantization_config"):
        raise EngineUsageError(
            f"{model / 'config.json'}: quantised weights are not served by the reference engine; "
            "give it a checkpoint in float32, float16 or bfloat16"
        )
    with read_as(model / "config.json", architecture):
        return _flatten(model, raw, text, prefix, is_llama=architecture in LLAMA_ARCHITECTURES)


def _flatten(
    model: Path, raw: dict[str, Any], text: dict[str, Any], prefix: str, *, is_llama: bool
) -> ModelConfig:
    if (wrong := wrong_number(text)) is not None:
        raise ValueError(wrong)
    heads = int(text["num_attention_heads"])
    if text.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {text['hidden_act']!r}; only silu is implemented")
    theta, scaling = _rope(text)
    return ModelConfig(
        family="llama" if is_llama else "deepseek",
        vocab_size=int(text["vocab_size"]),
        hidden_size=int(text["hidden_size"]),
        intermediate_size=int(text["intermediate_size"]),
        layers=int(text["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
        max_positions=int(text.get("max_position_embeddings") or 2048),
        norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
        eos_token_ids=_end_tokens(model, raw, text),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or "float32"),
        weight_prefix=prefix,
        mla=None if is_llama else _mla(text),
        moe=None if is_llama else _moe(text),
    )


def _rope(text: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """theta and scaling from transformers' new (`rope_parameters`) or old spelling."""
    scaling = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or text.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.pop("type", None) or "default"
    if kind == "default":
        return theta, None
    scaling["rope_type"] = kind
    return theta, scaling


def _end_tokens(model: Path, raw: dict[str, Any], text: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json speaks before config.json, as in transformers."""
    path = model / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.exists() else None
    if ids is None:
        ids = text.get("eos_token_id", raw.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _mla(text: dict[str, Any]) -> MlaConfig:
    rank = text.get("q_lora_rank")
    return MlaConfig(
        q_lora_rank=int(rank) if rank else None,
        kv_lora_rank=int(text["kv_lora_rank"]),
        nope_dim=int(text["qk_nope_head_dim"]),
        rope_dim=int(text["qk_rope_head_dim"]),
        v_dim=int(text["v_head_dim"]),
        interleaved_rope=bool(text.get("rope_interleave", True)),
    )


def _moe(text: dict[str, Any]) -> MoeConfig | None:
    if not text.get("n_routed_experts"):
        return None
    if text.get("scoring_func", "sigmoid") != "sigmoid":
        raise ValueError(f"scoring_func {text['scoring_func']!r}; only sigmoid is implemented")
    if text.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ValueError(f"topk_method {text['topk_method']!r}; only noaux_tc is implemented")
    if text.get("moe_layer_freq", 1) != 1:
        raise ValueError("moe_layer_freq other than 1 is not implemented")
    return MoeConfig(
        experts=int(text["n_routed_experts"]),
        experts_per_token=int(text["num_experts_per_tok"]),
        intermediate_size=int(text["moe_intermediate_size"]),
        shared_experts=int(text.get("n_shared_experts") or 0),
        groups=int(text.get("n_group") or 1),
        groups_kept=int(text.get("topk_group") or 1),
        normalise=bool(text.get("norm_topk_prob", True)),
        scaling=float(text.get("routed_scaling_factor", 1.0)),
        first_dense=int(text.get("first_k_dense_replace") or 0),
    )
