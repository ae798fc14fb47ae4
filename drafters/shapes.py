"""Which tensors a drafter's checkpoint must hold, by its spec, and whether they are there.

Headers only: quick enough to be asked before every run.
"""

from __future__ import annotations

from collections.abc import Iterator

from drafters.findings import Finding
from drafters.reading import Checkpoint
from drafters.spec import DrafterSpec

Shapes = dict[str, tuple[int, ...]]
_FLOATS = ("F32", "F16", "BF16")
_LAYER = "layers.0."


def expected_shapes(spec: DrafterSpec, num_aux: int | None = None) -> Shapes:
    """Every tensor a checkpoint of this spec must hold (embedding, head and t2d are optional).

    `num_aux`: the number of aux states where the spec's layers are not known.
    """
    h, aux = spec.hidden_size, len(spec.aux_layers) if num_aux is None else num_aux
    n = aux * spec.target_hidden_size
    shapes: Shapes = {
        "fc.weight": (h, n),
        "norm.weight": (h,),
        **{
            f"{_LAYER}{norm}.weight": (h,)
            for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        f"{_LAYER}mlp.gate_proj.weight": (spec.intermediate_size, h),
        f"{_LAYER}mlp.up_proj.weight": (spec.intermediate_size, h),
        f"{_LAYER}mlp.down_proj.weight": (h, spec.intermediate_size),
    }
    if spec.norm_before_fc:
        shapes["input_norm.weight"] = (n,)
    if spec.fc_norm:
        for index in range(aux):
            shapes[f"fc_norm.{index}.weight"] = (spec.target_hidden_size,)
    if spec.draft_vocab_size != spec.vocab_size:
        shapes["d2t"] = (spec.draft_vocab_size,)
    attention = _mla_shapes(spec) if spec.mla is not None else _llama_shapes(spec)
    shapes.update({f"{_LAYER}self_attn.{name}.weight": shape for name, shape in attention.items()})
    return shapes


def optional_shapes(spec: DrafterSpec) -> Shapes:
    """What a checkpoint may hold besides."""
    return {
        "embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "lm_head.weight": (spec.draft_vocab_size, spec.hidden_size),
        "t2d": (spec.vocab_size,),
        # beside a whole vocabulary both tables are the identity, which trainers may write
        "d2t": (spec.draft_vocab_size,),
    }


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


def check_headers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors missing, misshapen, of a type that is not read, or of no use."""
    where, spec = str(checkpoint.path), checkpoint.spec
    required = expected_shapes(spec, None if spec.aux_layers else checkpoint.num_aux)
    known = {**optional_shapes(spec), **required}
    for name, shape in known.items():
        header = checkpoint.tensors.get(name)
        if header is None:
            if name in required:
                yield Finding(
                    severity="error",
                    code="tensor_missing",
                    where=where,
                    what=f"tensor {name} {list(shape)} is missing",
                    why="the config describes a drafter that has it",
                    remedy="copy the checkpoint again, or correct the config",
                )
        elif header.shape != shape:
            yield Finding(
                severity="error",
                code="tensor_shape",
                where=where,
                what=f"tensor {name} has shape {list(header.shape)}, but the drafter's config "
                f"and target want {list(shape)}",
                remedy="the checkpoint belongs to another target or config",
            )
    yield from _unknown(checkpoint, known)
    yield from _types(checkpoint, known)


def _unknown(checkpoint: Checkpoint, known: Shapes) -> Iterator[Finding]:
    """vLLM refuses tensors without a place; SGLang drops them without a word."""
    extra = [name for name in checkpoint.tensors if name not in known]
    verifier = [name for name in extra if name.startswith("verifier_")]
    rest = sorted(set(extra) - set(verifier))
    if rest:
        norms = any(name.startswith(("fc_norm.", "input_norm.")) for name in rest)
        yield Finding(
            severity="error",
            code="tensor_unknown",
            where=str(checkpoint.path),
            what=f"tensor {checkpoint.stored[rest[0]]} fits no part of the drafter that the config "
            f"describes ({len(rest)} such in all)",
            why="vLLM stops over it, SGLang drops it in silence and computes something else",
            remedy="set fc_norm (or norm_before_fc) as it was trained"
            if norms
            else "correct the config, or leave the tensor out",
        )
    if verifier:
        yield Finding(
            severity="warning",
            code="tensor_verifier",
            where=str(checkpoint.path),
            what=f"{len(verifier)} tensors of the target are stored too ({verifier[0]})",
            why="vLLM stops over them",
            remedy="convert the folder, which leaves them out",
        )


def _types(checkpoint: Checkpoint, known: Shapes) -> Iterator[Finding]:
    where = str(checkpoint.path)
    floats = set()
    for name in sorted(set(known) & set(checkpoint.tensors)):
        dtype = checkpoint.tensors[name].dtype
        wanted = {"d2t": ("I64",), "t2d": ("BOOL",)}.get(name, _FLOATS)
        if wanted is _FLOATS:
            floats.add(dtype)
        if dtype not in wanted:
            usable = name in ("d2t", "t2d") and dtype in ("I64", "I32", "BOOL", "U8")
            yield Finding(
                severity="warning" if usable else "error",
                code="tensor_dtype",
                where=where,
                what=f"tensor {name} is {dtype}, not {' or '.join(wanted)}",
                why="neither engine reads a drafter of that type",
                remedy="store it again in the usual type",
            )
    if len(floats) > 1:
        yield Finding(
            severity="note",
            code="dtypes_mixed",
            where=where,
            what=f"weights are stored in several types: {', '.join(sorted(floats))}",
            why="engines cast all of them to one",
        )
