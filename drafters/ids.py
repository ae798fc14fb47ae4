"""Who counts aux layers how, and the translation to and from transformers' index.

The neutral number is the index into transformers' `output_hidden_states`: index i is the input of
layer i, which is the output of layer i - 1, before the final norm. Read at these places:

- vLLM 0.32, `model_executor/models/interfaces.py` (EagleModelMixin) and `deepseek_v2.py`: id i is
  index i, captured in ascending order, each layer once.
- SGLang 0.5.23, `set_eagle3_layers_to_capture` of each model: given ids mean the output of the
  layer, but on DeepSeek-type targets only where the first id is 1, and on gpt-oss not where the
  largest id is the number of layers. Captured in ascending order.
- speculators up to 0.4, `data_generation/custom_worker.py`: the output of the layer. From 0.5 on
  hidden states come from vLLM, in vLLM's count.
- SpecForge 0.2 (`algorithms/model_providers.py`): the output of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from drafters.spec import DrafterError

Convention = Literal["hf", "vllm", "sglang", "speculators-0.3", "specforge"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)
Family = Literal["deepseek", "gpt-oss", "llama"]
FAMILIES: tuple[Family, ...] = get_args(Family)
FAMILY_NAMES: dict[Family, str] = {
    "deepseek": "DeepSeek, Kimi-K2",
    "gpt-oss": "gpt-oss",
    "llama": "Llama, Qwen, others",
}
MEANING: dict[Convention, str] = {
    "hf": "transformers' hidden-state index",
    "vllm": "vLLM: the input of the layer",
    "sglang": "SGLang: the output of the layer; as given on DeepSeek-type targets",
    "speculators-0.3": "speculators up to 0.4: the output of the layer",
    "specforge": "SpecForge: the output of the layer",
}
# SGLang's model classes whose hook adds 1 only to a list that begins with 1
_AS_GIVEN = (
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
    *("KimiK25ForConditionalGeneration", "GlmMoeDsaForCausalLM", "Glm4MoeLiteForCausalLM"),
    "MistralLarge3ForCausalLM",
)


def family_of(architecture: str) -> Family:
    """Which of SGLang's rules a target's architecture falls under."""
    if architecture in _AS_GIVEN:
        return "deepseek"
    return "gpt-oss" if architecture == "GptOssForCausalLM" else "llama"


def default_layers(layers: int) -> tuple[int, ...]:
    """What vLLM and SGLang capture where a drafter names no layers, as indices."""
    return (2, layers // 2, layers - 3)


def to_index(
    convention: Convention,
    ids: Sequence[int],
    family: Family | None = None,
    layers: int | None = None,
) -> tuple[int, ...]:
    """Ids counted in `convention` -> transformers' indices, in the order given.

    `family` and `layers` (of the target) matter to SGLang's reading alone. Raises DrafterError
    where the reading depends on a family that is not known.
    """
    if convention in ("speculators-0.3", "specforge"):
        return tuple(i + 1 for i in ids)
    if convention != "sglang":
        return tuple(ids)
    if ids and ids[0] == 1 and family != "gpt-oss":
        return tuple(i + 1 for i in ids)  # the same on every family
    if family is None:
        raise DrafterError(
            f"SGLang reads the layer ids {list(ids)} otherwise on DeepSeek-type targets than on "
            "others; name the target with --target"
        )
    if family == "deepseek" or (family == "gpt-oss" and layers is not None and layers in ids):
        return tuple(ids)
    return tuple(i + 1 for i in ids)


def from_index(
    convention: Convention,
    indices: Sequence[int],
    family: Family | None = None,
    layers: int | None = None,
) -> list[int]:
    """Transformers' indices -> the ids that `convention` reads back as the same indices.

    Raises DrafterError where it has none.
    """
    shifted = [i - 1 for i in indices]
    if convention in ("hf", "vllm"):
        return list(indices)
    # where the family is not known, only a list that begins with 1 is read alike everywhere
    as_given = convention == "sglang" and family is not None
    for ids in ([*indices], shifted) if as_given else (shifted,):
        if min(ids) >= 0 and to_index(convention, ids, family, layers) == tuple(indices):
            return ids
    if convention == "sglang" and indices[0] == 1 and family == "deepseek":
        raise DrafterError(
            f"SGLang cannot capture {list(indices)} on a DeepSeek-type target: a list that begins "
            "with 1 is read one layer later; train on layers that begin at 2"
        )
    raise DrafterError(
        f"{MEANING[convention].split(':')[0]} cannot name {list(indices)}: it counts the outputs "
        "of layers, and index 0 is the embedding"
    )


def captured(
    engine: str, ids: Sequence[int] | None, family: Family, layers: int | None
) -> tuple[int, ...] | None:
    """The indices `engine` feeds to the drafter, in its order, where its config says `ids`.

    Without ids the engine takes its default; None where the number of layers that it needs for
    that is not known.
    """
    if not ids:
        return None if layers is None else tuple(sorted(set(default_layers(layers))))
    convention: Convention = "sglang" if engine == "sglang" else "vllm"
    return tuple(sorted(set(to_index(convention, ids, family, layers))))


def why_not_captured(
    engine: str, indices: Sequence[int], family: Family, layers: int | None
) -> str | None:
    """Why `engine` cannot feed these indices to a drafter, whatever ids are written; or None."""
    if list(indices) != sorted(set(indices)):
        return (
            f"{engine} captures layers in ascending order and each once, so the drafter would get "
            f"{sorted(set(indices))} for {list(indices)}"
        )
    if engine == "vllm" and family == "deepseek" and 0 in indices:
        return "vllm 0.32 stops with an error on the embedding (index 0) of a DeepSeek-type target"
    if engine == "sglang" and family != "gpt-oss" and layers is not None and layers in indices:
        return f"sglang captures inputs of layers only: it has no index {layers}, the last output"
    if engine == "sglang":
        try:
            from_index("sglang", indices, family, layers)
        except DrafterError as error:
            return str(error).partition("; ")[0]  # the remedy is the gap's
    return None
