"""What a run's records hold of the command line and of the plans: all of it but the secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import UsageError
from harness.plan.load import parse_set, put
from harness.plan.secret import hidden


def recorded_set(item: str) -> str:
    """A `--set key=value`, the secrets in it hidden; it can be read as the same key again."""
    try:
        key, value = parse_set(item)
    except UsageError:
        return item  # of a key that no plan has: nothing was run with it
    table: dict[str, Any] = {}
    put(table, key, value)
    told: Any = hidden(table)
    for part in key.split("."):
        told = told[part]
    if told == value:
        return item
    return f"{key}={told if isinstance(told, str) else _toml(told)}"


def _toml(value: Any) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, Mapping):
        inner = (f"{_toml(key)} = {_toml(entry)}" for key, entry in value.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def recorded_command(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line, the secrets in its `--set` options hidden."""
    found: list[str] = []
    for word in words:
        if found and found[-1] == "--set":
            found.append(recorded_set(word))
        elif word.startswith("--set="):
            found.append("--set=" + recorded_set(word.removeprefix("--set=")))
        else:
            found.append(word)
    return tuple(found)


def recorded_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """A request's table, the secrets in its `sets` and its `command` hidden."""
    return {
        **request,
        "sets": list(map(recorded_set, request.get("sets", ()))),
        "command": list(recorded_command(request.get("command", ()))),
    }


def recorded_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest holds as `plan`: the request and each engine's plan without their secrets.

    One that was written before secrets were hidden becomes what would be written now.
    """
    told = dict(plan)
    if isinstance(request := plan.get("request"), Mapping):
        told["request"] = recorded_request(request)
    if isinstance(engines := plan.get("engines"), Mapping):
        told["engines"] = {name: hidden(of_engine) for name, of_engine in engines.items()}
    return told
