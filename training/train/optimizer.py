"""The optimizer of a training, its rates by update, and its state by parameter name.

State is kept whole and by name, so that it can be read by another number of processes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import UsageError
from training.adamw import adamw
from training.optim import Muon
from training.plan import TrainSection
from training.train.parallel import Replica, full, like

# Muon's updates have singular values of 1 whatever the gradient: what AdamW is given beside it.
ADAMW_BESIDE_MUON = 0.3


def rate(update: int, updates: int, section: TrainSection) -> float:
    """The factor on the learning rate at `update` (from 0) of `updates`."""
    warm = math.ceil(section.warmup * updates)
    if update < warm:
        return (update + 1) / warm
    gone = (update - warm) / max(updates - warm, 1)
    if section.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * gone))
    return 1 - gone if section.schedule == "linear" else 1.0


class Optimizer:
    """AdamW, or Muon on the layer's matrices and AdamW on the rest."""

    def __init__(self, replica: Replica, section: TrainSection) -> None:
        self.section = section
        self.named = replica.named()
        self.parameters = [parameter for _, parameter in self.named]
        muon = section.optimizer == "muon"
        if muon and replica.kind == "fsdp":
            raise UsageError(
                "train.optimizer muon needs whole matrices, which FSDP cuts; "
                "use --set train.parallel=ddp, or adamw"
            )
        matrices = [p for n, p in self.named if muon and _is_inner_matrix(n, p)]
        inner = {id(p) for p in matrices}
        rest = [(n, p) for n, p in self.named if id(p) not in inner]
        self.parts: list[torch.optim.Optimizer] = []
        self.bases: list[float] = []
        if matrices:
            self.parts.append(Muon(matrices, lr=section.lr))
            self.bases.append(section.lr)
        base = section.lr * (ADAMW_BESIDE_MUON if matrices else 1.0)
        rule = adamw(rest, lr=base, betas=section.betas, weight_decay=section.weight_decay)
        self.fused = bool(rule.defaults["fused"])
        self.parts.append(rule)
        self.bases.append(base)
        self.matrices = matrices
        self._part_of = {
            parameter: part
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
        }

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clip(self) -> float:
        """Clip the gradients to the plan's norm; the norm before, over all processes."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.section.clip_norm)
        return float(full(norm))

    def step(self, factor: float) -> float:
        """One update at the rates times `factor`; returns the first rate. Clears gradients."""
        for part, base in zip(self.parts, self.bases, strict=True):
            for group in part.param_groups:
                group["lr"] = base * factor
        shrink = 1 - self.bases[0] * factor * self.section.weight_decay
        if self.matrices and shrink != 1:
            with torch.no_grad():
                for matrix in self.matrices:
                    matrix.mul_(shrink)
        for part in self.parts:
            part.step()
        self.clear()
        return self.bases[0] * factor

    def clear(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """`state`: whole tensors on the CPU by parameter and key; `param_groups`: their rates.

        Every process must ask.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.named:
            values = self._part_of[parameter].state.get(parameter, {})
            found[name] = {k: full(torch.as_tensor(v)).cpu() for k, v in values.items()}
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for part in self.parts
            for group in part.param_groups
        ]
        return {"state": found, "param_groups": groups}

    def load(self, saved: dict[str, Any]) -> None:
        """Take up what `state` gave. Raises `KeyError` with the name of what is missing."""
        for name, parameter in self.named:
            values = saved["state"].get(name)
            if not values:
                raise KeyError(name)
            part = self._part_of[parameter]
            for key, value in values.items():
                whole = value.dim() > 0 and value.shape == parameter.shape
                # the fused kernel wants its step count where the parameter is
                place = parameter.device if self.fused else value.device
                part.state[parameter][key] = (
                    like(value, parameter) if whole else value.clone().to(place)
                )


def _is_inner_matrix(name: str, parameter: nn.Parameter) -> bool:
    other = any(part in name for part in ("embed_tokens", "lm_head", "norm"))
    return parameter.dim() == 2 and not other
