"""What a batch's TTT steps came to, as counts that add up over micro-batches and ranks."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from training.loss import HeadLoss
from training.unroll import Drafting

FIELDS = ("loss_sum", "slots", "outside", "judged", "right", "runs", "reached", "run_right")


class StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts per TTT step, a row for each of `FIELDS`: `table` float64 [8, J], to be summed.

    loss_sum: the losses' sum; slots: how many carried loss; outside: how many did not because the
    target's choice cannot be drafted; judged: both together; right: of those, where the choice was
    drafted. runs: slots that are judged in this step and all before; reached: of those, where
    every step before was right; run_right: where this one was right too.
    """

    table: Tensor

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(table=self.table + other.table)

    def get(self, field: str) -> list[float]:
        """One row of the table."""
        values: list[float] = self.table[FIELDS.index(field)].tolist()
        return values

    @property
    def losses(self) -> list[float | None]:
        """Mean loss of each step; None without a slot."""
        return self._shares("loss_sum", "slots")

    @property
    def accuracy(self) -> list[float | None]:
        """Each step's share of right tokens, whatever the steps before did."""
        return self._shares("right", "judged")

    @property
    def marginal(self) -> list[float | None]:
        """The share of slots where this step and all before were right."""
        return self._shares("run_right", "runs")

    @property
    def conditional(self) -> list[float | None]:
        """The share of right tokens where all steps before were right."""
        return self._shares("run_right", "reached")

    def loss(self, step_decay: float) -> float | None:
        """The weighted mean of the steps' mean losses; None where a step has no slot."""
        losses = [loss for loss in self.losses if loss is not None]
        weights = [step_decay**i for i in range(len(losses))]
        if len(losses) < self.table.shape[1]:
            return None
        return sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)

    def _shares(self, part: str, whole: str) -> list[float | None]:
        pairs = zip(self.get(part), self.get(whole), strict=True)
        return [a / b if b else None for a, b in pairs]


def count(plan: Drafting, inside: Tensor, result: HeadLoss) -> StepCounts:
    """The counts of one batch: `inside` [P] as in `Wanted`."""
    rows = plan.slots.numel() + 1  # a row to spare for what is not valid
    shape = (plan.rows.shape[0], rows)
    valid = torch.zeros(shape, dtype=torch.bool, device=inside.device)
    right = torch.zeros_like(valid)
    valid.scatter_(1, plan.rows, plan.valid)
    right.scatter_(1, plan.rows, result.right)
    runs = valid[:, :-1].cumprod(0).bool()  # [J, M]
    unbroken = right[:, :-1].cumprod(0).bool()
    before = torch.cat((torch.ones_like(unbroken[:1]), unbroken[:-1]))
    table = (
        result.sums,
        (plan.valid & inside).sum(1),
        (plan.valid & ~inside).sum(1),
        plan.valid.sum(1),
        result.right.sum(1),
        runs.sum(1),
        (runs & before).sum(1),
        (runs & unbroken).sum(1),
    )
    return StepCounts(table=torch.stack([row.double() for row in table]))
