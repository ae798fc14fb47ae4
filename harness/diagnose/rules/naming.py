"""From the names that experiments give to readings and states to the causes that they point to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from harness.diagnose import readings
from harness.diagnose.causes import CAUSES
from harness.diagnose.readings import AS_DECLARED, Reading

LAYERS = ("layers_shifted", "layers_default", "layers_order", "layers_other")


def is_declared(reading: str) -> bool:
    """Whether this is the checkpoint's own reading."""
    return reading == AS_DECLARED


def reading_of(name: str) -> Reading | None:
    """The reading of that name; None for one that is not known."""
    try:
        return readings.reading_of(name)
    except (KeyError, ValueError):
        return None


def cause_of_reading(name: str) -> str | None:
    """The cause that a reading stands for; None for the checkpoint's own and for unknown ones."""
    found = reading_of(name)
    return None if found is None or found.cause not in CAUSES else found.cause


StateKind = Literal[
    "hidden", "normed", "branch", "partial", "embedding", "other request", "previous step", "else"
]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What a row of states may be: of which layer, and moved how far along the text."""

    kind: StateKind
    layer: int | None = None
    moved: int = 0


def candidate_of(name: str) -> Candidate:
    """`hidden[3]@-1` and its like, taken apart; what is not understood is of kind `else`."""
    text = name.strip().lower()
    move = re.search(r"@ ?([+-]?\d{1,4})", text)
    moved = int(move[1]) if move else 0
    indexed = re.match(r"(hidden|normed|branch|partial)\[(\d{1,4})\]", text)
    layer = int(indexed[2]) if indexed else None
    for word in ("other request", "previous step"):
        if word in text:
            return Candidate(kind=word, layer=layer, moved=moved)
    if indexed:
        return Candidate(kind=indexed[1], layer=layer, moved=moved)  # type: ignore[arg-type]
    kind: StateKind = "embedding" if text.startswith("embedding") else "else"
    return Candidate(kind=kind, layer=0 if kind == "embedding" else None, moved=moved)


def layers_cause(
    wanted: Sequence[int], got: Sequence[int], *, default: Sequence[int] | None, named: bool
) -> str:
    """How one list of layers came to be another: which of the four causes that is.

    `named`: whether the checkpoint names its layers at all. Where it does not, whatever stands in
    for them is a default; where it does, a list off by one is a count from another end.
    """
    if not named:
        return "layers_default"
    steps = {b - a for a, b in zip(wanted, got, strict=False)}
    if len(steps) == 1 and steps <= {-1, 1}:
        return "layers_shifted"
    if sorted(wanted) == sorted(got):
        return "layers_order"
    if default is not None and tuple(got) == tuple(default):
        return "layers_default"
    return "layers_other"


def default_layers(layers: int) -> tuple[int, int, int]:
    """What engines take where a checkpoint names no layers, of a target with so many."""
    return (2, layers // 2, layers - 3)
