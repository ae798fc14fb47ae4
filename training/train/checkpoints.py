"""Checkpoints on disk: a drafter's folder with all that training needs to go on exactly.

    checkpoints/update-00000120/
        config.json, model.safetensors   the drafter, float32, as any engine loads it
        optimizer_state_dict.pt          moments by parameter name, random states
        scheduler_state_dict.pt          the schedule, and the update it stands at
        training.json                    position, last losses (`TrainingState`)
        checks.json                      what was found of it (`training.train.examine`)

Each is written beside its place, synced and renamed: it is whole or not there.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from drafters.checkpoint import save
from drafters.eagle3 import Eagle3Drafter
from harness.errors import UsageError, one_line
from training.errors import TrainingError
from training.files import write_record
from training.folders import BEST, CHECKPOINTS

STATE = "training.json"
OPTIMIZER = "optimizer_state_dict.pt"
SCHEDULER = "scheduler_state_dict.pt"
CHECKS = "checks.json"
_PREFIX = "update-"


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a training stands after `update` updates, `epoch` and `in_epoch` of the next one.

    `scheduled` False: written because of a signal; it is gone on from, and never the best.
    `losses`: the last ones, for the rule of loss spikes.
    """

    update: int
    epoch: int
    in_epoch: int
    scheduled: bool
    tokens: int
    losses: tuple[float, ...]


def folder_of(train: Path, update: int) -> Path:
    """The checkpoint's folder after `update` updates."""
    return train / CHECKPOINTS / f"{_PREFIX}{update:08d}"


def all_checkpoints(train: Path) -> list[Path]:
    """Whole checkpoints, oldest first; what a crash left half written is removed."""
    parent = train / CHECKPOINTS
    if not parent.is_dir():
        return []
    found = []
    for path in sorted(parent.iterdir()):
        if path.name.endswith(".partial"):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(_PREFIX) and (path / STATE).is_file():
            found.append(path)
    return found


def write_checkpoint(
    train: Path,
    drafter: Eagle3Drafter,
    optimizer: dict[str, Any],
    schedule: dict[str, Any],
    state: TrainingState,
) -> Path:
    """Write a checkpoint whole; returns its folder. Raises `TrainingError` where the disk is full.

    A checkpoint that is there already is replaced: it holds the same.
    """
    place = folder_of(train, state.update)
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save(drafter, partial)
        torch.save({**optimizer, "random": _random_states()}, partial / OPTIMIZER)
        torch.save(schedule, partial / SCHEDULER)
        (partial / STATE).write_bytes(msgspec.json.encode(state) + b"\n")
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        if place.exists():
            shutil.rmtree(place)
        os.rename(partial, place)
        _sync(place.parent)
    except (OSError, SafetensorError, RuntimeError) as error:
        full = _disk_full(error, train)
        shutil.rmtree(partial, ignore_errors=True)
        if full:
            raise TrainingError(
                f"the disk is full: the checkpoint of update {state.update} could not be written "
                f"to {place.parent}; {kept(train)}; make room and run the same command again"
            ) from None
        raise TrainingError(f"{place}: cannot be written: {error}; {kept(train)}") from None
    return place


def kept(train: Path) -> str:
    """What a training that ends now leaves behind, for its last line."""
    found = all_checkpoints(train)
    return f"kept: {found[-1]}" if found else "no checkpoint was written before"


def _disk_full(error: Exception, folder: Path) -> bool:
    """torch's writer does not say why it failed: then the disk is asked."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if "No space left" in str(error) or "os error 28" in str(error):
        return True
    return isinstance(error, RuntimeError) and shutil.disk_usage(folder).free < 1 << 20


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_states() -> dict[str, Tensor]:
    """Torch's generators. Noise and order have seeds of their own and need none of them."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(optimizer: dict[str, Any]) -> None:
    """Set torch's generators to what `read_optimizer` found."""
    states = optimizer.get("random", {})
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def read_state(checkpoint: Path) -> TrainingState:
    """Where the checkpoint stands. Raises `UsageError`."""
    path = checkpoint / STATE
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrainingState)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); {_way_back(checkpoint)}") from None


def read_optimizer(checkpoint: Path, *, restart: bool) -> dict[str, Any] | None:
    """What `write_checkpoint` was given for the optimizer; None where `restart` says so.

    Raises `UsageError` where the file is missing otherwise, or damaged.
    """
    path = checkpoint / OPTIMIZER
    if restart:
        return None
    if not path.is_file():
        raise UsageError(
            f"{path} is missing: without its moments training would not go on where it stopped; "
            "put the file back, or say --set train.restart_optimizer=true to begin them anew"
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state.get("state"), dict):
            raise ValueError("it holds no optimizer's state")
    except Exception as error:  # a pickle that is cut off raises whatever it likes
        said = one_line(str(error), 120) or type(error).__name__
        raise UsageError(f"{path}: damaged ({said}); {_way_back(checkpoint)}") from None
    return state


def _way_back(checkpoint: Path) -> str:
    return f"remove {checkpoint} to go on from the checkpoint before it"


def prune(train: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints and the best one; unscheduled ones go first."""
    best = best_of(train)
    found = all_checkpoints(train)
    for path in found[:-1]:
        if not read_state(path).scheduled:
            shutil.rmtree(path, ignore_errors=True)
    for path in all_checkpoints(train)[:-keep]:
        if path != best:
            shutil.rmtree(path, ignore_errors=True)


def best_of(train: Path) -> Path | None:
    """The checkpoint that `best` points to, None where there is none."""
    link = train / BEST
    if not link.is_symlink():
        return None
    return train / os.readlink(link)


def point_best(train: Path, checkpoint: Path) -> None:
    """Let `best` point to a checkpoint, by a relative link that is replaced at once."""
    partial = train / f".{BEST}.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to(checkpoint.relative_to(train))
    os.replace(partial, train / BEST)
    _sync(train)


def write_checks(checkpoint: Path, value: msgspec.Struct) -> None:
    """Keep what was checked of a checkpoint beside it."""
    write_record(checkpoint / CHECKS, value)
