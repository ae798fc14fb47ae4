"""The part of a page that tells how to run it again."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from harness.plan.recorded import recorded_command, recorded_plan
from harness.records import LaunchRecord, Manifest
from harness.report import words


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Everything needed to run it again."""

    command: str
    facts: list[tuple[str, str]]
    engines: list[tuple[str, str]]
    plan: str
    environment: list[tuple[str, str]]
    versions: list[tuple[str, str]]


def repeat_of(manifest: Manifest, launches: tuple[LaunchRecord, ...]) -> Repeat:
    """What the page tells of a run's manifest and its starts."""
    dirty = {True: ", with uncommitted changes", False: "", None: ""}[manifest.git_dirty]
    return Repeat(
        command=words.one_line(shlex.join(recorded_command(manifest.command)), 4000),
        facts=[
            ("run", words.one_line(manifest.run_id)),
            ("made", words.one_line(manifest.created)),
            ("commit", f"{manifest.git_commit}{dirty}" if manifest.git_commit else words.DASH),
            ("schema", manifest.schema_version),
            ("cells, in order", words.count(len(manifest.cells))),
        ],
        engines=_engine_commands(launches),
        plan=json.dumps(recorded_plan(manifest.plan), indent=2, ensure_ascii=False, default=str),
        environment=flat(manifest.environment),
        versions=flat(manifest.versions),
    )


def _engine_commands(launches: tuple[LaunchRecord, ...]) -> list[tuple[str, str]]:
    """Each engine's and variant's first command; an attached server has none."""
    found: dict[str, str] = {}
    for launch in launches:
        if launch.argv:
            name = words.one_line(f"{launch.engine}, {launch.variant}", 80)
            found.setdefault(name, words.one_line(shlex.join(launch.argv), 4000))
    return list(found.items())


def flat(tree: Any, path: str = "") -> list[tuple[str, str]]:
    """A nested mapping as dotted names and plain values."""
    if isinstance(tree, dict):
        return [pair for key, value in tree.items() for pair in flat(value, _join(path, key))]
    if isinstance(tree, list | tuple) and any(isinstance(item, dict | list) for item in tree):
        return [pair for i, v in enumerate(tree) for pair in flat(v, _join(path, str(i)))]
    if isinstance(tree, list | tuple):
        tree = ", ".join(map(str, tree))
    name = words.one_line(path, 200)
    return [(name, words.DASH if tree is None or tree == "" else words.one_line(str(tree), 2000))]


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
