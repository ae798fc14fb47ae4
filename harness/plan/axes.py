"""What is swept: the values of `--over`, the settings they make, and the order of the starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import msgspec

from harness.errors import UsageError
from harness.plan.load import parse_set
from harness.records import Axis, Setting, Variant

CHOICE = ("speculative.", "drafter.")
"""Keys that leave the baseline as it is."""
POINTS = ("load.concurrency", "load.request_rate")
"""Keys whose values are load points of one start, not settings."""
MOST_SETTINGS = 100
NOT_SWEPT = {
    "compare.": "it says how the sweep itself is measured: give it once, with --set",
    "engine.port": "it is where a server listens: leave it out",
}
"""Keys that make no setting, and why."""


def axes_of(items: Sequence[str]) -> tuple[Axis, ...]:
    """`--over key=value,value…` options, each value checked. Raises `UsageError`."""
    axes: list[Axis] = []
    for item in items:
        key, equals, raw = item.partition("=")
        key = key.strip()
        values = tuple(v for part in split(raw) if (v := part.strip()))
        if not equals or not key or not values:
            raise UsageError(
                f"--over {item}: write it as key=value,value, such as speculative.k=1,3"
            )
        if any(axis.key == key for axis in axes):
            raise UsageError(f"--over {item}: {key} is given twice; give all its values at once")
        for start, why in NOT_SWEPT.items():
            if key.startswith(start):
                raise UsageError(f"--over {item}: {why}")
        axes.append(Axis(key=key, values=_different(key, values)))
    if not axes:
        raise UsageError("sweep: say what to sweep, such as --over speculative.k=1,2,3,5")
    return tuple(axes)


def _different(key: str, values: Sequence[str]) -> tuple[str, ...]:
    """The values, those that say the same (`2`, `2.0`) once. Raises `UsageError`."""
    found: dict[str, Any] = {}
    for value in values:
        try:
            meant = parse_set(f"{key}={value}")
        except UsageError as error:
            raise UsageError(str(error).replace("--set", "--over", 1)) from None
        if meant not in found.values():
            found[value] = meant
    return tuple(found)


def split(raw: str) -> list[str]:
    """At the commas outside brackets: a value that is a list is written with them."""
    parts, depth = [""], 0
    for letter in raw:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def settings_of(axes: Sequence[Axis]) -> list[Setting]:
    """Every choice of values; load points are no settings. Raises `UsageError`: too many."""
    swept = [axis for axis in axes if axis.key not in POINTS]
    every = list(product(*([(axis.key, v) for v in axis.values] for axis in swept)))
    if len(every) > MOST_SETTINGS:
        raise UsageError(
            f"--over: {len(every)} settings; at most {MOST_SETTINGS} are swept at once"
        )
    found: list[Setting] = []
    for values in every:
        name = ", ".join(f"{key.rpartition('.')[2]}={v}" for key, v in values) or "as planned"
        folder = _slug(name)
        if any(s.run == f"runs/{folder}" for s in found):
            folder = f"{folder}-{len(found) + 1}"
        items = {
            kind: tuple(f"{key}={v}" for key, v in values if kind_of(key) == kind)
            for kind in ("choice", "condition")
        }
        found.append(
            Setting(
                name=name,
                choice=items["choice"],
                condition=items["condition"],
                run=f"runs/{folder}",
                baseline=name,
            )
        )
    return found


def _slug(name: str) -> str:
    words = re.sub(r"[^\w.-]+", "-", name.replace("=", "").replace("_", "-"), flags=re.ASCII)
    return re.sub(r"-{2,}", "-", words)[:60].strip(".-") or "setting"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One start: which setting's, of which variant, in which repeat."""

    setting: str
    variant: Variant
    repeat: int


def steps_of(settings: Sequence[Setting], repeats: int, variants: Sequence[Variant]) -> list[Step]:
    """The order of the starts: in each repeat every baseline once, then its settings.

    Every other repeat runs the other way round, so that drift cancels.
    """
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.baseline, []).append(setting)
    found: list[Step] = []
    for repeat in range(repeats):
        turn = [
            Step(setting=name, variant=variant, repeat=repeat)
            for baseline, members in groups.items()
            for variant in variants
            for name in ([baseline] if variant == "baseline" else [m.name for m in members])
        ]
        found.extend(turn if repeat % 2 == 0 else reversed(turn))
    return found


Kind = Literal["choice", "condition"]


def kind_of(key: str) -> Kind:
    """Whether a key is chosen among, or a condition under which."""
    return "choice" if key.startswith(CHOICE) else "condition"
