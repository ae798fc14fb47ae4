"""Training-time test (TTT): a drafter unrolled over many slots at once.

Slot t holds the aux hidden states of token t. In step 0 it takes the embedding of token t + 1 and
predicts token t + 2; in step j it takes the drafter's own state of step j - 1, the embedding of
token t + 1 + j and position t + j, and predicts token t + 2 + j. Its attention in step j sees the
keys of step 0 up to t within its own dialogue, and its own keys of the steps 1 to j: exactly what
an engine's drafter sees after a verify step that ended at t.

No slot sees what another one did after step 0, so that only the slots whose predictions are
wanted go beyond step 0's keys and values. Padding is never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.eagle3 import Eagle3Drafter
from training.attention import Documents, TttAttention, document_lengths
from training.data import Batch

CHUNK = 4_000_000
"""Logits that are held at a time where only their maxima or losses are wanted: 16 MB."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with what the target computed for it.

    `aux` [rows, length, n * H]: the aux hidden states side by side, in the drafter's order;
    `last_normed` [rows, length, H]: the last state after the target's final norm. `choice`
    [rows, length]: the argmax of the target's logits at each slot over its whole vocabulary, where
    it is known already; it spares the training a product with the whole head.
    """

    batch: Batch
    aux: Tensor
    last_normed: Tensor
    choice: Tensor | None = None


class TttStep(msgspec.Struct, frozen=True, kw_only=True):
    """One TTT step over every slot: logits [rows, length, D] and the tokens drafted [rows, length].

    `tokens` are ids of the target's vocabulary. Padding has zeros.
    """

    logits: Tensor
    tokens: Tensor


def shift(x: Tensor, by: int) -> Tensor:
    """x[:, t + by] at t; the last `by` columns repeat the final one and mean nothing."""
    if by == 0:
        return x
    tail = x[:, -1:].expand(-1, min(by, x.shape[1]), *x.shape[2:])
    return torch.cat((x[:, by:], tail), dim=1)


def drafted_slots(batch: Batch, step: int) -> Tensor:
    """True at the slots [rows, length] whose prediction in TTT step `step` carries loss."""
    ahead = 2 + step
    same = shift(batch.documents, ahead) == batch.documents
    real = (batch.documents >= 0) & same & shift(batch.loss_mask, ahead)
    real[:, -ahead:] = False
    return real


class Drafting(msgspec.Struct, frozen=True, kw_only=True):
    """What J TTT steps over a batch predict, flat over [rows * length].

    `slots` [M]: those that draft at all, ascending. `positions` [P]: where the target's states
    lie that some step is trained towards. Step j drafts towards position i from row `rows[j, i]`
    of `slots`, where `valid[j, i]`; elsewhere the row is M.
    """

    slots: Tensor
    positions: Tensor
    rows: Tensor
    valid: Tensor


def drafting(batch: Batch, steps: int) -> Drafting:
    """The slots that draft in `steps` TTT steps, and the positions they are trained towards."""
    drafted = torch.stack([drafted_slots(batch, step).flatten() for step in range(steps)])  # [J, F]
    needed = drafted.any(0)
    towards = torch.zeros_like(needed)
    for step in range(min(steps, needed.numel() - 1)):
        towards[1 + step :] |= drafted[step, : -1 - step]
    if not needed.any():  # one slot without loss, so that every parameter still gets a gradient
        first = (batch.documents.flatten() >= 0).int().argmax()
        needed[first] = towards[first] = True
    slots, positions = needed.nonzero().flatten(), towards.nonzero().flatten()
    back = torch.arange(1, steps + 1, device=positions.device).unsqueeze(1)
    sources = positions - back  # [J, P]
    valid = drafted.gather(1, sources.clamp_min(0)) & (sources >= 0)
    order = needed.cumsum(0) - 1
    rows = torch.where(valid, order[sources.clamp_min(0)], slots.numel())
    return Drafting(slots=slots, positions=positions, rows=rows, valid=valid)


class Unroll:
    """The TTT steps of M slots (`slots`: flat over [rows * length], ascending), one after another.

    Begin with `text(0)`; `step` wants the tokens that each step is fed. `aux` replaces the
    captured aux states (noise). `checkpointing` computes each step again in the backward pass
    instead of keeping what lies between its ends.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        captured: Captured,
        slots: Tensor,
        *,
        aux: Tensor | None = None,
        checkpointing: bool = False,
    ) -> None:
        self.drafter, self.batch, self.slots = drafter, captured.batch, slots
        self.checkpointing = checkpointing and torch.is_grad_enabled()
        real = self.batch.documents.flatten() >= 0
        self.real = real.nonzero().flatten()  # [N]
        at = (real.cumsum(0) - 1)[slots]
        self.all = slots.numel() == self.real.numel()
        documents = Documents(document_lengths(self.batch.documents), slots.device)
        self.attention = TttAttention(documents, at, drafter.scale)
        states = captured.aux if aux is None else aux
        flat = states.flatten(0, 1)
        self.hidden = drafter.fuse(flat if self.real.numel() == flat.shape[0] else flat[self.real])
        self.own: list[tuple[Tensor, Tensor]] = []
        self.done = 0

    def text(self, step: int) -> Tensor:
        """The text's own tokens for `step`: [N] for step 0, then [M]."""
        index = self.slots if step else self.real
        return shift(self.batch.ids, step + 1).flatten()[index]

    def step(self, ids: Tensor) -> Tensor:
        """Run the next step; returns the states for the logits [M, H]."""
        index = self.slots if self.done else self.real
        positions = self.batch.positions.flatten()[index] + self.done
        q, k, v, residual = self._run(self._project, ids, self.hidden, positions)
        k, v = self._cast(k), self._cast(v)
        if self.done == 0:
            self.attention.start(k, v)
            if not self.all:
                q, residual = q[self.attention.at], residual[self.attention.at]
        else:
            self.own.append((k, v))
        own = [x for pair in self.own for x in pair]
        self.hidden, normed = self._run(self._finish, self._cast(q), residual, *own)
        self.done += 1
        return normed

    def _project(self, ids: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return self.drafter.project(self.drafter.embed(ids), hidden, positions)

    def _finish(self, q: Tensor, residual: Tensor, *own: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.attention(q, list(zip(own[0::2], own[1::2], strict=True)))
        return self.drafter.finish(attended, residual)

    def _run(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        if not self.checkpointing:
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _cast(self, x: Tensor) -> Tensor:
        """The dtype of attention: that of the products (rotary tables are float32), except that
        a CPU's flash kernel is no faster in bfloat16, and slower on short documents.
        """
        if x.device.type == "cpu":
            return x.to(torch.promote_types(x.dtype, torch.float32))
        return x.to(product_dtype(x))

    def everywhere(self, x: Tensor) -> Tensor:
        """Rows [M, ...] of the slots -> [rows, length, ...], elsewhere zeros."""
        grid = x.new_zeros(self.batch.ids.numel(), *x.shape[1:])
        grid = grid.index_copy(0, self.slots, x)
        return grid.unflatten(0, self.batch.ids.shape)


def product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products on x's device are computed in, under autocast or not."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@torch.no_grad()
def greedy_tokens(drafter: Eagle3Drafter, normed: Tensor) -> Tensor:
    """The drafter's own choice [M] (ids of the target's vocabulary) for states [M, H]."""
    size = max(CHUNK // drafter.spec.draft_vocab_size, 1)
    best = [drafter.logits(part).argmax(-1) for part in normed.detach().split(size)]
    return drafter.to_target(torch.cat(best))


def unroll(
    drafter: Eagle3Drafter, captured: Captured, steps: int, *, own_tokens: bool
) -> Iterator[TttStep]:
    """Run the TTT steps over all slots at once, with all logits.

    With `own_tokens` each step after the first is fed the token the drafter itself chose, as when
    drafting; else the true one, as in training.
    """
    slots = (captured.batch.documents.flatten() >= 0).nonzero().flatten()
    run = Unroll(drafter, captured, slots)
    ids = run.text(0)
    for step in range(steps):
        logits = drafter.logits(run.step(ids))
        tokens = drafter.to_target(logits.detach().argmax(-1))
        yield TttStep(logits=run.everywhere(logits), tokens=run.everywhere(tokens))
        ids = tokens if own_tokens else run.text(step + 1)
