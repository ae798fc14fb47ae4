"""The small torch layers that drafters, training and the reference engine share.

Rotary tables follow transformers' readings of `rope_type`: default, linear, llama3 and yarn
(DeepSeek's YaRN: `factor`, `beta_fast`, `beta_slow`, `mscale`, `mscale_all_dim`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; computed in float32."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return (self.weight * normed.to(x.dtype)).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), the feed-forward of Llama and DeepSeek."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention magnitude for a context stretched by `factor` (arXiv 2309.00071, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The scaling's kind: `default`, `linear`, `llama3` or `yarn` (deepseek_yarn is yarn)."""
    if not scaling:
        return "default"
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    return "yarn" if kind == "deepseek_yarn" else kind


def rope_frequencies(
    dim: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] (float32) and the factor on cos and sin.

    Raises ValueError for a `rope_type` that is not known.
    """
    inv_freq = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = rope_type(scaling)
    if kind == "default" or scaling is None:
        return inv_freq, 1.0
    factor = float(scaling["factor"])
    if kind == "linear":
        return inv_freq / factor, 1.0
    if kind == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, dim, theta, scaling)
    raise ValueError(f"rope_type {kind!r} is not known; known: default, linear, llama3, yarn")


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are slowed by `factor`, short kept, smooth in between."""
    original = float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = original * inv_freq / (2 * math.pi)  # rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * keep + inv_freq / float(scaling["factor"]) * (1 - keep)


def _yarn(
    inv_freq: Tensor, dim: int, theta: float, scaling: Mapping[str, Any]
) -> tuple[Tensor, float]:
    """YaRN: interpolate the dimensions that turn seldom, keep those that turn often."""
    original = float(scaling["original_max_position_embeddings"])
    factor = float(scaling["factor"])

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(float(scaling.get("beta_fast") or 32))), 0)
    high = min(math.ceil(dimension(float(scaling.get("beta_slow") or 1))), dim - 1)
    width = high - low or 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = yarn_mscale(factor, float(scaling.get("mscale") or 1.0)) / yarn_mscale(
            factor, float(scaling.get("mscale_all_dim") or 0.0)
        )
    return inv_freq * keep + inv_freq / factor * (1 - keep), float(magnitude)


def rope_table(
    dim: int, theta: float, scaling: Mapping[str, Any] | None, positions: int
) -> tuple[Tensor, Tensor]:
    """cos and sin, each float32 [positions, dim / 2], the scaling's magnitude included."""
    inv_freq, magnitude = rope_frequencies(dim, theta, scaling)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inv_freq)
    return angles.cos() * magnitude, angles.sin() * magnitude


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate x [..., T, heads, dim] by cos and sin [..., T, dim / 2].

    `interleaved` pairs neighbours (x0, x1), as DeepSeek stores them; else the two halves, as
    Llama does. The interleaved result comes back with its pairs apart (all first, all second):
    scores of two tensors rotated alike are the same in either order.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def mla_softmax_scale(qk_head_dim: int, scaling: Mapping[str, Any] | None) -> float:
    """1 / sqrt(nope + rope), times YaRN's mscale_all_dim squared, as DeepSeek-V3 does."""
    scale = qk_head_dim**-0.5
    if scaling and rope_type(scaling) != "default" and scaling.get("mscale_all_dim"):
        scale *= yarn_mscale(float(scaling["factor"]), float(scaling["mscale_all_dim"])) ** 2
    return scale
