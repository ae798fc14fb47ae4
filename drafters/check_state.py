"""What lies beside the weights: the optimizer's and scheduler's state, and the target's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters.findings import Finding
from drafters.flat import one_id
from drafters.headers import read_json
from drafters.reading import Checkpoint, Target
from drafters.spec import DrafterError

OPTIMIZER = "optimizer_state_dict.pt"
SCHEDULER = "scheduler_state_dict.pt"


def check_state(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Whether training could go on from here: the trainer's files are there and can be loaded.

    A folder with neither file is an export, and nothing is missing from it, unless it has the
    form that a trainer of speculators 0.3 leaves.
    """
    folder = checkpoint.path
    there = {name: (folder / name).exists() for name in (OPTIMIZER, SCHEDULER)}
    trainers = any(there.values()) or checkpoint.format == "speculators-0.3"
    for name, present in there.items():
        if present:
            yield from _load(folder / name)
        elif trainers:
            yield Finding(
                severity="warning",
                code="state_missing",
                where=str(folder / name),
                what="is missing",
                why="training cannot go on from this checkpoint; serving does not need it",
                remedy="copy it from where the run was written",
            )


def _load(file: Path) -> Iterator[Finding]:
    import torch

    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        said = " ".join(str(error).split())[:160] or type(error).__name__
        yield Finding(
            severity="error",
            code="state_unreadable",
            where=str(file),
            what=f"cannot be loaded: {said}",
            why="training cannot go on from this checkpoint",
            remedy="copy it again, or take an earlier checkpoint",
        )
        return
    problem = _wrong_optimizer(state) if file.name == OPTIMIZER else _wrong_scheduler(state)
    if problem is not None:
        yield Finding(
            severity="error",
            code="state_unreadable",
            where=str(file),
            what=problem,
            why="training cannot go on from this checkpoint",
            remedy="take an earlier checkpoint",
        )
    elif file.name == OPTIMIZER and _reduced(state):
        yield Finding(
            severity="warning",
            code="state_reduced",
            where=str(file),
            what="moments are stored in 16 bits",
            why="speculators 0.3 does so; a resumed run is another run",
            remedy="keep it in mind when curves before and after are compared",
        )


def _moments(state: dict[str, Any]) -> Iterator[Any]:
    import torch

    for entry in state["state"].values():
        if isinstance(entry, dict):
            yield from (v for v in entry.values() if isinstance(v, torch.Tensor) and v.numel() > 1)


def _wrong_optimizer(state: object) -> str | None:
    if not isinstance(state, dict) or "state" not in state or "param_groups" not in state:
        return "holds no optimizer's state (state and param_groups)"
    if not isinstance(state["state"], dict) or not state["state"]:
        return "holds the state of no parameter"
    if any(not bool(m.isfinite().all()) for m in _moments(state) if m.is_floating_point()):
        return "holds moments that are not finite"
    return None


def _reduced(state: dict[str, Any]) -> bool:
    return any(m.is_floating_point() and m.element_size() < 4 for m in _moments(state))


def _wrong_scheduler(state: object) -> str | None:
    return None if isinstance(state, dict) and state else "holds no scheduler's state"


def check_tokens(checkpoint: Checkpoint, target: Target) -> Iterator[Finding]:
    """The drafter's bos and eos against the target's config and tokenizer."""
    where, vocab = str(checkpoint.path / "config.json"), checkpoint.spec.vocab_size
    for key in ("bos_token_id", "eos_token_id"):
        ours = one_id(checkpoint.flat.get(key))
        if ours is None:
            continue
        if not 0 <= ours < vocab:
            yield Finding(
                severity="error",
                code="token_out_of_range",
                where=where,
                what=f"{key} is {ours}, beyond the vocabulary of {vocab}",
                remedy="take it from the target's config",
            )
            continue
        theirs = target_tokens(target, key)
        if theirs and ours not in theirs:
            yield Finding(
                severity="warning",
                code="token_differs",
                where=where,
                what=f"{key} is {ours}, the target's is "
                + " or ".join(str(i) for i in sorted(theirs)),
                why="engines end requests by the target's; the drafter's was trained on another",
                remedy="take it from the target's config",
            )


def target_tokens(target: Target, key: str) -> set[int]:
    """Every id that the target's folder gives for `bos_token_id` or `eos_token_id`.

    From config.json, generation_config.json, and the token that the tokenizer names.
    """
    found: set[int] = set()
    for source in (target.config, _json(target.path / "generation_config.json")):
        value = source.get(key)
        for token in value if isinstance(value, list) else [value]:
            if type(token) is int:
                found.add(token)
    named = _json(target.path / "tokenizer_config.json")
    content = named.get(key.removesuffix("_id"))
    if isinstance(content, dict):
        content = content.get("content")
    if isinstance(content, str):
        found |= {i for i, text in _added_tokens(target.path, named) if text == content}
    return found


def _added_tokens(folder: Path, named: dict[str, Any]) -> Iterator[tuple[int, str]]:
    decoder = named.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for number, token in decoder.items():
            if isinstance(token, dict) and str(number).isdigit():
                yield int(number), str(token.get("content"))
    added = _json(folder / "tokenizer.json").get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and type(token.get("id")) is int:
            yield token["id"], str(token.get("content"))


def _json(path: Path) -> dict[str, Any]:
    """The file's object; empty where it is not there or no JSON (other checks tell that)."""
    try:
        return read_json(path) if path.is_file() else {}
    except DrafterError:
        return {}
