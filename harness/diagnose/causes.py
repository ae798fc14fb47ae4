"""The causes of an acceptance collapse that are known, by name; `causes.toml` lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Stage = Literal[
    "checkpoint", "training", "target", "states", "execution", "verification", "counting", "prompts"
]
NONE = "none"
UNKNOWN = "unknown"


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cause: where it lies, what to do about it, and where it was seen.

    `family`: causes that no experiment can tell apart from outside have the same. `seen`: upstream
    threads that tell of it. `fixable`: `--fix` can write the corrected checkpoint or plan.
    `settles`: the experiment that would prove it. `prior`: how often it is met, as a logarithm of
    odds; small, so that it only decides where the evidence for two causes is the same.
    """

    title: str
    stage: Stage
    remedy: str
    family: str | None = None
    seen: tuple[str, ...] = ()
    fixable: bool = False
    settles: str = ""
    prior: float = 0.0


CAUSES: dict[str, Cause] = msgspec.toml.decode(
    Path(__file__).with_name("causes.toml").read_bytes(), type=dict[str, Cause]
)


def kin(cause: str) -> tuple[str, ...]:
    """The other causes that no experiment tells apart from this one from outside."""
    family = CAUSES[cause].family
    return tuple(
        name for name, c in CAUSES.items() if family and c.family == family and name != cause
    )
