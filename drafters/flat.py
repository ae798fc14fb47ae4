"""The flat config.json: the drafter's own keys at the top, aux layers in `eagle_config`.

vLLM, SGLang, SpecForge and the published MLA heads use it; they differ in how they count layers
(`drafters.ids`), in the names of the tensors, and in which keys they read (`drafters.engines`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from drafters.headers import TensorHeader
from drafters.spec import DrafterError, DrafterSpec, MlaDims, RopeSpec

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
MARK = "drafter_format"
"""The key by which our own folders say how their layer ids are counted."""
IDS = "eagle_aux_hidden_state_layer_ids"
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
KNOWN_ROPES = ("default", "linear", "llama3", "yarn", "deepseek_yarn")
"""The kinds of rotary embedding that `drafters.layers` computes."""
_ROPE_FIELDS = ("rope_scaling", "rope_parameters")
_SIZES = (
    *("hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size"),
    "max_position_embeddings",
)
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ATTENTION = "layers.0.self_attn."


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a target's config (Kimi-K2.5 wraps it in `text_config`)."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else dict(config)


def rope_of(config: Mapping[str, Any]) -> RopeSpec:
    """The rotary embedding of a config, in transformers' old (`rope_scaling`) or new form.

    The scaling's kind is always under `rope_type`.
    """
    merged: dict[str, Any] = {}
    for field in _ROPE_FIELDS:
        if isinstance(config.get(field), dict):
            merged.update(config[field])
    theta = float(merged.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    older = merged.pop("type", "default")
    kind = merged.pop("rope_type", older)
    return RopeSpec(
        theta=theta, scaling=None if kind == "default" else {"rope_type": kind, **merged}
    )


def eagle_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config's `eagle_config`, empty where it has none."""
    inner = config.get("eagle_config")
    return inner if isinstance(inner, dict) else {}


def written_ids(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layer ids a config names, the top level before `eagle_config` as vLLM reads them.

    None where it names none. Raises DrafterError where they are no list of natural numbers.
    """
    ids = config.get(IDS) or eagle_config(config).get(IDS)
    if not ids:
        return None
    if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
        raise DrafterError(f"{IDS} is {ids!r}, not a list of layer numbers")
    return tuple(ids)


def to_config(spec: DrafterSpec, ids: list[int] | None = None) -> dict[str, Any]:
    """The flat config.json of a drafter; `ids` None: the aux layers in vLLM's count."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[spec.kind]],
        # deepseek_v3 is rewritten by vLLM and refused; kimi_k2 is what published MLA heads use
        "model_type": "kimi_k2" if spec.kind == "mla" else "llama",
        "hidden_size": spec.hidden_size,
        "target_hidden_size": spec.target_hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_act": spec.hidden_act,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": spec.dtype,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
    }
    config.update(rope_config(spec.rope))
    if spec.mla is None:
        config["head_dim"] = spec.head_dim
    else:
        config.update({key: getattr(spec.mla, key) for key in MLA_KEYS})
        # an MLA head's feed-forward is dense: no expert fields (SGLang refuses null ones)
        config.update(first_k_dense_replace=1, moe_layer_freq=1)
    written = list(spec.aux_layers) if ids is None else ids
    return with_layers(config, spec, written, "vllm" if ids is None else "sglang")


def with_layers(
    config: dict[str, Any], spec: DrafterSpec, ids: list[int], reader: Literal["vllm", "sglang"]
) -> dict[str, Any]:
    """A flat config with everything that engines read of aux layers and norms said explicitly.

    vLLM's model runner V2 looks for the ids at the top level alone, its V1 there first; SGLang
    looks for them in `eagle_config` alone.
    """
    kept = {key: value for key, value in config.items() if key not in (IDS, "use_aux_norm")}
    if reader == "vllm":
        kept[IDS] = ids
    return {
        **kept,
        "num_aux_hidden_states": len(ids),  # vLLM takes fc's width from here
        "eagle_config": {
            **eagle_config(config),
            IDS: ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": spec.norm_before_fc,
        },
        **{flag: getattr(spec, flag) for flag in FLAGS},
        MARK: mark(reader, spec.aux_layers, ids),
    }


def mark(reader: str, indices: tuple[int, ...], ids: list[int]) -> dict[str, Any]:
    """What a folder of ours says of its layer ids: the neutral indices beside what is written."""
    return {"ids_for": reader, "hidden_states_index": list(indices), "layer_ids": list(ids)}


