"""Sizes of a target, and the spec of a new drafter for it. Nothing here loads torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from drafters.formats import rope_of, text_config
from drafters.headers import read_json
from drafters.spec import DrafterSpec, MlaDims, RopeSpec
from drafters.validate import expected_shapes
from harness.errors import UsageError
from training.plan import HeadSection

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


def read_facts(folder: Path) -> TargetFacts:
    """The sizes in `folder/config.json`. Raises DrafterError or `UsageError`, one line."""
    return facts_in(folder / "config.json")


def facts_in(file: Path) -> TargetFacts:
    """The sizes in a target's config file. Raises DrafterError or `UsageError`, one line."""
    raw = read_json(file)
    text = text_config(raw)
    try:
        return _facts(file.parent, raw, text)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{file}: {error!r} is missing or no number; "
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


def expected_rope(kind: str, facts: TargetFacts) -> RopeSpec:
    """The target's own rotary embedding. A Llama head beside latent attention takes no YaRN."""
    if kind == "llama" and facts.mla is not None:
        return RopeSpec(theta=facts.rope.theta)
    return facts.rope


def scratch_spec(
    section: HeadSection, facts: TargetFacts, aux_layers: tuple[int, ...], draft_vocab: int
) -> DrafterSpec:
    """The spec of a new drafter: sizes that the plan leaves open are the target's."""
    mla = None
    if section.kind == "mla":
        if facts.mla is None:
            raise UsageError(
                f"drafter.kind mla: {facts.folder} has no latent attention whose ranks the head "
                "could take; use drafter.kind llama"
            )
        mla = facts.mla
    heads = section.num_attention_heads or facts.heads
    kv_heads = section.num_key_value_heads or (
        heads if mla or section.num_attention_heads else facts.kv_heads
    )
    if heads % kv_heads:
        raise UsageError(
            f"drafter: {heads} attention heads do not divide into {kv_heads} key-value heads"
        )
    return DrafterSpec(
        kind=section.kind,
        hidden_size=facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        intermediate_size=section.intermediate_size or facts.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=section.head_dim or facts.head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab,
        aux_layers=aux_layers,
        rms_norm_eps=facts.eps,
        max_position_embeddings=facts.max_positions,
        rope=expected_rope(section.kind, facts),
        mla=mla,
        norm_before_residual=section.norm_before_residual,
        norm_before_fc=section.norm_before_fc,
        fc_norm=section.fc_norm,
        norm_output=section.norm_output,
        bos_token_id=facts.bos_token_id,
        eos_token_id=facts.eos_token_id,
    )


def groups(spec: DrafterSpec) -> dict[str, int]:
    """Parameters by part: embedding, fc, attention, feed-forward, norms, lm_head."""
    found = dict.fromkeys(("embed_tokens", "fc", "attention", "mlp", "norms", "lm_head"), 0)
    found["embed_tokens"] = spec.vocab_size * spec.hidden_size
    found["lm_head"] = spec.draft_vocab_size * spec.hidden_size
    for name, shape in expected_shapes(spec).items():
        if name in ("d2t", "t2d"):
            continue
        part = "norms" if "norm" in name and len(shape) == 1 else ""
        part = part or ("fc" if name.startswith("fc.") else "")
        part = part or ("attention" if "self_attn" in name else "mlp")
        found[part] += math.prod(shape)
    return found


def work_per_token(spec: DrafterSpec, steps: int, target_vocab: int) -> float:
    """Floating point operations of training on one token.

    Six a weight and TTT step (two forward, four backward), fc once; the target's logits two a
    weight of its head. The attention's own products are left out: they depend on lengths.
    """
    parts = groups(spec)
    inner = parts["attention"] + parts["mlp"] + parts["lm_head"]
    return 6.0 * (steps * inner + parts["fc"]) + 2.0 * target_vocab * spec.target_hidden_size
