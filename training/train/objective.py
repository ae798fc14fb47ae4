"""The loss of a row as the plan wants it, as sums that add up over rows and processes."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from training.counts import FIELDS, StepCounts
from training.plan import TrainSection
from training.trainer import (
    Captured,
    TargetHead,
    TrainSettings,
    autocast,
    drafter_loss,
    target_head,
)


class RowLoss(msgspec.Struct, frozen=True, kw_only=True):
    """`total`: the losses of a row's slots, each weighted by its TTT step, summed."""

    total: Tensor
    counts: StepCounts


class Objective:
    """Losses and counts of rows of states, in float32 or under bfloat16's autocast."""

    def __init__(self, section: TrainSection, lm_head: Tensor, device: torch.device) -> None:
        self.device, self.steps = device, section.ttt_steps
        with autocast(device, section.precision):
            self.low = torch.is_autocast_enabled(device.type)
        self.dtype = torch.bfloat16 if self.low else torch.float32
        self.lm_head = lm_head.to(device, self.dtype)
        self._head: tuple[Tensor | None, TargetHead] | None = None
        decay = [section.step_decay**step for step in range(self.steps)]
        self.step_weights = [weight / sum(decay) for weight in decay]
        self.decay = section.step_decay
        self._ones = torch.ones(self.steps, dtype=torch.int64, device=device)
        self.settings = TrainSettings(
            steps=1,
            ttt_steps=self.steps,
            step_decay=section.step_decay,
            loss=section.loss,
            tokens=section.tokens,
            noise=section.noise,
            gradient_checkpointing=section.gradient_checkpointing,
            precision="bfloat16" if self.low else "float32",
        )
        self._quiet = msgspec.structs.replace(self.settings, noise=0.0)

    def precision(self) -> torch.autocast:
        """The context of a forward pass that is not a loss."""
        return autocast(self.device, self.settings.precision)

    def head(self, drafter: Eagle3Drafter) -> TargetHead:
        """The target's head for the drafter's vocabulary, made once."""
        if self._head is None or self._head[0] is not drafter.t2d:
            self._head = drafter.t2d, target_head(drafter, self.lm_head)
        return self._head[1]

    def loss(
        self, drafter: Eagle3Drafter, captured: Captured, seed: tuple[int, ...] | None = None
    ) -> RowLoss:
        """A row's loss and counts. `seed`: of the noise, a function of the row's place; None: none.

        What is drawn again after a resume is the same.
        """
        generator = None
        if seed is not None and self.settings.noise:
            generator = torch.Generator(self.device).manual_seed(hash(seed) & (2**63 - 1))
        result = drafter_loss(
            drafter,
            captured,
            self.head(drafter),
            self.settings if seed is not None else self._quiet,
            generator=generator,
            denominators=self._ones,
        )
        return RowLoss(total=result.loss, counts=result.counts)

    def weight(self, counts: StepCounts) -> float:
        """The slots of all TTT steps by their steps' weights: what sums are divided by."""
        slots = counts.get("slots")
        return sum(w * n for w, n in zip(self.step_weights, slots, strict=True))

    def no_counts(self) -> StepCounts:
        """Counts of nothing, to add to."""
        return StepCounts(table=torch.zeros(len(FIELDS), self.steps, dtype=torch.float64))

    def counts_of(self, values: list[float]) -> StepCounts:
        """Counts from their table's numbers, row after row."""
        table = torch.tensor(values, dtype=torch.float64)
        return StepCounts(table=table.view(len(FIELDS), self.steps))