def marked_indices(config: Mapping[str, Any], ids: tuple[int, ...]) -> tuple[int, ...] | None:
    """The indices that a folder of ours vouches for; None where it doesn't.

    A mark made for other ids than those the config now names does not count: somebody edited them.
    """
    told = config.get(MARK)
    if not isinstance(told, dict) or told.get("layer_ids") != list(ids):
        return None
    indices = told.get("hidden_states_index")
    if not isinstance(indices, list) or len(indices) != len(ids):
        return None
    return tuple(indices) if all(type(i) is int and i >= 0 for i in indices) else None


def rope_config(rope: RopeSpec) -> dict[str, Any]:
    """A rotary embedding in transformers' old form, which every engine reads."""
    config: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.scaling is not None:
        kind = rope.scaling.get("rope_type", rope.scaling.get("type"))
        # both names of the kind: readers older and newer than transformers 5
        config["rope_scaling"] = {**rope.scaling, "rope_type": kind, "type": kind}
    return config


def head_kind(
    config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> Literal["llama", "mla"]:
    """Which attention the head has: by its tensors, by its config where they do not tell."""
    if f"{_ATTENTION}kv_a_proj_with_mqa.weight" in tensors:
        return "mla"
    if f"{_ATTENTION}k_proj.weight" in tensors:
        return "llama"
    return "mla" if config.get("kv_lora_rank") is not None else "llama"


def spec_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorHeader],
    indices: tuple[int, ...],
) -> DrafterSpec:
    """A flat config (or one hoisted from speculators) and its tensors -> the neutral spec.

    Sizes that the config leaves out are taken from the tensors. Raises KeyError, TypeError or
    ValueError where a value is missing or is none.
    """
    kind = head_kind(config, tensors)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    vocab, eagle = _size(config, "vocab_size"), eagle_config(config)
    rows = {name: header.shape[0] for name, header in tensors.items() if header.shape}
    head_dim = config.get("head_dim") or _divided(rows.get(f"{_ATTENTION}q_proj.weight"), heads)
    head_dim = int(head_dim if kind == "llama" and head_dim else hidden // heads)
    kv_heads = config.get("num_key_value_heads")
    if kv_heads is None and kind == "llama":
        kv_heads = _divided(rows.get(f"{_ATTENTION}k_proj.weight"), head_dim)
    inner = config.get("intermediate_size") or rows["layers.0.mlp.gate_proj.weight"]
    mla = MlaDims(**{key: config[key] for key in MLA_KEYS}) if kind == "mla" else None
    spec = DrafterSpec(
        kind=kind,
        hidden_size=hidden,
        target_hidden_size=int(config.get("target_hidden_size") or hidden),
        intermediate_size=int(inner),
        num_attention_heads=heads,
        num_key_value_heads=int(kv_heads or heads),
        head_dim=head_dim,
        vocab_size=vocab,
        draft_vocab_size=int(config.get("draft_vocab_size") or rows.get("lm_head.weight") or vocab),
        aux_layers=indices,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        hidden_act=str(config.get("hidden_act") or "silu"),
        rope=rope_of(config),
        mla=mla,
        norm_before_residual=bool(config.get("norm_before_residual")),
        # the one flag that engines look for in eagle_config, before the top level
        norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
        norm_output=bool(config.get("norm_output")),
        bos_token_id=one_id(config.get("bos_token_id")),
        eos_token_id=one_id(config.get("eos_token_id")),
        dtype=_dtype(config, tensors),
    )
    _check_numbers(spec)
    return spec


def _check_numbers(spec: DrafterSpec) -> None:
    """ValueError where a size is none, or a rope base or epsilon is no positive number."""
    sizes = {key: getattr(spec, key) for key in _SIZES}
    if spec.mla is not None:
        dims = {key: getattr(spec.mla, key) for key in MLA_KEYS}
        sizes |= {
            key: value for key, value in dims.items() if (key, value) != ("q_lora_rank", None)
        }
    for key, value in sizes.items():
        if type(value) is not int or not 0 < value < 2**40:
            raise ValueError(f"{key} is {value!r}, not a size")
    for key, number in (("the rope base", spec.rope.theta), ("rms_norm_eps", spec.rms_norm_eps)):
        if not 0 < number < float("inf"):
            raise ValueError(f"{key} is {number!r}, not a positive number")


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config[key]
    if type(value) is not int or not 0 < value < 2**40:
        raise ValueError(f"{key} is {value!r}, not a size")
    return value


def _divided(rows: int | None, by: int) -> int | None:
    return rows // by if rows and rows % by == 0 else None


def one_id(value: object) -> int | None:
    """A token id, the first of a list of them, or None."""
    first = value[0] if isinstance(value, list) and value else value
    return first if type(first) is int else None


def _dtype(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> str:
    said = config.get("dtype") or config.get("torch_dtype")
    if said:
        return str(said).removeprefix("torch.")
    stored = tensors.get("fc.weight")
    return _DTYPES.get(stored.dtype, "float32") if stored else "float32"
