"""AdamW over a drafter's trainable parameters, in one fused kernel where torch has one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

FUSED = ("cpu", "cuda")
"""Devices for which torch has the fused kernel, for floating parameters."""


def adamw(
    named: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW over what is trained of `named`; vectors (norms), embeddings are never decayed."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.requires_grad:
            vector = parameter.dim() < 2 or "embed_tokens" in name
            (plain if vector else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    fused = all(p.device.type in FUSED and p.is_floating_point() for p in (*decayed, *plain))
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=betas,
        weight_decay=weight_decay,
        fused=fused,
    )
