"""Matrix products in bfloat16 where the CPU has tiles for them (AMX), else in float32.

There bfloat16 is eight times as fast. CPUs with AVX512-BF16 alone gain less, others lose; both keep
float32 here (`training.trainer.autocast` decides for drafters). Weights, optimiser state, norms and
losses stay in float32 either way.
"""

from __future__ import annotations

import torch


def has_tiles() -> bool:
    """True if this CPU multiplies bfloat16 matrices in hardware tiles."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported and supported())


def training_precision() -> torch.autocast:
    """A context for the forward passes of training."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_tiles())
