"""The drafter's loss: towards the target's own distribution over the draft vocabulary.

The target's logits are computed once for each position that some TTT step is trained towards, a
few positions at a time, and used by all the steps at once. Head and loss are one operation that
takes its gradient as it goes, so that no logits are kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from training.unroll import CHUNK, Drafting, product_dtype

_HALVES = (torch.bfloat16, torch.float16)
_ROWS = 1024  # states that share one pass over the target's whole head

LossKind = Literal["soft_cross_entropy", "kl", "hard"]


def target_logits(last_normed: Tensor, lm_head: Tensor) -> Tensor:
    """The target's logits [..., V] from its last state AFTER the final norm, [..., H].

    Applying the norm twice, or never, raises no error and ruins the targets: `proof_share` of
    `training.evaluate` tells.
    """
    return last_normed.to(lm_head.dtype) @ lm_head.T


@torch.no_grad()
def target_choice(last_normed: Tensor, lm_head: Tensor) -> Tensor:
    """The argmax [N] of the target's logits over its whole vocabulary, for states [N, H].

    Under autocast states and head are rounded to its dtype first, the logits never. The head is
    taken in blocks of its rows, so that many states share each reading of it.
    """
    dtype = product_dtype(last_normed)
    with torch.autocast(last_normed.device.type, enabled=False):
        parts = last_normed.split(_ROWS)
        return torch.cat([_choice(part, lm_head, dtype) for part in parts])


def _choice(states: Tensor, lm_head: Tensor, dtype: torch.dtype) -> Tensor:
    best: Tensor | None = None
    choice: Tensor | None = None
    size = max(CHUNK // max(states.shape[0], 1), 1)
    for begin in range(0, lm_head.shape[0], size):
        top, at = _unrounded(states, lm_head[begin : begin + size], dtype).max(-1)
        if best is None or choice is None:
            best, choice = top, at
        else:
            above = top > best  # of equals the first stays, as in an argmax over all
            best, choice = torch.where(above, top, best), torch.where(above, at + begin, choice)
    assert choice is not None, "a head without rows"
    return choice


def within_draft_vocabulary(drafter: Eagle3Drafter, target_ids: Tensor) -> Tensor:
    """True where a target token [...] can be drafted at all."""
    if drafter.t2d is None:
        return torch.ones_like(target_ids, dtype=torch.bool)
    return drafter.t2d[target_ids]


def restrict(drafter: Eagle3Drafter, logits: Tensor) -> Tensor:
    """Target logits [..., V] -> those of the draft vocabulary [..., D], in the draft's order."""
    if drafter.t2d is None:
        return logits
    return logits[..., drafter.t2d]


class TargetHead(msgspec.Struct, frozen=True, kw_only=True):
    """The target's head as losses use it, made once for a whole run: see `target_head`.

    `whole` [V, H]; `drafted` [D, H]: its rows of the draft vocabulary.
    """

    whole: Tensor
    drafted: Tensor


def target_head(drafter: Eagle3Drafter, lm_head: Tensor) -> TargetHead:
    """`lm_head` [V, H] and what the drafter's vocabulary leaves of it.

    On a CPU the rows left are float32, as its products take them: half the memory would be cast
    anew for every few positions.
    """
    rows = lm_head if drafter.t2d is None else lm_head[drafter.t2d]
    return TargetHead(whole=lm_head, drafted=rows.float() if rows.device.type == "cpu" else rows)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the target says at the P positions of a `Drafting`.

    `states` [P, H]: its last normed states; `choice` [P]: its argmax over the whole vocabulary,
    None where that is the draft vocabulary, whose logits are computed anyway; `inside` [P]:
    whether it can be drafted; `head` [D, H]: its head's rows of the draft vocabulary.
    """

    states: Tensor
    choice: Tensor | None
    inside: Tensor
    head: Tensor


class HeadLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The weighted loss; each step's sum of losses [J]; where the choice was drafted [J, P]."""

    loss: Tensor
    sums: Tensor
    right: Tensor


def head_loss(
    drafter: Eagle3Drafter,
    normed: Tensor,
    plan: Drafting,
    wanted: Wanted,
    *,
    kind: LossKind,
    weights: Tensor,
) -> HeadLoss:
    """The losses of all TTT steps from their states `normed` [J, M, H].

    A loss of step j counts `weights[j]` in the sum; one whose target cannot be drafted counts
    nothing.
    """
    job = _Job(
        drafter=drafter,
        plan=plan,
        wanted=wanted,
        kind=kind,
        weights=weights,
        dtype=product_dtype(normed),
    )
    needs_grad = torch.is_grad_enabled()
    loss, sums, right = _HeadLoss.apply(job, needs_grad, normed, drafter.lm_head.weight)
    return HeadLoss(loss=loss, sums=sums, right=right)


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    drafter: Eagle3Drafter
    plan: Drafting
    wanted: Wanted
    kind: LossKind
    weights: Tensor
    dtype: torch.dtype  # of the products


