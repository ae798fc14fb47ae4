"""Everything that makes the demo pair what it is, besides its code; it is part of its cache key."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

TargetKind = Literal["mla", "llama"]
DrafterKind = Literal["mla", "llama"]

AUX_LAYERS = (2, 4, 5)  # begins at 2: SGLang shifts lists that begin with 1
LATENT_ON_DISK = 512  # the CPU kernels for MLA want exactly this rank of the latent cache


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A small target. `latent` is the rank trained; it is zero-padded when saved."""

    kind: TargetKind = "mla"
    vocab_size: int = 768
    hidden_size: int = 192
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2  # Llama only
    head_dim: int = 64  # without rope and value for MLA; Llama's whole head
    rope_dim: int = 64  # MLA only
    q_rank: int = 64
    latent: int = 96
    intermediate_size: int = 512
    experts: int = 4
    expert_size: int = 96
    experts_per_token: int = 2
    routed_scale: float = 1.5
    eps: float = 1e-6
    context: int = 2048
    rope_theta: float = 10000.0
    seed: int = 1
    steps: int = 950
    rows: int = 6
    row_length: int = 160
    muon_lr: float = 0.012
    adam_lr: float = 0.005

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """YaRN for MLA, as the DeepSeek family has it; None for Llama."""
        if self.kind == "llama":
            return None
        return {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": self.context // 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the demo's drafters are shaped and trained."""

    kind: DrafterKind = "mla"
    intermediate_size: int = 384
    seed: int = 2
    steps: int = 220
    rows: int = 6
    ttt_steps: int = 3
    step_decay: float = 0.8
    muon_lr: float = 0.01
    adam_lr: float = 0.003
