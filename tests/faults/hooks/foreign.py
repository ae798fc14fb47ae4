"""Spoils what vLLM and SGLang hand their drafters, inside their own processes.

Needs torch alone: these engines have environments of their own. Both are given to a plugin after
the trace has set its door, so that what is spoiled here is what the trace shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Spoil:
    """Rows [rows, A] of one call of the drafter, of all its requests, spoiled by `kind`."""

    def __init__(self, kind: str, share: float, seed: int, layers: int = 3) -> None:
        self.change: Callable[[Tensor], Tensor] = getattr(self, kind)
        self.share, self.layers = share, layers
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, states: Tensor) -> Tensor:
        coins = torch.rand(len(states), generator=self.generator).to(states.device)
        return torch.where((coins < self.share)[:, None], self.change(states), states)

    def zero(self, states: Tensor) -> Tensor:
        return torch.zeros_like(states)

    def scaled(self, states: Tensor) -> Tensor:
        return states * 8.0

    def moved(self, states: Tensor) -> Tensor:
        """Each row is the one before it in the call."""
        return torch.cat((states[:1], states[:-1]))

    def noisy(self, states: Tensor) -> Tensor:
        """Noise of six tenths of each state's own size."""
        parts = states.unflatten(-1, (self.layers, -1))
        noise = torch.randn(parts.shape, generator=self.generator).to(states)
        size = parts.square().mean(-1, keepdim=True).sqrt()
        return (parts + 0.6 * noise * size).flatten(-2)


def spoil_vllm(runner: Any, *, kind: str, share: float, seed: int) -> None:
    """On vLLM's model runner: the states that its drafter's `propose` is handed."""
    spoil, drafter = Spoil(kind, share, seed), runner.drafter
    inner = drafter.propose

    def propose(*args: Any, **named: Any) -> Any:
        named["target_hidden_states"] = spoil(named["target_hidden_states"])
        return inner(*args, **named)

    drafter.propose = propose


def swap_vllm(runner: Any, *, share: float, seed: int) -> None:
    """On vLLM's model runner: each request of a batch gets the next one's proposals."""
    generator, drafter = torch.Generator().manual_seed(seed), runner.drafter
    inner = drafter.propose

    def propose(*args: Any, **named: Any) -> Any:
        drafts = inner(*args, **named)
        wrong = float(torch.rand(1, generator=generator)) < share
        return drafts.roll(1, 0) if wrong and isinstance(drafts, Tensor) else drafts

    drafter.propose = propose


def spoil_sglang(worker: Any, *, kind: str, share: float, seed: int) -> None:
    """On SGLang's draft worker: the states of both ways that it is handed them."""
    spoil = Spoil(kind, share, seed)
    prefill, decode = worker._draft_extend_for_prefill, worker._draft_extend_for_decode

    def extend_prefill(batch: Any, target_hidden_states: Any, *args: Any, **named: Any) -> Any:
        return prefill(batch, spoil(target_hidden_states), *args, **named)

    def extend_decode(batch: Any, batch_result: Any, *args: Any, **named: Any) -> Any:
        out = batch_result.logits_output
        out.hidden_states = spoil(out.hidden_states)
        return decode(batch, batch_result, *args, **named)

    worker._draft_extend_for_prefill = extend_prefill
    worker._draft_extend_for_decode = extend_decode
