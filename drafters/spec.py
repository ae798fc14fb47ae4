"""What an EAGLE-3 drafter is, said once and without any engine's convention.

The aux layers are stated as transformers' `output_hidden_states` index (index 0 is the
embeddings, index i the input of layer i and the output of layer i - 1), so that no id is
ambiguous. `drafters.formats` translates to and from each format's and engine's reading.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class DrafterError(Exception):
    """A drafter that cannot be read, built or translated; the message is one line."""


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: `theta`, and the scaling dictionary of the config (None: plain rope)."""

    theta: float = 10000.0
    scaling: dict[str, Any] | None = None


class MlaDims(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of multi-head latent attention, per head where not a rank."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class DrafterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One EAGLE-3 draft model.

    `aux_layers`: transformers' hidden-state indices of the target, in the order of the
    concatenation. `draft_vocab_size` equal to `vocab_size` means no d2t/t2d tables.
    `head_dim` is for the Llama head; `mla` is set for the MLA head only.
    """

    kind: Literal["llama", "mla"]
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    rope: RopeSpec = RopeSpec()
    mla: MlaDims | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    dtype: str = "float32"
