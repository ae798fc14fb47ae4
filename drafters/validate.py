"""Does this drafter fit this target? Checks that need no torch and no weights in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters.formats import from_config, text_config
from drafters.headers import TensorHeader, read_headers, read_json
from drafters.spec import DrafterError, DrafterSpec

Shapes = dict[str, tuple[int, ...]]


def check_fit(drafter_path: Path, target_path: Path) -> None:
    """Raise DrafterError with the first reason why the drafter cannot serve this target.

    Looks at configs, tensor names and shapes, layer ids and vocabulary; reads headers only.
    """
    for problem in misfits(drafter_path, target_path):
        raise DrafterError(problem)


def misfits(drafter_path: Path, target_path: Path) -> Iterator[str]:
    """Every reason why the drafter does not fit, one line each."""
    target = text_config(read_json(target_path / "config.json"))
    config_file = drafter_path / "config.json"
    tensors = {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): header
        for name, header in read_headers(drafter_path).items()
    }
    spec = from_config(read_json(config_file), tensors, config_file)
    yield from _against_target(spec, target, config_file, target_path)
    yield from _against_tensors(spec, tensors, drafter_path)


def _against_target(
    spec: DrafterSpec, target: dict[str, Any], where: Path, target_path: Path
) -> Iterator[str]:
    for key, have in (
        ("hidden_size", spec.target_hidden_size),
        ("vocab_size", spec.vocab_size),
    ):
        want = target.get(key)
        if want is not None and have != want:
            yield (
                f"{where}: the drafter was made for a target of {key} {have}, "
                f"but {target_path} has {want}; choose the drafter trained for this target"
            )
    layers = target.get("num_hidden_layers")
    if layers is not None and not all(0 <= index <= layers for index in spec.aux_layers):
        yield (
            f"{where}: aux layers {list(spec.aux_layers)} are not all within the "
            f"{layers} layers of {target_path}"
        )


def expected_shapes(spec: DrafterSpec) -> Shapes:
    """Every tensor a checkpoint of this spec must hold (embedding, head and t2d are optional)."""
    h, n = spec.hidden_size, len(spec.aux_layers) * spec.target_hidden_size
    layer = "layers.0."
    shapes: Shapes = {
        "fc.weight": (h, n),
        "norm.weight": (h,),
        **{
            f"{layer}{norm}.weight": (h,)
            for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        f"{layer}mlp.gate_proj.weight": (spec.intermediate_size, h),
        f"{layer}mlp.up_proj.weight": (spec.intermediate_size, h),
        f"{layer}mlp.down_proj.weight": (h, spec.intermediate_size),
    }
    if spec.norm_before_fc:
        shapes["input_norm.weight"] = (n,)
    if spec.fc_norm:
        for index in range(len(spec.aux_layers)):
            shapes[f"fc_norm.{index}.weight"] = (spec.target_hidden_size,)
    if spec.draft_vocab_size != spec.vocab_size:
        shapes["d2t"] = (spec.draft_vocab_size,)
    attention = _mla_shapes(spec) if spec.mla is not None else _llama_shapes(spec)
    shapes.update({f"{layer}self_attn.{name}.weight": shape for name, shape in attention.items()})
    return shapes


def _llama_shapes(spec: DrafterSpec) -> Shapes:
    wide, q = 2 * spec.hidden_size, spec.num_attention_heads * spec.head_dim
    kv = spec.num_key_value_heads * spec.head_dim
    return {
        "q_proj": (q, wide),
        "k_proj": (kv, wide),
        "v_proj": (kv, wide),
        "o_proj": (spec.hidden_size, q),
    }


def _mla_shapes(spec: DrafterSpec) -> Shapes:
    dims = spec.mla
    assert dims is not None
    wide, heads = 2 * spec.hidden_size, spec.num_attention_heads
    q = heads * (dims.qk_nope_head_dim + dims.qk_rope_head_dim)
    shapes: Shapes = {
        "kv_a_proj_with_mqa": (dims.kv_lora_rank + dims.qk_rope_head_dim, wide),
        "kv_a_layernorm": (dims.kv_lora_rank,),
        "kv_b_proj": (heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank),
        "o_proj": (spec.hidden_size, heads * dims.v_head_dim),
    }
    if dims.q_lora_rank is None:
        return {**shapes, "q_proj": (q, wide)}
    return {
        **shapes,
        "q_a_proj": (dims.q_lora_rank, wide),
        "q_a_layernorm": (dims.q_lora_rank,),
        "q_b_proj": (q, dims.q_lora_rank),
    }


def _against_tensors(
    spec: DrafterSpec, tensors: dict[str, TensorHeader], where: Path
) -> Iterator[str]:
    optional: Shapes = {
        "embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "lm_head.weight": (spec.draft_vocab_size, spec.hidden_size),
        "t2d": (spec.vocab_size,),
    }
    required = expected_shapes(spec)
    for name, shape in {**required, **optional}.items():
        header = tensors.get(name)
        if header is None:
            if name in required:
                yield f"{where}: tensor {name} {list(shape)} is missing"
        elif header.shape != shape:
            yield (
                f"{where}: tensor {name} has shape {list(header.shape)}, but the drafter's config "
                f"and target want {list(shape)}; the checkpoint belongs to another target or config"
            )
