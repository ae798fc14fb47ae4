"""Ways to serve a pair that are unusual and right: none of them may be called a fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults.algebra import (
    turned_drafter,
    with_draft_vocabulary,
    with_own_embeddings,
    with_uneven_norm,
)
from faults.folders import Config, Tensors, edited
from faults.pair import Pair, tokenizer
from faults.planting import healthy
from faults.records import EVERY_ENGINE, NOT_SGLANG, Planted, Variant
from faults.texts import long_prompts
from faults.trainings import frequent_tokens, trained

Drafter = Callable[[Pair, Path, int], Path]


def _served(drafter: Drafter | None = None, **served: Any) -> Any:
    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        more = dict(served)
        if drafter is not None:
            more["drafter"] = drafter(pair, folder / "drafter", seed)
        return healthy(pair, seed, **more)

    return plant


def _restricted(size: int) -> Drafter:
    return lambda pair, folder, seed: with_draft_vocabulary(
        pair.drafter, folder, frequent_tokens(pair, size)
    )


def _own_embeddings(pair: Pair, folder: Path, seed: int) -> Path:
    return with_own_embeddings(pair, pair.drafter, folder, seed)


def _turned(pair: Pair, folder: Path, seed: int) -> Path:
    return turned_drafter(pair.drafter, folder, seed)


def _uneven(pair: Pair, folder: Path, seed: int) -> Path:
    return with_uneven_norm(pair.drafter, folder, seed)


def _recipe(name: str) -> Drafter:
    return lambda pair, folder, seed: trained(pair, name)


def _rendered(pair: Pair, seed: int, *, thinking: bool, turns: int = 1) -> tuple[Any, ...]:
    """Prompts through the chat template; `thinking` False: the answer begins at once."""
    from training.demo.corpus import END_THINK, prompt_text
    from training.demo.prompts import demo_dialogues

    chosen = random.Random(seed).sample(demo_dialogues(), 16 * turns)
    tail = "" if thinking else END_THINK
    encode = tokenizer(pair.target).encode
    texts = [prompt_text(d) for d in chosen]
    joined = ["".join(texts[i::16][:turns]) + tail for i in range(16)]
    return tuple(tuple(encode(text, add_special_tokens=False).ids) for text in joined)


def _prompts(**how: Any) -> Any:
    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        return healthy(pair, seed, prompts=_rendered(pair, seed, **how))

    return plant


def _fp8(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """A target whose matrices were rounded to fp8 (e4m3), a scale for each row, as served so."""
    import torch

    def rounded(config: Config, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and name.endswith("_proj.weight"):
                scale = tensor.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
                fp8 = (tensor / scale).to(torch.float8_e4m3fn)
                tensors[name] = fp8.to(tensor.dtype) * scale

    return healthy(pair, seed, target=edited(pair.target, folder / "target", rounded))


def _variant(name: str, plant: Any, **more: Any) -> Variant:
    return Variant(name=name, plant=plant, **more)


def _variants() -> Iterator[Variant]:
    for kind in ("mla", "llama"):
        # the real ones are asked of the pair that is like Kimi-K2.5
        real = EVERY_ENGINE if kind == "mla" else ("reference",)
        own = NOT_SGLANG if kind == "mla" else ("reference",)
        for k in range(1, 9):
            engines = real if k in (1, 3, 5) else ("reference",)
            yield _variant(f"{kind}_k{k}", _served(k=k), kind=kind, engines=engines)
        for temperature in (0.7, 1.0):
            yield _variant(
                f"{kind}_temperature_{temperature:g}", _served(temperature=temperature), kind=kind
            )
        for dtype, engines in (("bfloat16", real), ("float16", ("reference",))):
            yield _variant(f"{kind}_{dtype}", _served(dtype=dtype), kind=kind, engines=engines)
        yield _variant(f"{kind}_thinking_off", _prompts(thinking=False), kind=kind)
        yield _variant(f"{kind}_two_questions", _prompts(thinking=True, turns=2), kind=kind)
        yield _variant(f"{kind}_draft_vocabulary", _served(_restricted(640)), kind=kind)
        yield _variant(f"{kind}_own_embeddings", _served(_own_embeddings), kind=kind, engines=own)
        yield _variant(f"{kind}_turned", _served(_turned), kind=kind, engines=real)
        yield _variant(f"{kind}_uneven_norm", _served(_uneven), kind=kind, engines=real)
        yield _variant(f"{kind}_fp8_weights", _fp8, kind=kind, engines=real)
        long = long_prompts(300)
        yield _variant(f"{kind}_context_300", long, kind=kind, minutes=0.5, engines=real)
        for batch in (1, 2, 16):
            yield _variant(f"{kind}_batch_{batch}", _served(concurrency=batch), kind=kind)
    for engines, size in ((EVERY_ENGINE, 704), (("reference",), 448)):
        yield _variant(f"draft_vocabulary_{size}", _served(_restricted(size)), engines=engines)
    for recipe, engines in (
        ("norm_output", EVERY_ENGINE),
        ("fc_norm", EVERY_ENGINE),
        ("norm_before_fc", ("reference",)),  # vLLM's MLA drafter has no such norm, nor SGLang's
        ("norm_before_residual", NOT_SGLANG),
    ):
        yield _variant(f"trained_{recipe}", _served(_recipe(recipe)), engines=engines)
    for recipe in ("own_embeddings", "small_vocabulary"):
        yield _variant(f"trained_{recipe}", _served(_recipe(recipe)))
    yield _variant("concurrency_8", _served(concurrency=8), engines=EVERY_ENGINE)
    yield _variant("concurrency_1", _served(concurrency=1), engines=EVERY_ENGINE)
    yield _variant("short_answers", _served(max_tokens=24), engines=EVERY_ENGINE)
    yield _variant("small_context", _served(max_model_len=256), engines=EVERY_ENGINE)
    yield _variant("thinking_off", _prompts(thinking=False), engines=EVERY_ENGINE)
    yield _variant("two_questions", _prompts(thinking=True, turns=2), engines=EVERY_ENGINE)


HEALTHY: dict[str, Variant] = {variant.name: variant for variant in _variants()}
