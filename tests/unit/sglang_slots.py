"""The slot table that tests of the `sgl_kernel` module read and write."""

from __future__ import annotations

import torch

POOL = 24
ROWS = 6


def slot_table(seed: int = 0) -> torch.Tensor:
    """A slot table in which every slot occurs once, so that a wrong read shows."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(ROWS * POOL, generator=generator) + 1
    return slots.view(ROWS, POOL).to(torch.int32)
