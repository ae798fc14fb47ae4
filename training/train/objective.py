"""The loss of a row as the plan wants it, and the arithmetic it is computed in."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.eagle3 import Eagle3Drafter
from harness.errors import UsageError
from training.plan import TrainSection
from training.precision import has_tiles
from training.train.feed import LoadedRow
from training.trainer import Captured, TrainSettings, drafter_loss


class Objective:
    """Loss and accuracies of a row of states, in float32 or under bfloat16's autocast."""

    def __init__(self, section: TrainSection, lm_head: Tensor, device: torch.device) -> None:
        self.low = _low(section, device)
        self.device = device
        self.dtype = torch.bfloat16 if self.low else torch.float32
        self.lm_head = lm_head.to(device, self.dtype)
        self.settings = _settings(section)

    def precision(self) -> AbstractContextManager[None]:
        """The context of every forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.low)

    def loss(self, drafter: Eagle3Drafter, captured: Captured) -> tuple[Tensor, list[float]]:
        """The mean loss of the row's slots, and the accuracy by TTT step."""
        with self.precision():
            result = drafter_loss(drafter, captured, self.lm_head, self.settings)
        return result.loss, [float(a) for a in result.accuracy]


def _low(section: TrainSection, device: torch.device) -> bool:
    if section.precision == "auto":
        return device.type == "cuda" or has_tiles()
    return section.precision == "bfloat16"


def _settings(section: TrainSection) -> TrainSettings:
    known = set(TrainSettings.__struct_fields__)
    fields: dict[str, Any] = {
        "steps": 1,
        "ttt_steps": section.ttt_steps,
        "step_decay": section.step_decay,
    }
    for name, usual in (("loss", "soft_cross_entropy"), ("tokens", "teacher")):
        value = getattr(section, name)
        if name in known:
            fields[name] = value
        elif value != usual:
            raise UsageError(f"train.{name} {value}: the trainer only knows {usual}")
    return TrainSettings(**fields)


def checkpoint_layers(drafter: Eagle3Drafter) -> None:
    """Compute the layer's inner tensors again in the backward pass, instead of keeping them."""
    for part in (drafter.layer.self_attn, drafter.layer.mlp):
        inner = part.forward
        part.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, inner, use_reentrant=False
        )


def drafted_tokens(row: LoadedRow, ttt_steps: int) -> int:
    """Slots that carry loss in the last TTT step; 0: the row has no full unroll to learn from."""
    return sum(max(0, e - max(first, b + 1 + ttt_steps)) for b, first, e in row.places)
