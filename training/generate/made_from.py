"""What a stage's output was begun from, so that nothing made from something else is mixed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from harness.plan.secret import hidden
from training.files import read_record, write_record
from training.kept import differences
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
    # What was written before all secrets were hidden is taken as it would be now.
    found = list(differences(hidden(before.plan), now.plan))
    if before.prompts != now.prompts and not found:
        found.append("the prompts of workload.dataset are others")
    for part in sorted({*before.target, *now.target}):
        if before.target.get(part) != now.target.get(part):
            found.append(f"the target's {part} changed")
    return found
