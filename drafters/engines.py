"""What each engine would make of a drafter's folder as it stands, and what none of them can hold.

Read against vLLM 0.32 (`models/llama_eagle3.py`, `deepseek_eagle3.py`,
`v1/spec_decode/llm_base_proposer.py`, `v1/worker/gpu_model_runner.py`,
`v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`) and SGLang 0.5.23 (`models/llama_eagle3.py`,
`kimi_k25_eagle3.py`, `speculative/eagle_worker_v2.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from drafters.flat import IDS, eagle_config
from drafters.ids import FAMILIES, Family, captured, why_not_captured
from drafters.reading import Checkpoint, Target

Engine = Literal["vllm", "sglang"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
LABELS: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
Runner = Literal["V1", "V2"]
"""vLLM's model runners. V2 is its default wherever Triton runs, so on GPUs; V1 serves on CPUs."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The layers that an engine would feed to the drafter if it were given this folder as it is.

    `ids`: what it reads, None where it finds none and takes its default. `captured`: indices, None
    where not known (default layers of an unknown target, or the folder cannot be read at all:
    then `problem` says why). `right`: whether these are the drafter's layers, None if unknown.
    `runner`: set where vLLM's two model runners read the folder differently.
    """

    engine: Engine
    runner: Runner | None = None
    family: Family
    ids: list[int] | None
    captured: list[int] | None
    right: bool | None
    problem: str | None = None


def label(reading: Reading) -> str:
    """The engine's name, and its model runner's where that matters."""
    name = LABELS[reading.engine]
    return name if reading.runner is None else f"{name} (model runner {reading.runner})"


def readings(checkpoint: Checkpoint, target: Target | None) -> list[Reading]:
    """One reading an engine, or one an engine and family where the family matters and is unknown.

    gpt-oss is left out where the target is not known: it differs from Llama at the last layer only.
    """
    layers = target.layers if target else None
    known = checkpoint.family
    families: tuple[Family, ...] = (known,) if known else FAMILIES[::2]
    found = _vllm_readings(checkpoint, known or "llama", layers)
    return found + [_reading(checkpoint, "sglang", family, layers) for family in families]


def _vllm_readings(checkpoint: Checkpoint, family: Family, layers: int | None) -> list[Reading]:
    """One, or two where vLLM's model runners differ."""
    one = _reading(checkpoint, "vllm", family, layers, "V1")
    two = _reading(checkpoint, "vllm", family, layers, "V2")
    if one.captured == two.captured:
        return [msgspec.structs.replace(one, runner=None)]
    return [one, two]


def _reading(
    checkpoint: Checkpoint,
    engine: Engine,
    family: Family,
    layers: int | None,
    runner: Runner | None = None,
) -> Reading:
    problem = _unreadable(engine, checkpoint)
    if problem is not None:
        return Reading(
            engine=engine, family=family, ids=None, captured=None, right=None, problem=problem
        )
    flat, inner = checkpoint.flat, eagle_config(checkpoint.flat)
    if engine == "sglang":
        ids = inner.get(IDS)
    else:
        ids = flat.get(IDS) or inner.get(IDS if runner == "V1" else "layer_ids")
    fed = captured(engine, ids, family, layers)
    trained = checkpoint.spec.aux_layers
    return Reading(
        engine=engine,
        runner=runner,
        family=family,
        ids=list(ids) if ids else None,
        captured=None if fed is None else list(fed),
        right=None if fed is None or not trained else fed == trained,
    )


def _unreadable(engine: Engine, checkpoint: Checkpoint) -> str | None:
    if engine == "sglang" and checkpoint.format.startswith("speculators"):
        return "SGLang has no reader for the speculators format"
    return None


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine cannot do for a drafter, however its folder is written."""

    code: str
    what: str
    remedy: str


def gaps(checkpoint: Checkpoint, engine: Engine, target: Target | None) -> Iterator[Gap]:
    """Everything about this drafter that `engine` would compute otherwise, in any translation."""
    spec, name = checkpoint.spec, LABELS[engine]
    if engine == "sglang" and spec.norm_before_residual:
        yield Gap(
            code="flag_ignored",
            what="SGLang ignores norm_before_residual: true, so this drafter would compute "
            "something else",
            remedy="serve it with vLLM, or train it with norm_before_residual: false",
        )
    if spec.kind == "mla" and spec.norm_before_fc:
        yield Gap(
            code="flag_ignored",
            what=f"{name}'s MLA drafter ignores norm_before_fc: true",
            remedy="serve it with the reference engine",
        )
    if engine == "sglang" and spec.mla is not None and spec.mla.q_lora_rank is None:
        yield Gap(
            code="no_q_lora",
            what="SGLang's MLA drafter wants a q_lora_rank, and this one has none",
            remedy="serve it with vLLM",
        )
    yield from _layer_gaps(checkpoint, engine, target)
    yield from _sharing_gaps(checkpoint, engine)


def _layer_gaps(checkpoint: Checkpoint, engine: Engine, target: Target | None) -> Iterator[Gap]:
    indices, family = checkpoint.spec.aux_layers, checkpoint.family
    if not indices:
        return
    layers = target.layers if target else None
    problem = why_not_captured(engine, indices, family or "llama", layers)
    if problem is not None:
        yield Gap(
            code="layers_not_captured",
            what=problem,
            remedy="train on layers it can capture, or serve with the reference engine",
        )


def _sharing_gaps(checkpoint: Checkpoint, engine: Engine) -> Iterator[Gap]:
    """Where the checkpoint leaves out an embedding or a head, and the engine cannot fill in."""
    spec, name = checkpoint.spec, LABELS[engine]
    if not checkpoint.has("embed_tokens.weight") and spec.target_hidden_size != spec.hidden_size:
        yield Gap(
            code="embedding_absent",
            what=f"the checkpoint has no embed_tokens.weight, and the target's is "
            f"{spec.target_hidden_size} wide, the drafter's {spec.hidden_size}: {name} would "
            "leave it random",
            remedy="export the drafter with its own embedding",
        )
    if checkpoint.has("lm_head.weight"):
        return
    if spec.draft_vocab_size != spec.vocab_size:
        taken = (
            f"vLLM would take the first {spec.draft_vocab_size} rows of the target's head"
            if engine == "vllm"
            else "SGLang would leave it random"
        )
        yield Gap(
            code="head_absent",
            what=f"the checkpoint has no lm_head.weight, and {taken}, not those of the draft "
            "vocabulary",
            remedy="export the drafter with its own head",
        )
    elif engine == "sglang" and spec.kind == "llama":
        yield Gap(
            code="head_absent",
            what="the checkpoint has no lm_head.weight, and SGLang's Llama drafter would leave it "
            "random",
            remedy="export the drafter with its own head",
        )
