"""How many bytes of KV cache a token takes, by the model's config and what the engine is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engines.base import ServeSpec

SIZES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "bf16": 2}
"""Bytes of an element, by the names that configs and engines have for its type."""


def argument(arguments: Sequence[str], *names: str) -> str | None:
    """The last value of an engine's argument, written `--name value` or `--name=value`."""
    found = None
    for i, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else arguments[i + 1] if i + 1 < len(arguments) else None
    return found


def kv_size(config: Mapping[str, Any], spec: ServeSpec) -> int:
    """Bytes of one element in the KV cache."""
    said = argument(spec.extra_args, "--kv-cache-dtype") or "auto"
    if said.startswith(("fp8", "int8")):
        return 1
    dtype = said if said in SIZES else spec.dtype
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return SIZES.get(dtype, 2)


def kv_width(config: Mapping[str, Any], tensor: int) -> tuple[int, str]:
    """Elements that one layer caches of a token on one device, and how they are counted.

    Latent attention caches one compressed vector and the rope part of the key, on every rank the
    same; else keys and values of the rank's own KV heads, rounded up: no rank holds a part of one.
    Raises KeyError, TypeError, ValueError or ArithmeticError at a config without sizes.
    """
    if config.get("kv_lora_rank"):
        latent, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        return latent + rope, f"latent {latent} + rope {rope}, whole on each device"
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    each = max(1, -(-kv_heads // tensor))
    return 2 * each * size, f"2 x {each} KV heads x {size}"
