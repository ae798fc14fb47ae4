"""A drafter's folder as each engine must be given it.

A drafter is described once (`drafters.spec`), its aux layers by transformers' hidden-state index.
Each format and engine is a translation of that: `drafters.ids` counts layers, `drafters.flat` and
`drafters.speculators` write the config, `drafters.store` the weights, `drafters.engines` says what
no translation can mend. docs/formats.md has the table of conventions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from drafters import speculators
from drafters.engines import Engine, gaps
from drafters.flat import (
    ARCHITECTURES,
    rope_of,
    text_config,
    to_config,
    with_layers,
)
from drafters.ids import Family, family_of, from_index
from drafters.reading import Checkpoint, Target, read_folder, read_target, wrong_number
from drafters.spec import DrafterError
from drafters.store import Plan, plan_weights, write_weights

__all__ = [
    "aux_ids_for",
    "for_engine",
    "rope_of",
    "text_config",
    "to_config",
    "translate",
    "wrong_number",
]

Destination = Literal["vllm", "sglang", "speculators"]
_MLA_TYPES = ("kimi_k2", "deepseek_v2")  # what vLLM 0.32 loads an MLA head as


def aux_ids_for(engine: str, aux_layers: tuple[int, ...], target_architecture: str) -> list[int]:
    """The ids to write so that `engine` captures these hidden-state indices.

    Raises DrafterError where the engine cannot express them.
    """
    if engine != "sglang":
        return list(aux_layers)
    return from_index("sglang", aux_layers, family_of(target_architecture))


def for_engine(src: Path, engine: str, target: Path, out: Path) -> Path:
    """Write into `out` the drafter folder that `engine` must be given, and return it.

    The weights are linked, not copied (hard links where the file system cannot link softly), and
    written anew only where the engine does not know their names. Raises DrafterError where the
    engine would compute something else than the drafter was trained to.
    """
    model = read_target(target)
    checkpoint = read_folder(src, model)
    if engine not in ("vllm", "sglang"):
        raise DrafterError(f"{engine} is given drafters as they are")
    to: Engine = "vllm" if engine == "vllm" else "sglang"
    config, plan = translate(checkpoint, to, model)
    out.mkdir(parents=True, exist_ok=True)
    write_weights(checkpoint, plan, out, link="soft")
    write_config(config, out)
    return out


def write_config(config: dict[str, Any], folder: Path) -> None:
    """config.json, whole or not at all."""
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")


def translate(
    checkpoint: Checkpoint, to: Destination, target: Target | None
) -> tuple[dict[str, Any], Plan]:
    """The config for `to` and what has to happen to the weights.

    Raises DrafterError where the result would compute something else, naming what and why.
    """
    if checkpoint.ids is None:
        raise DrafterError(
            f"{checkpoint.path / 'config.json'}: no eagle_aux_hidden_state_layer_ids, so each "
            "engine would guess the layers; add the ids the drafter was trained on, or give them "
            "with --layer-ids"
        )
    if to == "speculators":
        return _to_speculators(checkpoint, target), plan_weights(checkpoint, tables=True)
    for gap in gaps(checkpoint, to, target):
        raise DrafterError(f"{gap.what}; {gap.remedy}")
    family: Family | None = target.family if target else checkpoint.family
    layers = target.layers if target else None
    indices = checkpoint.spec.aux_layers
    ids = from_index("vllm" if to == "vllm" else "sglang", indices, family, layers)
    return _to_flat(checkpoint, to, ids), plan_weights(checkpoint)


def _to_flat(checkpoint: Checkpoint, to: Engine, ids: list[int]) -> dict[str, Any]:
    spec = checkpoint.spec
    if checkpoint.format.startswith("speculators"):
        made = to_config(spec, ids)
    else:
        kept = {
            k: v for k, v in checkpoint.config.items() if k not in ("auto_map", "num_hidden_layers")
        }
        sizes = {k: v for k, v in to_config(spec).items() if k in _SAID}
        made = {**kept, **sizes, "architectures": [ARCHITECTURES[spec.kind]]}
        if spec.kind == "llama" or kept.get("model_type") not in _MLA_TYPES:
            made["model_type"] = "llama" if spec.kind == "llama" else "kimi_k2"
    made = with_layers(made, spec, ids, to)
    if to == "sglang" and not checkpoint.has("lm_head.weight"):
        # SGLang takes the target's head where no draft vocabulary is named
        made.pop("draft_vocab_size", None)
    return made


# what readers would otherwise fill in, each from a default of its own
_SAID = (
    *("target_hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads"),
    *("head_dim", "draft_vocab_size"),
)


def _to_speculators(checkpoint: Checkpoint, target: Target | None) -> dict[str, Any]:
    if not checkpoint.has("lm_head.weight") and target is None:
        raise DrafterError(
            "the checkpoint has no lm_head.weight, which the speculators library then takes from "
            "the target: name it with --target"
        )
    if not checkpoint.has("embed_tokens.weight") and target is None:
        raise DrafterError(
            "the checkpoint has no embed_tokens.weight, which the speculators library then takes "
            "from the target: name it with --target"
        )
    return speculators.to_config(
        checkpoint.spec,
        target=str(target.path.resolve()) if target else None,
        architectures=[target.architecture] if target and target.architecture else [],
    )
