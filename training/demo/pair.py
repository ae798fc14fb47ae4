"""The demo pair on disk: where it lies, what makes it out of date, how it is made whole.

A pair's folder is named after everything that makes its target: the configuration, and the code
(comments and docstrings left out). Each drafter in it carries the key of what made the drafter.
Everything is built beside its place and renamed into it when whole, under a lock, so that a run
that was cut short leaves nothing that a later run could take for a pair.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from training.demo.config import DrafterConfig, DrafterKind, TargetConfig, TargetKind
from training.progress import note

_ROOT = Path(__file__).resolve().parents[2]
_PARSING = threading.Lock()
"""Python 3.11 counts the depth of a syntax tree for all threads together, and trips over it."""
_TARGET_SOURCES = (
    "drafters/layers.py",
    "training/data.py",
    "training/optim.py",
    "training/precision.py",
    "training/demo/build.py",
    "training/demo/config.py",
    "training/demo/corpus.py",
    "training/demo/export.py",
    "training/demo/model.py",
    "training/demo/prompts.py",
    "training/demo/stories.py",
    "training/demo/target.py",
    "training/demo/tasks.py",
    "training/demo/tokenizer.py",
)
_DRAFTER_SOURCES = (
    "drafters/checkpoint.py",
    "drafters/eagle3.py",
    "drafters/flat.py",
    "drafters/headers.py",
    "drafters/spec.py",
    "training/attention.py",
    "training/counts.py",
    "training/evaluate.py",
    "training/loss.py",
    "training/trainer.py",
    "training/unroll.py",
    "training/demo/drafter.py",
)


class PairError(Exception):
    """The demo pair cannot be made or found; the message is one line."""


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/spec-harness`, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spec-harness"


def source_digest(paths: Sequence[Path]) -> str:
    """A digest of the code in `paths` that comments, docstrings and layout do not change."""
    digest = hashlib.sha256()
    with _PARSING:
        for path in paths:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                if isinstance(body, list) and body and _is_docstring(body[0]):
                    body[0] = ast.Pass()
            digest.update(path.name.encode() + ast.dump(tree).encode())
    return digest.hexdigest()


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _key(config: msgspec.Struct, sources: Sequence[str], *parts: str) -> str:
    settings = json.dumps(msgspec.to_builtins(config), sort_keys=True)
    code = source_digest([_ROOT / name for name in sources])
    text = "\n".join((settings, code, *parts))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def target_key(config: TargetConfig) -> str:
    """Changes with the target's configuration or code, or Python's version (whose text is read)."""
    return _key(config, _TARGET_SOURCES, "{}.{}".format(*sys.version_info[:2]))


def drafter_key(target: TargetConfig, drafter: DrafterConfig) -> str:
    """Changes with the target's key, or the drafter's configuration or code."""
    return _key(drafter, _DRAFTER_SOURCES, target_key(target))


def pair_folder(config: TargetConfig, root: Path | None = None) -> Path:
    """Where the pair of this target lies, whether it exists or not."""
    return (root or cache_root()) / f"demo-{config.kind}-{target_key(config)}"


def configs(target: TargetKind, drafter: DrafterKind) -> tuple[TargetConfig, DrafterConfig]:
    """The demo's configurations of the given kinds."""
    return TargetConfig(kind=target), DrafterConfig(kind=drafter)


def target_ready(folder: Path) -> bool:
    """True if the folder holds a finished target."""
    return all(
        (folder / name).is_file()
        for name in ("pair.json", "prompts.jsonl", "target/model.safetensors")
    )


def drafter_ready(folder: Path, target: TargetConfig, drafter: DrafterConfig) -> bool:
    """True if the folder holds the drafter that today's code and configuration would make."""
    try:
        built = json.loads((folder / f"drafter-{drafter.kind}" / "build.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(built.get("key") == drafter_key(target, drafter))


def find(target: TargetConfig, drafter: DrafterConfig, root: Path | None = None) -> Path | None:
    """The folder of a finished pair, or None."""
    folder = pair_folder(target, root)
    if target_ready(folder) and drafter_ready(folder, target, drafter):
        return folder
    return None


def make(target: TargetConfig, drafter: DrafterConfig, root: Path | None = None) -> Path:
    """Find the pair or make what is missing of it; returns its folder.

    Raises PairError where the cache folder cannot be written. An interruption carries a note of
    what is kept: a training that was cut short is begun anew.
    """
    folder = pair_folder(target, root)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not target_ready(folder):
                _make_target(folder, target)
            if not drafter_ready(folder, target, drafter):
                _make_drafter(folder, target, drafter)
    except KeyboardInterrupt as stopped:
        stopped.add_note(_kept(folder, target, drafter))
        raise
    except OSError as error:
        raise PairError(
            f"{folder.parent}: {error.strerror or error}; free space there or set XDG_CACHE_HOME"
        ) from error
    return folder


def _kept(folder: Path, target: TargetConfig, drafter: DrafterConfig) -> str:
    """What an interruption leaves of a pair, and what the same command does next."""
    if not target_ready(folder):
        return (
            "the demo's target was not finished and nothing of it is kept; the same command makes "
            "it from the beginning"
        )
    if not drafter_ready(folder, target, drafter):
        return (
            "the demo's target is kept, its drafter was not finished and is not; the same command "
            "makes the drafter from the beginning"
        )
    return "the demo pair is kept, whole"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the pair's lock; the kernel frees it when the process ends, however it ends."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        waited = 0.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waited % 10 == 0:
                    note(f"another process is making {folder.name}; waiting ({waited:.0f} s)")
                time.sleep(0.5)
                waited += 0.5
        _clear_leftovers(folder)
        yield


def _clear_leftovers(folder: Path) -> None:
    for left in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _built_beside(folder: Path, place: Path) -> Iterator[Path]:
    """A fresh folder next to `folder` that becomes `place` if the block ends well."""
    partial = folder.with_name(f".{folder.name}.{place.name}.partial")
    partial.mkdir()
    try:
        yield partial
        if place.exists():
            shutil.rmtree(place)
        os.rename(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_target(folder: Path, config: TargetConfig) -> None:
    from training.demo.build import build_target

    with _built_beside(folder, folder) as partial:
        record = build_target(config, partial)
        write_json(partial / "pair.json", {"target_key": target_key(config), "target": record})


def _make_drafter(folder: Path, target: TargetConfig, drafter: DrafterConfig) -> None:
    from training.demo.build import build_drafter

    place = folder / f"drafter-{drafter.kind}"
    with _built_beside(folder, place) as partial:
        record = build_drafter(target, drafter, folder, partial)
        record["key"] = drafter_key(target, drafter)
        write_json(partial / "build.json", record)
    summary = json.loads((folder / "pair.json").read_text())
    summary.setdefault("drafters", {})[drafter.kind] = record
    write_json(folder / "pair.json", summary)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
