"""States in 8-bit floats (e4m3) with one float32 scale per row and per layer's block.

A row's block of H numbers x is stored as x / s with s = max|x| / 448, the largest e4m3 number. A
stored number is then off by at most 1/16 of itself, or by s / 1024 where it is smaller than
s / 64 (e4m3's subnormal numbers).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

LARGEST = 448.0
"""The largest finite number of torch.float8_e4m3fn."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantise(states: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """States [N, blocks * H] -> float8_e4m3fn [N, blocks * H] and scales float32 [N, blocks].

    A block of zeros has scale 1 and stays zero. What is not finite becomes NaN in its whole block,
    so that it is found again.
    """
    parts = states.float().unflatten(-1, (blocks, -1))  # [N, blocks, H]
    scale = parts.abs().amax(-1) / LARGEST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale.clamp_min(SMALLEST_SCALE))
    # Rounding may leave a quotient just above 448; up to 464 e4m3 rounds to 448.
    return (parts / scale.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), scale


def dequantise(stored: Tensor, scale: Tensor) -> Tensor:
    """The float32 states [N, blocks * H] of what `quantise` made."""
    # A table of the 256 numbers, three times as fast as torch's own conversion on a CPU.
    numbers = torch.from_numpy(_numbers().take(stored.contiguous().view(torch.uint8).numpy()))
    parts = numbers.unflatten(-1, (scale.shape[-1], -1))
    return parts.mul_(scale.unsqueeze(-1)).flatten(-2)


@functools.cache
def _numbers() -> Any:
    """The float32 value of each of the 256 bytes, as a numpy array."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def relative_error(found: Tensor, true: Tensor) -> float:
    """||found - true|| / ||true|| over all elements; 0 where both are zero."""
    error, size = (found.float() - true.float()).norm(), true.float().norm()
    return float(error / size) if size > 0 else float(error)
