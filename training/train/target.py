"""What training needs of the target: sizes from its config, and three tensors by memory map.

The target itself is never loaded: of 547 GB only the embedding, the head and the last norm are
read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.formats import rope_of, text_config
from drafters.headers import TensorHeader, read_headers, read_json
from drafters.spec import MlaDims, RopeSpec
from harness.errors import UsageError

_MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the target's text model; `mla` None: it has no latent attention."""

    folder: Path
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    max_positions: int
    rope: RopeSpec
    mla: MlaDims | None
    bos_token_id: int | None
    eos_token_id: int | None
    tied: bool


class TargetTensors(msgspec.Struct, frozen=True, kw_only=True):
    """embedding and lm_head [V, H], norm [H], as stored."""

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor


def read_facts(folder: Path) -> TargetFacts:
    """The sizes in `folder/config.json`. Raises DrafterError or `UsageError`, one line."""
    raw = read_json(folder / "config.json")
    text = text_config(raw)
    try:
        return _facts(folder, raw, text)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{folder / 'config.json'}: {error!r} is missing or no number; "
            "give the folder of a decoder-only language model"
        ) from None


def _facts(folder: Path, raw: dict[str, Any], text: dict[str, Any]) -> TargetFacts:
    heads = int(text["num_attention_heads"])
    hidden = int(text["hidden_size"])
    mla = None
    if text.get("kv_lora_rank"):
        dims = {key: text.get(key) for key in _MLA_KEYS}
        mla = msgspec.convert({**dims, "q_lora_rank": dims["q_lora_rank"] or None}, MlaDims)
    head_dim = mla.v_head_dim if mla else int(text.get("head_dim") or hidden // heads)
    return TargetFacts(
        folder=folder,
        hidden_size=hidden,
        intermediate_size=int(text["intermediate_size"]),
        layers=int(text["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab_size=int(text["vocab_size"]),
        eps=float(text.get("rms_norm_eps", 1e-6)),
        max_positions=int(text.get("max_position_embeddings") or 2048),
        rope=rope_of(text),
        mla=mla,
        bos_token_id=_one(text.get("bos_token_id", raw.get("bos_token_id"))),
        eos_token_id=_one(text.get("eos_token_id", raw.get("eos_token_id"))),
        tied=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
    )


def _one(token: object) -> int | None:
    if isinstance(token, list):
        token = token[0] if token else None
    return int(token) if isinstance(token, int) else None


def read_tensors(facts: TargetFacts) -> TargetTensors:
    """The three tensors, memory-mapped where the file allows. Raises `UsageError`."""
    headers = read_headers(facts.folder)
    width, vocab = facts.hidden_size, facts.vocab_size
    embedding = _take(headers, facts, "embed_tokens.weight", (vocab, width))
    has_head = any(name.endswith("lm_head.weight") for name in headers)
    lm_head = embedding
    if has_head and not facts.tied:
        lm_head = _take(headers, facts, "lm_head.weight", (vocab, width))
    norm = _take(headers, facts, "model.norm.weight", (width,))
    return TargetTensors(embedding=embedding, lm_head=lm_head, norm=norm)


def _take(
    headers: dict[str, TensorHeader], facts: TargetFacts, suffix: str, shape: tuple[int, ...]
) -> Tensor:
    """The one tensor whose name ends with `suffix`; vision towers have names of their own."""
    names = [n for n in headers if n.endswith(suffix) and ".layers." not in n]
    names = [n for n in names if "vision" not in n] or names
    if not names:
        raise UsageError(f"{facts.folder}: no tensor {suffix}; the drafter cannot be trained")
    header = headers[names[0]]
    if header.shape != shape:
        raise UsageError(
            f"{header.file}: {names[0]} has shape {list(header.shape)}, the config says "
            f"{list(shape)}; config and weights are not of one model"
        )
    try:
        with safe_open(header.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(names[0])
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{header.file}: cannot be read: {error}") from None
    if not tensor.is_floating_point():
        raise UsageError(
            f"{header.file}: {names[0]} is stored as {tensor.dtype}; a target whose head is "
            "quantised gives no soft targets: use the checkpoint with a bfloat16 head"
        )
    return tensor


def off_norm(last_normed: Tensor, norm: Tensor) -> float:
    """How far states [..., H] are from having passed the target's final norm.

    x / rms(x) * w divided by w has a root mean square of 1 at every token; the answer is the
    median distance from that. Weights near 0 are left out. States that passed it twice look alike
    here: only their argmax tells.
    """
    weight = norm.to(last_normed.device, torch.float32)
    kept = weight.abs() > 0.05 * weight.abs().mean()
    plain = last_normed.float()[..., kept] / weight[kept]
    rms = plain.square().mean(-1).sqrt()
    return float((rms - 1).abs().median())
