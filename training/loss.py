"""The drafter's loss: soft cross entropy towards the target's own distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter


def target_logits(last_normed: Tensor, lm_head: Tensor) -> Tensor:
    """The target's logits [..., V] from its last state AFTER the final norm, [..., H].

    Applying the norm twice, or never, raises no error and ruins the targets: `proof_share` of
    `training.evaluate` tells.
    """
    return last_normed @ lm_head.T


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


def soft_cross_entropy(draft_logits: Tensor, wanted_logits: Tensor) -> Tensor:
    """Mean over [N] of -sum p log q; both [N, D], p the softmax of `wanted_logits`."""
    wanted = wanted_logits.detach().softmax(-1)
    return -(wanted * draft_logits.log_softmax(-1)).sum(-1).mean()
