"""A reading of a drafter as a checkpoint of its own: what it was trained for, written down."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from drafters.checkpoint import save
from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterError, DrafterSpec
from harness.diagnose.experiments.altered import alter
from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.readings import AS_DECLARED, Reading, reading_of

if TYPE_CHECKING:
    from torch import Tensor

UNWRITABLE = ("rope without mscale",)
"""Readings that no config can state."""


def write_reading(knowledge: Knowledge, name: str, out: Path) -> tuple[str, ...]:
    """Write the drafter in the reading `name` into the folder `out`; what was changed, in words.

    Raises `DrafterError` where a checkpoint cannot state the reading.
    """
    reading = reading_of(name)
    if name in (AS_DECLARED, *UNWRITABLE) or reading.by not in ("drafter", "states"):
        raise DrafterError(f'no checkpoint can state the reading "{name}"')
    made = made_as(knowledge, reading)
    save(_stored(made), out)
    return tuple(_changes(knowledge.drafter, made))


def made_as(knowledge: Knowledge, reading: Reading) -> Eagle3Drafter:
    """The drafter whose own reading is `reading`. Raises `DrafterError`."""
    if reading.layers is not None:
        made = copy.deepcopy(knowledge.drafter)
        made.owns_embeddings = knowledge.drafter.owns_embeddings
        made.owns_lm_head = knowledge.drafter.owns_lm_head
        made.spec = msgspec.structs.replace(made.spec, aux_layers=reading.layers)
        return ascending(made)
    altered = alter(reading, knowledge)
    if altered is None or reading.by != "drafter":
        raise DrafterError(f'no checkpoint can state the reading "{reading.name}"')
    made = altered.drafter
    made.spec = msgspec.structs.replace(
        made.spec,
        norm_before_fc=made.input_norm is not None,
        fc_norm=made.fc_norm is not None,
    )
    if reading.cause == "embeddings_replaced":
        made.owns_embeddings = False  # engines then share the target's
    if reading.cause == "lm_head_replaced":
        made.owns_lm_head = True  # rows of the draft vocabulary, which no engine chooses by itself
    _retable(made)
    return made


def ascending(made: Eagle3Drafter) -> Eagle3Drafter:
    """The same drafter with its layers in ascending order, as engines capture them.

    What takes their states has its columns in that order too.
    """
    import torch
    from torch import nn

    layers, width = made.spec.aux_layers, made.spec.target_hidden_size
    order = sorted(range(len(layers)), key=lambda i: layers[i])
    if order == list(range(len(layers))):
        return made
    columns = torch.cat([torch.arange(i * width, (i + 1) * width) for i in order])
    made.fc.weight = nn.Parameter(made.fc.weight[:, columns].contiguous(), requires_grad=False)
    if made.input_norm is not None:
        made.input_norm.weight = nn.Parameter(made.input_norm.weight[columns], requires_grad=False)
    if made.fc_norm is not None:
        made.fc_norm = nn.ModuleList([made.fc_norm[i] for i in order])
    made.spec = msgspec.structs.replace(made.spec, aux_layers=tuple(layers[i] for i in order))
    return made


def _retable(made: Eagle3Drafter) -> None:
    """t2d as d2t says, where that names each token once and in order."""
    import torch

    if made.d2t is None or made.t2d is None:
        return
    kept = made.to_target(torch.arange(made.d2t.numel()))
    inside = bool((kept >= 0).all()) and bool((kept < made.spec.vocab_size).all())
    if inside and bool((kept.diff() > 0).all()):
        made.t2d = torch.zeros_like(made.t2d).index_fill(0, kept, True)


def _stored(made: Eagle3Drafter) -> Eagle3Drafter:
    """A copy in the type that the checkpoint was stored in."""
    import torch

    kind = getattr(torch, made.spec.dtype, torch.float32)
    stored = copy.deepcopy(made)
    stored.owns_embeddings, stored.owns_lm_head = made.owns_embeddings, made.owns_lm_head
    return stored.to(kind)


def _changes(before: Eagle3Drafter, after: Eagle3Drafter) -> Iterator[str]:
    yield from spec_changes(before.spec, after.spec)
    if before.owns_embeddings and not after.owns_embeddings:
        yield "embed_tokens.weight is left out: the target's is shared"
    for name, one, other in _tensors(before, after):
        if one is None:
            yield f"{name} is added"
        elif other is None:
            yield f"{name} is left out"
        elif one.shape != other.shape or not one.equal(other):
            yield f"{name} is another"


def spec_changes(before: DrafterSpec, after: DrafterSpec) -> Iterator[str]:
    """Each field that differs, with both values."""
    for name in DrafterSpec.__struct_fields__:
        one, other = getattr(before, name), getattr(after, name)
        if one != other:
            yield f"{name}: {_shown(one)} becomes {_shown(other)}"


def _shown(value: object) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


def _tensors(
    before: Eagle3Drafter, after: Eagle3Drafter
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    ours, theirs = before.state_dict(), after.state_dict()
    names: Sequence[str] = sorted({*ours, *theirs})
    shared = () if after.owns_embeddings else ("embed_tokens.weight",)
    for name in names:
        if name not in shared:
            yield name, ours.get(name), theirs.get(name)
