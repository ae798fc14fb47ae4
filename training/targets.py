"""The target of a plan: the folder it names, or the demo pair's, and what tells it from another."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from engines.base import EngineUsageError
from engines.checkpoint import check_named
from harness.errors import EngineFailure, UsageError
from training.plan import TrainingPlan

LONGEST_CONTEXT = 4096
"""The most tokens of prompt and answer that an engine is given room for, unless the plan says."""
SPOTS = 16
SPOT_BYTES = 4096
"""Weights are too large to be read whole: of each file so many bytes at so many places."""
MOST_MEMORY = 0.8
"""Of the free memory; the rest is for what is computed."""
_TEXT_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tiktoken.model"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


def target_folder(plan: TrainingPlan) -> Path:
    """The target's folder, absolute; the demo target is made first where it is missing.

    Raises `UsageError` where the plan is for a target whose folder it does not name,
    `EngineUsageError` where the folder holds no model, `EngineFailure` where the demo target could
    not be made.
    """
    if plan.target.path is None and plan.target.sizes is not None:
        raise UsageError(
            f"target.path: not set, and the plan {plan.name} is for a target of its own; give its "
            "folder with --set target.path=DIR"
        )
    if plan.target.path is None:
        return demo_folder(plan) / "target"
    folder = Path(plan.target.path).expanduser().resolve()
    check_named(folder, "target")
    return folder


def demo_folder(plan: TrainingPlan) -> Path:
    """The demo pair's folder with a finished target and its prompts; makes them, in minutes."""
    from training.demo import pair

    configs = pair.configs(plan.demo.target, plan.demo.drafter)
    folder = pair.pair_folder(configs[0])
    if pair.target_ready(folder):
        return folder
    try:
        return pair.make(*configs)
    except pair.PairError as error:
        raise EngineFailure(str(error)) from None


def demo_prompts(plan: TrainingPlan) -> Path | None:
    """The demo pair's prompts where the plan's workload asks for them."""
    return demo_folder(plan) / "prompts.jsonl" if plan.workload.dataset == "demo" else None


def target_identity(folder: Path) -> dict[str, str | None]:
    """Digests of the target's config, of what makes its text, and of samples of its weights."""
    texts = [folder / name for name in _TEXT_FILES]
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    return {
        "config": _whole([folder / "config.json"]),
        "tokenizer": _whole([path for path in texts if path.is_file()]),
        "weights": _spots(weights) if weights else None,
    }


def target_digest(identity: dict[str, str | None]) -> str:
    """One digest of a target's identity."""
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()


def reference_refusal(target: Path, *, growth: float = 1.0, in_memory: bool = True) -> str | None:
    """Why the reference engine cannot serve the target here, None where it can.

    `growth`: of the weights when they are read. `in_memory`: they go into this machine's memory.
    """
    from engines.reference.config import read_config

    try:
        read_config(target)
    except EngineUsageError as error:
        return str(error)
    needed = growth * sum(file.stat().st_size for file in target.glob("*.safetensors"))
    free = free_memory()
    if in_memory and needed > MOST_MEMORY * free:
        return (
            f"{target} would take {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are "
            "free"
        )
    return None


def free_memory() -> int:
    """Bytes that this machine could still give."""
    import psutil

    return int(psutil.virtual_memory().available)


def _whole(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _spots(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for spot in range(SPOTS):
                file.seek(max(0, size - SPOT_BYTES) * spot // (SPOTS - 1))
                digest.update(file.read(SPOT_BYTES))
    return digest.hexdigest()
