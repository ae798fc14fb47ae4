"""The secrets of a plan: where they stand, and what is written down in their place.

A record of a plan has `HIDDEN` for each; a plan that is read with `HIDDEN` in it, as `resume` reads
it, takes the value out of the environment. The variable is the one of the same name; `API_KEY` for
`--api-key`, `HEADER_AUTHORIZATION` for the header Authorization, `PROXY_PASSWORD` for the proxy's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from engines.secret import (
    HIDDEN,
    Swap,
    hide,
    in_args,
    in_command,
    in_variables,
    is_secret,
    variable_of,
)
from harness.errors import UsageError
from harness.plan.schema import Plan, as_dict
from harness.plan.strict import to_plan

_HEADER = re.compile(r"auth|cookie|credential|key|passw|secret|session|signature|token", re.I)
"""In a header's name: nearly everything that says who asks."""
_SCHEME = re.compile(r"(?:basic|bearer|digest|negotiate|token)\s+", re.I)
_PROXY = re.compile(r"((?:\w+://)?[^:/@]+:)(.+)(@[^@]*)")
Table = dict[str, Any]


def swapped(plan: Mapping[str, Any], swap: Swap) -> Table:
    """A plan's table, or a part of it, with each secret swapped. Whatever is no table stays."""
    changed = dict(plan)
    for section, change in (("engine", _engine), ("client", _client)):
        if isinstance(plan.get(section), Mapping):
            changed[section] = change(plan[section], swap)
    return changed


def _engine(engine: Mapping[str, Any], swap: Swap) -> Table:
    changed = dict(engine)
    if isinstance(variables := engine.get("extra_env"), Mapping):
        changed["extra_env"] = in_variables(variables, swap)
    for key in ("env", "flags"):
        if isinstance(told := engine.get(key), Mapping):
            changed[key] = {name: _flag(name, flag, swap) for name, flag in told.items()}
    for key, change in (("extra_args", in_args), ("command_prefix", in_command)):
        if isinstance(words := engine.get(key), list | tuple) and all(
            isinstance(word, str) for word in words
        ):
            changed[key] = type(words)(change(words, swap))
    return changed


def _flag(name: str, flag: Any, swap: Swap) -> Any:
    value = flag.get("value") if isinstance(flag, Mapping) else None
    if value is None or isinstance(value, bool) or value == "" or not is_secret(name):
        return flag
    said = str(value)
    told = swap(variable_of(name) if name.startswith("-") else name, said)
    return {**flag, "value": value if told == said else told}


def _client(client: Mapping[str, Any], swap: Swap) -> Table:
    changed = dict(client)
    if isinstance(headers := client.get("headers"), Mapping):
        changed["headers"] = {
            name: swap(header_variable(name), value) if _identifies(name, value) else value
            for name, value in headers.items()
        }
    if isinstance(proxy := client.get("proxy"), str) and (parts := _PROXY.fullmatch(proxy)):
        changed["proxy"] = f"{parts[1]}{swap('PROXY_PASSWORD', parts[2])}{parts[3]}"
    return changed


def _identifies(name: str, value: Any) -> bool:
    if not isinstance(value, str) or not value:
        return False
    return bool(_HEADER.search(name) or _SCHEME.match(value) or value == HIDDEN)


def header_variable(name: str) -> str:
    """The variable that a hidden header's whole value is taken from."""
    return f"HEADER_{variable_of(name)}"


def hidden(plan: Mapping[str, Any]) -> Table:
    """A plan's table as records hold it. What is hidden already stays so."""
    return swapped(plan, hide)


def filled(plan: Plan) -> Plan:
    """The plan, with each value that a record left out taken from the environment.

    Raises `UsageError` naming every variable that is wanted and not there, and where one holds
    what the key cannot.
    """
    missing: list[str] = []
    asked: list[str] = []

    def fill(name: str, value: str) -> str:
        if value != HIDDEN:
            return value
        asked.append(name)
        found = os.environ.get(name, "")
        if not found:
            missing.append(name)
        return found

    table = swapped(as_dict(plan), fill)
    if missing:
        names = " ".join(f"{name}=…" for name in dict.fromkeys(missing))
        raise UsageError(
            f"a run's record leaves keys and passwords out; give them again: `export {names}`, "
            "then the same command"
        )
    return to_plan(table, "the environment") if asked else plan


def secrets_of(plan: Plan) -> list[str]:
    """The values of a plan's secrets; of a header without the word that its scheme begins with."""
    found: list[str] = []

    def collect(name: str, value: str) -> str:
        found.extend((value, _SCHEME.sub("", value, count=1)))
        return value

    swapped(as_dict(plan), collect)
    return list(dict.fromkeys(found))