class _Aim(msgspec.Struct, frozen=True):
    """The target's side of some positions [C]; `p` [C, D] sums to one in each row."""

    p: Tensor
    entropy: Tensor | float  # taken off the cross entropy: KL only
    choice: Tensor


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, job: _Job, needs_grad: bool, normed: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(normed.device.type, enabled=False):
            grads = _Grads(normed, weight, wanted=needs_grad)
            sums, right = _all_losses(job, normed, weight.to(job.dtype), grads)
        ctx.mark_non_differentiable(sums, right)
        if grads.states is not None:
            grads.states = grads.states[:, :-1]
        ctx.grads = grads
        return (sums * job.weights).sum(), sums, right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, scale = ctx.grads, grads[0]
        states = None if found.states is None else found.states * scale
        weight = None if found.weight is None else found.weight * scale
        return None, None, states, weight


class _Grads:
    """Where gradients are collected: of the states [J, M + 1, H] (a row to spare), the head."""

    def __init__(self, normed: Tensor, weight: Tensor, *, wanted: bool) -> None:
        steps, rows, size = normed.shape
        self.states = self.weight = None
        if wanted and normed.requires_grad:
            self.states = normed.new_zeros(steps, rows + 1, size)
        if wanted and weight.requires_grad:
            self.weight = torch.zeros_like(weight)


def _all_losses(job: _Job, normed: Tensor, head: Tensor, grads: _Grads) -> tuple[Tensor, Tensor]:
    """Each step's sum of losses [J] and what was drafted right [J, P]; fills `grads`."""
    plan = job.plan
    steps, positions = plan.rows.shape
    sums = torch.zeros(steps, device=normed.device)
    right = torch.zeros_like(plan.valid)
    size = max(CHUNK // (steps * head.shape[0]), 1)
    for begin in range(0, positions, size):
        part = slice(begin, begin + size)
        aim = _aim(job, part)
        rows = plan.rows[:, part]  # [J, C]
        step = torch.arange(steps, device=rows.device).unsqueeze(1)
        states = normed[step, rows.clamp_max(normed.shape[1] - 1)].to(head.dtype)  # [J, C, H]
        logits = _product(states.flatten(0, 1), head).unflatten(0, rows.shape)  # [J, C, D]
        best, tokens = logits.max(-1)
        counted = plan.valid[:, part] & job.wanted.inside[part]
        cross = torch.einsum("cd,jcd->jc", aim.p, logits)
        q = torch.softmax(logits, -1)
        total = best - q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()  # log-sum-exp
        sums += torch.where(counted, total - cross - aim.entropy, 0.0).sum(1)
        drafted = job.drafter.to_target(tokens)
        right[:, part] = (drafted == aim.choice) & plan.valid[:, part]
        if grads.states is None and grads.weight is None:
            continue
        slope = q.sub_(aim.p).to(head.dtype).flatten(0, 1)  # [J * C, D]
        scale = (counted * job.weights.unsqueeze(1)).unsqueeze(-1)  # [J, C, 1]
        if grads.states is not None:
            grads.states[step, rows] = ((slope @ head).unflatten(0, rows.shape) * scale).to(
                grads.states.dtype
            )
        if grads.weight is not None:
            grads.weight += slope.T @ (states * scale).to(slope.dtype).flatten(0, 1)
    return sums, right


def _aim(job: _Job, part: slice) -> _Aim:
    wanted, choice, t2d = job.wanted, job.wanted.choice, job.drafter.t2d
    known = None if choice is None else choice[part]
    if known is not None and job.kind == "hard":
        # a choice outside has no draft id: any will do, its loss is not counted
        labels = known if t2d is None else (t2d.cumsum(0) - 1).clamp_min(0)[known]
        return _Aim(_one_hot(labels, wanted.head), 0.0, known)
    head = wanted.head
    logits = _unrounded(wanted.states[part], head, job.dtype)
    known = logits.argmax(-1) if known is None else known
    if job.kind == "hard":
        return _Aim(_one_hot(known, head), 0.0, known)
    p = logits.softmax(-1)
    entropy: Tensor | float = 0.0
    if job.kind == "kl":
        entropy = logits.logsumexp(-1) - (p * logits).sum(-1)
    return _Aim(p, entropy, known)


def _one_hot(labels: Tensor, head: Tensor) -> Tensor:
    p = torch.zeros(labels.shape[0], head.shape[0], device=labels.device)
    return p.scatter_(1, labels.unsqueeze(1), 1.0)


def _product(x: Tensor, head: Tensor) -> Tensor:
    """x [N, H] times head [D, H], both in one dtype; float32 at least."""
    if x.is_cuda and x.dtype in _HALVES:
        return torch.mm(x, head.T, out_dtype=torch.float32)
    logits = x @ head.T
    return logits.float() if logits.dtype in _HALVES else logits


def _unrounded(x: Tensor, head: Tensor, dtype: torch.dtype) -> Tensor:
    """x [N, H] times head [D, H]: factors rounded to `dtype`, the product to float32 alone.

    Logits that are rounded tie, and an argmax then takes the first of them.
    """
    if dtype not in _HALVES:
        return target_logits(x, head)
    if x.is_cuda:
        return _product(x.to(dtype), head.to(dtype))
    with _rounded_factors():
        return x.float() @ head.float().T


@contextmanager
def _rounded_factors() -> Iterator[None]:
    """Let a CPU take float32 products of factors rounded to bfloat16, where it can."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
