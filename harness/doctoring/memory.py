"""What one device must hold, term by term, against what it has.

Computed: the weights from the headers of the checkpoint's files, the KV cache from the config.
Estimated: activations, by the widest layer over one step's tokens. Assumed: what CUDA, NCCL and the
captured graphs take. GiB is 2^30 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from drafters.headers import BYTES, TensorHeader
from drafters.spec import DrafterSpec
from engines.base import ServeSpec
from engines.cache_size import SIZES, argument, kv_size, kv_width
from harness.doctoring.finding import Finding, fail, gib, ok, unknown, warn

Kind = Literal["computed", "estimated", "assumed"]
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Kept whole on every rank of tensor parallelism, by vLLM's and SGLang's own models: norms, the
# router, MLA's down-projections, the drafter's fc, and what sees pictures.
_WHOLE = re.compile(
    r"norm|q_a_proj|kv_a_proj|\.gate\.(weight|e_score)|(^|\.)fc\.|indexer|vision|visual|mm_proj|"
    r"multi_modal|(^|\.)(d2t|t2d)$"
)
_KV = re.compile(r"\.(k_proj|v_proj)\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
STEP_TOKENS = 8192
"""Tokens of a prefill step where nothing says it: both engines' default on large GPUs."""
CPU_STEP_TOKENS = 2048
CONTEXT_BYTES = 2**30
"""CUDA's context and the captured graphs on one GPU, assumed."""
COMMUNICATION_BYTES = 2**30
"""NCCL's and the all-reduce's buffers beside it where GPUs serve together, assumed."""
PROCESS_BYTES = 2**30
"""An engine's Python, torch and tokenizer on a CPU, assumed."""
VLLM_SHARE = 0.92
"""vLLM's default of --gpu-memory-utilization (v0.32)."""
SEQUENCES = 16


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a device's memory: `bytes`, how it was come by, and the formula in words."""

    name: str
    bytes: int
    kind: Kind
    how: str


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What one device must hold. `kv_sequence`: bytes of one sequence of the whole context.

    `sequences`: how many the plan has under way; `kv_fixed`: the plan gives the cache's size.
    """

    device: str
    terms: tuple[Term, ...]
    kv_sequence: int
    kv_bytes: int
    sequences: int
    context: int
    kv_fixed: bool
    notes: tuple[str, ...] = ()

    @property
    def fixed(self) -> int:
        """Everything but the KV cache."""
        return sum(term.bytes for term in self.terms) - self.kv_bytes

    @property
    def total(self) -> int:
        """All terms."""
        return self.fixed + self.kv_bytes


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """How many devices share the tensors of a layer, and the layers."""

    tensor: int = 1
    pipeline: int = 1


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model as far as its memory goes: the text part of its config, and its tensors.

    `total`: bytes of the weights where the tensors are not known.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader] = {}
    total: int | None = None
    quantized: bool = False


def _number(arguments: Sequence[str], default: int, *names: str) -> int:
    text = argument(arguments, *names) or ""
    return int(text) if text.isdecimal() and len(text) < 16 and int(text) > 0 else default


def parallel_of(spec: ServeSpec) -> Parallel:
    """Tensor and pipeline parallel sizes that the engine will be told."""
    if spec.device == "cpu":
        return Parallel()
    arguments = spec.extra_args
    return Parallel(
        tensor=_number(arguments, spec.tensor_parallel, "--tensor-parallel-size", "--tp-size",
                       "--tp", "-tp"),
        pipeline=_number(arguments, 1, "--pipeline-parallel-size", "--pp-size", "-pp"),
    )  # fmt: skip


def weight_bytes(model: Model, dtype: str, parallel: Parallel) -> tuple[int, int]:
    """Bytes on one device: those shared out between the ranks, and those kept whole on each.

    Layers above the config's (the multi-token head of DeepSeek-V3) are not loaded. Tensors that
    are not quantized are taken in `dtype`, unless that is "auto".
    """
    if not model.tensors:
        return (model.total or 0) // (parallel.tensor * parallel.pipeline), 0
    layers = model.config.get("num_hidden_layers")
    heads = int(model.config.get("num_key_value_heads") or parallel.tensor)
    split = whole = 0.0
    for name, tensor in model.tensors.items():
        layer = _LAYER.search(name)
        if layer and type(layers) is int and "vision" not in name and int(layer[1]) >= layers:
            continue
        size = float(tensor.end - tensor.begin)
        if dtype in SIZES and tensor.dtype in FLOATS and not model.quantized:
            size *= SIZES[dtype] / BYTES[tensor.dtype]
        size /= parallel.pipeline if layer else 1
        if _WHOLE.search(name):
            whole += size
        else:
            # With fewer KV heads than ranks, several ranks hold the same ones.
            split += size / (min(heads, parallel.tensor) if _KV.search(name) else parallel.tensor)
    return round(split), round(whole)


def kv_tokens(config: Mapping[str, Any], context: int) -> int:
    """Tokens times layers that a sequence of `context` tokens keeps.

    Layers of sliding attention keep their window, those of linear attention none.
    """
    layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        return layers * context
    window = config.get("sliding_window")
    short = min(context, window) if type(window) is int else context
    kept = {"sliding_attention": short, "chunked_attention": context, "full_attention": context}
    return sum(0 if "linear" in str(k) else kept.get(str(k), context) for k in kinds)


def drafter_config(spec: DrafterSpec) -> dict[str, Any]:
    """A drafter's sizes under the names that a target's config has."""
    config: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "dtype": spec.dtype,
    }
    if spec.mla is not None:
        config["kv_lora_rank"] = spec.mla.kv_lora_rank
        config["qk_rope_head_dim"] = spec.mla.qk_rope_head_dim
    return config


def activation_bytes(
    config: Mapping[str, Any], spec: ServeSpec, parallel: Parallel, sequences: int
) -> tuple[int, str]:
    """The peak of one step, estimated: the widest layer over its tokens, and the logits.

    Of a token: four hidden states (residual, input, norm, output), queries and the attention's
    output, and the feed-forward's up, gate and product; of experts those a token is sent to, and
    their outputs before they are summed. Logits are float32, twice (raw and as probabilities), of
    k + 1 tokens a sequence, gathered over the whole vocabulary.
    """
    default = CPU_STEP_TOKENS if spec.device == "cpu" else STEP_TOKENS
    tokens = _number(spec.extra_args, default, "--max-num-batched-tokens", "--chunked-prefill-size")
    tokens = min(tokens, max(sequences * spec.max_model_len, 1))
    hidden = int(config["hidden_size"])
    heads = -(-int(config["num_attention_heads"]) // parallel.tensor)
    size = int(config.get("qk_nope_head_dim") or 0) + int(config.get("qk_rope_head_dim") or 0)
    size = size or int(config.get("head_dim") or hidden // int(config["num_attention_heads"]))
    wide = 3 * int(config.get("intermediate_size") or 4 * hidden) // parallel.tensor
    chosen = int(config.get("num_experts_per_tok") or 0)
    if chosen and config.get("moe_intermediate_size"):
        experts = 3 * chosen * int(config["moe_intermediate_size"]) // parallel.tensor
        wide = max(wide, experts + chosen * hidden)
    element = SIZES.get(spec.dtype, SIZES.get(str(config.get("dtype")), 2))
    layer = tokens * element * (4 * hidden + 3 * heads * size + wide)
    drafts = spec.k + 1 if spec.drafter is not None else 1
    logits = 2 * 4 * sequences * drafts * int(config["vocab_size"])
    return layer + logits, f"{tokens:,} tokens a step, logits of {sequences * drafts:,} tokens"


def need_of(spec: ServeSpec, target: Model, drafter: Model | None, concurrency: int | None) -> Need:
    """The terms of one device. Raises KeyError, TypeError or ValueError at a config without sizes.

    `concurrency`: the most requests that the plan has under way; None: an open loop's, not known.
    """
    parallel = parallel_of(spec)
    known = [n for n in (spec.max_num_seqs, concurrency) if n is not None]
    sequences = min(known) if known else SEQUENCES
    terms = list(_weight_terms("weights", target, spec, parallel))
    each = kv_tokens(target.config, spec.max_model_len)
    width, how = kv_width(target.config, parallel.tensor)
    element = kv_size(target.config, spec)
    one = each * width * element // parallel.pipeline
    layers = int(target.config["num_hidden_layers"])
    told = f"{layers} layers x ({how}) x {element} B"
    if drafter is not None:
        terms += _weight_terms("drafter", drafter, spec, parallel)
        of_drafter = kv_width(drafter.config, parallel.tensor)[0] * spec.max_model_len * element
        one += of_drafter
        told += f", {gib(of_drafter)} of it the drafter's"
    kv = sequences * one if spec.kv_cache_gib is None else round(spec.kv_cache_gib * 2**30)
    how_many = f"{sequences} x {spec.max_model_len:,} tokens: {told}"
    if spec.kv_cache_gib is not None:
        how_many = f"engine.kv_cache_gib; {gib(sequences * one)} for {how_many}"
    terms.append(Term(name="KV cache", bytes=kv, kind="computed", how=how_many))
    bytes_, how = activation_bytes(target.config, spec, parallel, sequences)
    terms.append(Term(name="activations", bytes=bytes_, kind="estimated", how=how))
    terms += _overhead(spec, parallel)
    return Need(
        device="the host" if spec.device == "cpu" else "one GPU",
        terms=tuple(terms),
        kv_sequence=one,
        kv_bytes=kv,
        sequences=sequences,
        context=spec.max_model_len,
        kv_fixed=spec.kv_cache_gib is not None,
        notes=tuple(_not_counted(spec)),
    )


def _weight_terms(name: str, model: Model, spec: ServeSpec, parallel: Parallel) -> Iterator[Term]:
    split, whole = weight_bytes(model, spec.dtype, parallel)
    ranks = f" / {parallel.tensor} tensor parallel" if parallel.tensor > 1 else ""
    ranks += f" / {parallel.pipeline} pipeline parallel" if parallel.pipeline > 1 else ""
    source = f"{len(model.tensors)} tensors" if model.tensors else "the index's total"
    if parallel.tensor == 1:
        split, whole = split + whole, 0
    yield Term(name=name, bytes=split, kind="computed", how=f"{source}{ranks}")
    if whole:
        how = "norms, routers, down-projections and the like: on each rank"
        yield Term(name=f"{name}, kept whole", bytes=whole, kind="computed", how=how)


def _overhead(spec: ServeSpec, parallel: Parallel) -> Iterator[Term]:
    if spec.device == "cpu":
        yield Term(name="process", bytes=PROCESS_BYTES, kind="assumed", how="Python, torch")
        return
    yield Term(name="CUDA", bytes=CONTEXT_BYTES, kind="assumed", how="context, captured graphs")
    if parallel.tensor * parallel.pipeline > 1:
        yield Term(
            name="NCCL", bytes=COMMUNICATION_BYTES, kind="assumed", how="buffers of each rank"
        )


def _not_counted(spec: ServeSpec) -> Iterator[str]:
    """What the engine is told and the table does not know."""
    said = [w.partition("=")[0] for w in spec.extra_args if w.startswith("-")]
    for names, what in (
        (("--data-parallel-size", "-dp", "--dp-size", "--enable-dp-attention"), "data parallelism"),
        (("--enable-expert-parallel", "--ep-size"), "expert parallelism"),
        (("--cpu-offload-gb",), "weights kept in the host's memory"),
        (("--quantization",), "weights quantized while they are loaded"),
    ):
        if any(word in names for word in said):
            yield f"not counted: {what} ({', '.join(w for w in said if w in names)})"


def usable_bytes(engine: str, spec: ServeSpec, free: int, total: int) -> tuple[int, str]:
    """What an engine lets itself take of a GPU, and which rule says so."""
    share = argument(spec.extra_args, "--gpu-memory-utilization")
    if engine != "vllm" or spec.kv_cache_gib is not None:
        return free, "free"
    try:
        part = float(share) if share is not None else VLLM_SHARE
    except ValueError:
        part = VLLM_SHARE
    return int(total * part), f"{part:.0%} of {gib(total)}, vLLM's own limit"


def check_memory(need: Need, where: str, usable: int | None, rule: str) -> Finding:
    """Whether the terms fit into what `where` has for them.

    A cache too small for the plan's concurrency serves, slower; one too small for a single
    sequence does not start.
    """
    room = "" if need.kv_fixed else f" ({need.sequences} sequences of {need.context:,} tokens)"
    said = f"{gib(need.total)} wanted{room}"
    if usable is None:
        return unknown("memory", "fits", where, f"{said}, what is free is not known")
    what = f"{said}, {gib(usable)} {rule}"
    least = need.fixed + (need.kv_bytes if need.kv_fixed else need.kv_sequence)
    if need.kv_fixed and need.kv_bytes < need.kv_sequence:
        return fail(
            "memory",
            "kv_cache",
            where,
            f"engine.kv_cache_gib holds {gib(need.kv_bytes)}, "
            f"one sequence of {need.context:,} tokens takes {gib(need.kv_sequence)}",
            "set engine.kv_cache_gib higher, or engine.max_model_len lower",
        )
    if least > usable:
        of_one = "" if need.kv_fixed else " with one sequence alone"
        return fail("memory", "fits", where, f"{what}: {gib(least - usable)} too little{of_one}",
                    "use more GPUs, a smaller engine.max_model_len, or an fp8 KV cache"
                    if need.device == "one GPU" else "free memory, or set engine.kv_cache_gib and "
                    "engine.max_model_len lower")  # fmt: skip
    if need.total > usable:
        fit = (usable - need.fixed) // max(1, need.kv_sequence)
        return warn("memory", "fits", where, f"{what}: the cache holds {fit} of the "
                    f"{need.sequences} sequences at their longest", "requests will wait or be "
                    "preempted: lower load.concurrency or engine.max_model_len, or use an fp8 "
                    "KV cache")  # fmt: skip
    return ok("memory", "fits", where, what)


def check_free(engine: str, where: str, usable: int, free: int) -> Iterator[Finding]:
    """vLLM refuses to start where less is free than the share that it is to take."""
    if engine == "vllm" and free < usable:
        yield fail(
            "memory",
            "free",
            where,
            f"{gib(free)} are free, vLLM wants {gib(usable)}",
            "end what is on the GPU, or give --gpu-memory-utilization in engine.extra_args",
        )
