"""Data sets by name: where each lies on the hub, read through `datasets` where that can be."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import msgspec

from harness.errors import UsageError, one_line
from harness.load.prompts.prompt import Prompt
from harness.load.prompts.rows import Reading, prompt_of


class KnownSet(msgspec.Struct, frozen=True, kw_only=True):
    """A published data set. `hub` None: it lies at `url` alone. `file`: one file on the hub."""

    name: str
    url: str
    hub: str | None = None
    subset: str | None = None
    split: str = "test"
    file: str | None = None
    aliases: tuple[str, ...] = ()


def _on_hub(name: str, hub: str, **more: Any) -> KnownSet:
    return KnownSet(name=name, hub=hub, url=f"https://huggingface.co/datasets/{hub}", **more)


SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
)

KNOWN = (
    _on_hub(
        "sharegpt", "anon8231489123/ShareGPT_Vicuna_unfiltered", split="train", file=SHAREGPT_FILE
    ),
    _on_hub("mt-bench", "lighteval/mt-bench", split="train", aliases=("mtbench",)),
    _on_hub("gsm8k", "openai/gsm8k", subset="main"),
    _on_hub("humaneval", "openai/openai_humaneval", aliases=("human-eval",)),
    _on_hub("math-500", "HuggingFaceH4/MATH-500", aliases=("math500",)),
    _on_hub("aime-2024", "HuggingFaceH4/aime_2024", split="train", aliases=("aime", "aime24")),
    _on_hub("aime-2025", "math-ai/aime25", aliases=("aime25",)),
    _on_hub("alpaca", "tatsu-lab/alpaca", split="train"),
    _on_hub("speed-bench", "nvidia/SPEED-Bench", subset="qualitative", aliases=("speedbench",)),
    KnownSet(name="spec-bench", url=SPEC_BENCH, aliases=("specbench",)),
)


def known_set(name: str) -> KnownSet | None:
    """The set of that name, letter case and underscores apart."""
    wanted = name.casefold().replace("_", "-")
    return next((s for s in KNOWN if wanted in (s.name, *s.aliases)), None)


def fetch_prompts(
    known: KnownSet, subset: str | None, split: str | None, how: Reading
) -> list[Prompt]:
    """The set's prompts from the hub, or from the cache of an earlier fetch.

    Raises `UsageError` where `datasets` is missing or no hub can be reached.
    """
    prompts: list[Prompt] = []
    for number, row in enumerate(_rows(known, subset, split), start=1):
        where = f"workload.dataset={known.name}, row {number}"
        prompt = prompt_of(row, where, f"{known.name}-{number}", how)
        if prompt is not None:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"workload.dataset={known.name}: holds no prompt")
    return prompts


def _rows(known: KnownSet, subset: str | None, split: str | None) -> Iterator[Any]:
    advice = f"fetch {known.url} yourself and give its path as workload.dataset"
    if known.hub is None:
        raise UsageError(f"workload.dataset={known.name}: lies on no hub; {advice}")
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise UsageError(
            f"workload.dataset={known.name}: needs the package 'datasets' to be fetched by name; "
            f"install it (pip install datasets), or {advice}"
        ) from None
    try:
        yield from library.load_dataset(
            known.hub,
            subset or known.subset,
            split=split or known.split,
            data_files=known.file,
        )
    except Exception as error:  # of the library, of the hub, of the network: of any type
        raise UsageError(
            f"workload.dataset={known.name}: {known.hub} cannot be fetched "
            f"({type(error).__name__}: {one_line(str(error), 160)}); {advice}"
        ) from None
