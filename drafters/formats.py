"""Drafter configs on disk, and what each engine makes of their aux layer ids.

A drafter folder of ours is flat: the config in vLLM's reading, where aux id i is the input of
layer i, which is also transformers' hidden-state index i, the neutral one of `DrafterSpec`.
SGLang reads the same numbers otherwise (sglang 0.5.23): given ids mean the output of that layer
for Llama-family targets (models/llama.py, set_eagle3_layers_to_capture), and for DeepSeek and
Kimi only where the first id is 1 (models/deepseek_v2.py, same function).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from drafters.headers import TensorHeader, read_headers, read_json
from drafters.spec import DrafterError, DrafterSpec, MlaDims, RopeSpec

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
_MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_DEEPSEEK_TARGETS = ("Deepseek", "Kimi")
_ROPE_FIELDS = ("rope_parameters", "rope_scaling")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a target's config (Kimi-K2.5 wraps it in `text_config`)."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def rope_of(config: dict[str, Any]) -> RopeSpec:
    """The rotary embedding of a config, in transformers' old (`rope_scaling`) or new form."""
    merged: dict[str, Any] = {}
    for field in _ROPE_FIELDS:
        if isinstance(config.get(field), dict):
            merged.update(config[field])
    theta = float(merged.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = merged.get("rope_type", merged.get("type", "default"))
    return RopeSpec(theta=theta, scaling=None if kind == "default" else merged)


def to_config(spec: DrafterSpec) -> dict[str, Any]:
    """The flat config.json of a drafter, in vLLM's reading of the aux layers."""
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
        "num_aux_hidden_states": len(spec.aux_layers),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(spec.aux_layers),
            "use_aux_hidden_state": True,
            "norm_before_fc": spec.norm_before_fc,
        },
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_act": spec.hidden_act,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": spec.dtype,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        **{flag: getattr(spec, flag) for flag in _FLAGS},
    }
    config.update(_rope_config(spec))
    if spec.mla is None:
        config["head_dim"] = spec.head_dim
    else:
        config.update({key: getattr(spec.mla, key) for key in _MLA_KEYS})
        # an MLA head's feed-forward is dense: no expert fields (SGLang refuses null ones)
        config.update(first_k_dense_replace=1, moe_layer_freq=1)
    return config


def _rope_config(spec: DrafterSpec) -> dict[str, Any]:
    config: dict[str, Any] = {"rope_theta": spec.rope.theta}
    if spec.rope.scaling is not None:
        kind = spec.rope.scaling.get("rope_type", spec.rope.scaling.get("type"))
        # both names of the kind: readers older and newer than transformers 5
        config["rope_scaling"] = {**spec.rope.scaling, "rope_type": kind, "type": kind}
    return config


def from_config(
    config: dict[str, Any], tensors: dict[str, TensorHeader], where: Path
) -> DrafterSpec:
    """A flat config and the tensors beside it -> the neutral spec.

    The aux ids are taken in vLLM's reading; without ids vLLM's default (2, L/2, L - 3) cannot be
    known from the drafter alone, so missing ids are an error. Raises DrafterError.
    """
    architecture = (config.get("architectures") or [""])[0]
    kind = "mla" if "kv_lora_rank" in config and "Deepseek" in architecture else "llama"
    eagle = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if not ids:
        raise DrafterError(
            f"{where}: no eagle_aux_hidden_state_layer_ids, so each engine would guess the layers; "
            "add the ids the drafter was trained on"
        )
    try:
        return _spec_from(config, kind, tuple(int(i) for i in ids), tensors)
    except KeyError as error:
        raise DrafterError(f"{where}: the key {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise DrafterError(f"{where}: {error}") from None


def _spec_from(
    config: dict[str, Any], kind: str, ids: tuple[int, ...], tensors: dict[str, TensorHeader]
) -> DrafterSpec:
    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    vocab = int(config["vocab_size"])
    eagle = config.get("eagle_config") or {}
    draft_vocab = config.get("draft_vocab_size") or (
        tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else vocab
    )
    flags = {flag: bool(eagle.get(flag, config.get(flag, False))) for flag in _FLAGS}
    mla = MlaDims(**{key: config[key] for key in _MLA_KEYS}) if kind == "mla" else None
    return DrafterSpec(
        kind="mla" if kind == "mla" else "llama",
        hidden_size=hidden,
        target_hidden_size=int(config.get("target_hidden_size") or hidden),
        intermediate_size=int(config["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=int(draft_vocab),
        aux_layers=ids,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        hidden_act=str(config.get("hidden_act", "silu")),
        rope=rope_of(config),
        mla=mla,
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        **flags,
    )


def aux_ids_for(engine: str, aux_layers: tuple[int, ...], target_architecture: str) -> list[int]:
    """The ids to write so that `engine` captures these hidden-state indices.

    Raises DrafterError where the engine cannot express them.
    """
    if engine != "sglang":
        return list(aux_layers)
    if any(name in target_architecture for name in _DEEPSEEK_TARGETS):
        if aux_layers[0] == 1:
            raise DrafterError(
                f"SGLang cannot capture {list(aux_layers)} on a {target_architecture} target: a "
                "list that begins with 1 is read one layer later; train on layers that begin at 2"
            )
        return list(aux_layers)
    if min(aux_layers) < 1:
        raise DrafterError(
            f"SGLang cannot capture {list(aux_layers)} on a {target_architecture} target: it "
            "captures layer outputs, and index 0 is the embedding"
        )
    return [index - 1 for index in aux_layers]


def for_engine(src: Path, engine: str, target: Path, out: Path) -> Path:
    """Write into `out` the drafter folder that `engine` must be given, and return it.

    The weights are linked, not copied (hard links where the file system cannot link softly).
    Raises DrafterError where the engine would read the drafter otherwise than it was trained.
    """
    config = read_json(src / "config.json")
    tensors = read_headers(src)
    spec = from_config(config, tensors, src / "config.json")
    architecture = (read_json(target / "config.json").get("architectures") or [""])[0]
    _refuse_ignored_flags(spec, engine)
    ids = aux_ids_for(engine, spec.aux_layers, architecture)
    translated = {**config, "eagle_config": {**(config.get("eagle_config") or {})}}
    translated.pop("eagle_aux_hidden_state_layer_ids", None)
    translated["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    translated["eagle_config"]["use_aux_hidden_state"] = True
    translated["num_aux_hidden_states"] = len(ids)  # vLLM takes fc's width from here
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(translated, indent=2) + "\n", encoding="utf-8")
    for file in sorted({header.file for header in tensors.values()}):
        _link(file.resolve(), out / file.name)
    index = src / "model.safetensors.index.json"
    if index.is_file():
        shutil.copyfile(index, out / index.name)
    return out


def _refuse_ignored_flags(spec: DrafterSpec, engine: str) -> None:
    """Flags an engine drops in silence would change what the drafter computes."""
    if engine == "sglang" and spec.norm_before_residual:
        raise DrafterError(
            "SGLang ignores norm_before_residual: true, so this drafter would compute something "
            "else; serve it with vLLM, or train it with norm_before_residual: false"
        )
    if engine == "vllm" and spec.kind == "mla" and spec.norm_before_fc:
        raise DrafterError(
            "vLLM's MLA drafter ignores norm_before_fc: true; serve it with the reference engine"
        )


def _link(source: Path, link: Path) -> None:
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(source)
    except OSError:
        os.link(source, link)
