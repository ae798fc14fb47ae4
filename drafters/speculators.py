"""The config.json of the `speculators` library (0.9, and the folders of 0.3 to 0.4).

The decoder layer's sizes lie in `transformer_layer_config`, what it drafts for in
`speculators_config`, and the layer ids at the top: vLLM's count from speculators 0.5 on, the
outputs of layers before (`drafters.ids`). The library knows Llama-type layers only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from drafters.flat import FLAGS, IDS, MARK, mark
from drafters.spec import DrafterError, DrafterSpec

VERSION = "0.9.0"
"""The release whose layout is written."""
_ARCHITECTURE = "Eagle3DraftModel"
_OLD_CLASS = "Eagle3SpeculatorConfig"
# transformers' LlamaConfig: a config written as a difference leaves these out
_LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config is of the speculators library."""
    return "speculators_model_type" in config or _OLD_CLASS in str(config.get("auto_map", ""))


def counts_outputs(config: Mapping[str, Any], has_code: bool) -> tuple[bool, str, bool]:
    """Whether the ids mean layer outputs (before speculators 0.5), what says so, and if surely.

    `has_code`: the folder holds a `config.py`, as trainers of that time left there.
    """
    said = str(config.get("speculators_version") or "")
    found = re.match(r"(\d+)\.(\d+)", said)
    if found:
        old = (int(found[1]), int(found[2])) < (0, 5)
        return old, f"speculators_version is {said}", True
    if _OLD_CLASS in str(config.get("auto_map", "")) or has_code:
        return True, "no speculators_version, and an auto_map or config.py as of 0.3", False
    return False, "no speculators_version, and no auto_map or config.py as of 0.3", False


def hoisted(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same as a flat config: the layer's keys at the top, defaults filled in.

    `norm_before_residual` stays missing where it is. Raises DrafterError for another algorithm, or
    layers that are no Llama layers.
    """
    algorithm = config.get("speculators_model_type", "eagle3")
    if algorithm != "eagle3":
        raise DrafterError(f"speculators_model_type is {algorithm!r}: only eagle3 is read")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise DrafterError("transformer_layer_config is missing: it holds the layer's sizes")
    kind = layer.get("model_type", "llama")
    if kind != "llama":
        raise DrafterError(
            f"its layer is of type {kind!r}: only llama layers are read (qwen3 norms its queries "
            "and keys, which no drafter of ours does)"
        )
    top = ("draft_vocab_size", "target_hidden_size", IDS, MARK, "dtype", "torch_dtype", *FLAGS)
    return {
        **_LLAMA_DEFAULTS,
        **layer,
        **{key: config[key] for key in top if config.get(key) is not None},
    }


def why_not_held(spec: DrafterSpec) -> str | None:
    """Why the library has no form for this drafter; None where it has one."""
    if spec.kind == "mla":
        return "the speculators library has no MLA head"
    if spec.target_hidden_size != spec.hidden_size:
        return (
            "the speculators library takes the target's hidden size for the drafter's "
            f"({spec.target_hidden_size} and {spec.hidden_size})"
        )
    if len(set(spec.aux_layers)) != len(spec.aux_layers):
        return "the speculators library wants distinct aux layers"
    return None


def to_config(spec: DrafterSpec, *, target: str | None, architectures: list[str]) -> dict[str, Any]:
    """The config.json of speculators 0.9; the layer's keys are all written, none left to defaults.

    `target`: the verifier's path or name, None to leave it open; `architectures`: the verifier's.
    Raises DrafterError where the library has no form for the drafter.
    """
    problem = why_not_held(spec)
    if problem is not None:
        raise DrafterError(f"{problem}; convert it to vllm or sglang instead")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": [_ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "transformer_layer_config": _layer(spec),
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_hidden_size,
        IDS: list(spec.aux_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": spec.dtype,
        **{flag: getattr(spec, flag) for flag in FLAGS},
        MARK: mark("speculators", spec.aux_layers, list(spec.aux_layers)),
    }


def _layer(spec: DrafterSpec) -> dict[str, Any]:
    rope = spec.rope.scaling or {"rope_type": "default"}
    layer: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_act": spec.hidden_act,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "vocab_size": spec.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": spec.rope.theta, **rope},
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
    }
    return layer
