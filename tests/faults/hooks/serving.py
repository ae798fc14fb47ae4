"""Makes the reference engine verify, count or compute its target otherwise than it should."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from engines.reference import engine as engine_module
from engines.reference.sampling import pick

if TYPE_CHECKING:
    from engines.reference.engine import Engine
    from engines.reference.request import Request

Verified = tuple[Tensor, Tensor]


def refuse(engine: Engine, *, share: float = 1.0, seed: int = 0) -> None:
    """Right drafts are refused from the second of a step on, in a `share` of the steps.

    The answers stay the target's own: what is refused is drawn by the target again. The module's
    function is replaced, for every engine of this process.
    """
    whole, coins = engine_module.verify_greedy, random.Random(seed)

    def verify_greedy(logits: Tensor, drafts: Tensor) -> Verified:
        tokens, accepted = whole(logits, drafts)
        wrong = torch.tensor([coins.random() < share for _ in range(len(accepted))])
        return tokens, torch.where(wrong, accepted.clamp_max(1), accepted)

    engine_module.verify_greedy = verify_greedy


def verify_strictly(engine: Engine, *, share: float = 1.0, seed: int = 0) -> None:
    """Sampled: a draft is kept only where it is the very token the target draws.

    Lossless, and less is accepted than by min(1, p / q). The module's function is replaced.
    """
    whole, coins = engine_module.verify_sampled, random.Random(seed)

    def verify_sampled(target: Tensor, draft: Tensor, drafts: Tensor, uniform: Tensor) -> Verified:
        tokens, accepted = whole(target, draft, drafts, uniform)
        drawn = pick(target, uniform)  # [n, k + 1]
        kept = (drawn[:, :-1] == drafts).cumprod(1).sum(1)
        wrong = torch.tensor([coins.random() < share for _ in range(len(accepted))])
        return (
            torch.where(wrong[:, None], drawn, tokens),
            torch.where(wrong, kept, accepted),
        )

    engine_module.verify_sampled = verify_sampled


class _Halved(list[int]):
    def append(self, accepted: int) -> None:
        super().append(accepted // 2)


def miscount(engine: Engine) -> None:
    """Counters and requests tell half of what was accepted; the answers are right."""
    observe, deliver = engine.metrics.observe_verify, engine._deliver
    metrics: Any = engine.metrics
    served: Any = engine

    def observe_verify(k: int, accepted: int, past_end: int) -> None:
        observe(k, accepted // 2, min(past_end, accepted // 2))

    def told(requests: list[Request], produced: list[list[int]], raw: Tensor) -> None:
        for request in requests:
            if request.drafts is not None and not isinstance(request.drafts.accepted, _Halved):
                request.drafts.accepted = _Halved(request.drafts.accepted)
        deliver(requests, produced, raw)

    metrics.observe_verify, served._deliver = observe_verify, told


def compute_otherwise(engine: Engine, *, theta: float | None = None, noise: float = 0.0) -> None:
    """The target with another rope base, or with noise of a share of each matrix' size."""
    model: Any = engine.model
    if theta is not None:
        model.config = msgspec.structs.replace(model.config, rope_theta=theta)
        model.prepare_rope(engine.max_len + engine.k + 1)
    if noise:
        generator = torch.Generator().manual_seed(0)
        for layer in model.layers:
            matrix = layer.attention.out
            size = matrix.weight.square().mean().sqrt() * noise
            shift = torch.randn(matrix.weight.shape, generator=generator)
            matrix.weight = matrix.weight + shift.to(matrix.weight.dtype) * size
