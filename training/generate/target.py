"""Which target a training is about: its folder, and what tells it from another one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from harness.errors import UsageError
from training.plan import TrainingPlan

SPOTS = 16
SPOT_BYTES = 4096
"""Weights are too large to be read whole: of each file so many bytes at so many places."""
LONGEST_CONTEXT = 4096
_TEXT_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tiktoken.model"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


def demo_pair(plan: TrainingPlan) -> Path:
    """The demo pair's folder, made first where it is not there. Raises `UsageError`.

    Its target and prompts are all that is wanted: a drafter that is out of date is left alone.
    """
    from training.demo import pair

    target, drafter = pair.configs(plan.demo.target, plan.demo.drafter)
    folder = pair.pair_folder(target)
    if pair.target_ready(folder):
        return folder
    try:
        return pair.make(target, drafter)
    except pair.PairError as error:
        raise UsageError(str(error)) from None


def target_folder(plan: TrainingPlan) -> Path:
    """The target's folder: the plan's, else the demo pair's. Raises `UsageError`."""
    if plan.target.path is None:
        return demo_pair(plan) / "target"
    try:
        folder = Path(plan.target.path).expanduser().resolve()
        there = (folder / "config.json").is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"target.path={plan.target.path[:200]}: no path: {error}") from None
    if not there:
        raise UsageError(
            f"target.path={folder}: no config.json there; give the folder of a checkpoint"
        )
    return folder


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
