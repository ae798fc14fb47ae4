"""What a stage's output was begun from, so that nothing made from something else is mixed in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import one_line
from training.files import read_record, write_record
from training.targets import target_digest

BEGUN = "made_from.json"


class MadeFrom(msgspec.Struct, frozen=True, kw_only=True):
    """The plan's sections that the samples depend on, and digests of prompts and target."""

    plan: dict[str, Any]
    prompts: str
    target: dict[str, str | None]

    @property
    def target_digest(self) -> str:
        """One digest for the target."""
        return target_digest(self.target)


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """`starts`: the servers asked, in order. `limits`: the gate's, when it last judged."""

    made: MadeFrom
    starts: tuple[dict[str, Any], ...] = ()
    limits: dict[str, Any] | None = None


def read_begun(folder: Path) -> Begun | None:
    """What the folder was begun from, None where nothing is there. Raises `UsageError`."""
    return read_record(folder / BEGUN, Begun, "give another --out, or remove that folder")


def write_begun(folder: Path, begun: Begun) -> None:
    """Write it whole or not at all."""
    write_record(folder / BEGUN, begun)


def changes(before: MadeFrom, now: MadeFrom) -> list[str]:
    """What differs, in words: `sampling.temperature 0 -> 0.7`; empty where nothing does."""
    # As they are read back: tuples are lists, numbers that are equal are one.
    before, now = (
        msgspec.json.decode(msgspec.json.encode(one), type=MadeFrom) for one in (before, now)
    )
    found = list(differences(before.plan, now.plan))
    if before.prompts != now.prompts and not found:
        found.append("the prompts of workload.dataset are others")
    for part in sorted({*before.target, *now.target}):
        if before.target.get(part) != now.target.get(part):
            found.append(f"the target's {part} changed")
    return found


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """The keys whose values differ, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            name = f"{where}.{key}" if where else str(key)
            yield from differences(before.get(key), now.get(key), name)
    elif before != now:
        yield f"{where} {_word(before)} -> {_word(now)}"


def _word(value: Any) -> str:
    return "none" if value is None else one_line(str(value), 60)
