"""The EAGLE-3 draft model in torch: one decoder layer over the target's aux hidden states.

Slot t of a sequence takes the embedding of token t + 1, the fused aux states of token t and
position t, and predicts token t + 2. In the recurrence (draft steps after the first) the drafter's
own hidden state takes the place of the fused one. Attention is the caller's: training masks it
for its training-time test, an engine reads a cache.

    h = drafter.fuse(aux)                                # first step; later: the recurrent state
    q, k, v, residual = drafter.project(drafter.embed(ids), h, positions)
    recurrent, normed = drafter.finish(attention(q, k, v, drafter.scale), residual)
    draft_ids = drafter.to_target(drafter.logits(normed).argmax(-1))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafters.layers import RMSNorm, SwiGLU, apply_rope, mla_softmax_scale, rope_table
from drafters.spec import DrafterError, DrafterSpec, MlaDims

Projection = tuple[Tensor, Tensor, Tensor, Tensor]


class LlamaProjections(nn.Module):
    """Grouped-query attention's projections over [embedding, hidden] (2H wide)."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        self.dim = spec.head_dim
        wide = 2 * spec.hidden_size
        self.q_proj = nn.Linear(wide, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(wide, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(wide, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, spec.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., T, 2H] -> q [..., T, heads, dim], k and v [..., T, kv_heads, dim]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        q = apply_rope(q, cos, sin, interleaved=False)
        return q, apply_rope(k, cos, sin, interleaved=False), v


class MlaProjections(nn.Module):
    """Multi-head latent attention's projections, keys and values expanded per head."""

    def __init__(self, spec: DrafterSpec, dims: MlaDims) -> None:
        super().__init__()
        self.heads, self.dims = spec.num_attention_heads, dims
        wide = 2 * spec.hidden_size
        qk_dim = dims.qk_nope_head_dim + dims.qk_rope_head_dim
        if dims.q_lora_rank is None:
            self.q_proj = nn.Linear(wide, self.heads * qk_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(wide, dims.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(dims.q_lora_rank, spec.rms_norm_eps)
            self.q_b_proj = nn.Linear(dims.q_lora_rank, self.heads * qk_dim, bias=False)
        latent = dims.kv_lora_rank + dims.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(wide, latent, bias=False)
        self.kv_a_layernorm = RMSNorm(dims.kv_lora_rank, spec.rms_norm_eps)
        expanded = self.heads * (dims.qk_nope_head_dim + dims.v_head_dim)
        self.kv_b_proj = nn.Linear(dims.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(self.heads * dims.v_head_dim, spec.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., T, 2H] -> q and k [..., T, heads, nope + rope], v [..., T, heads, v_dim]."""
        dims = self.dims
        if dims.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = q.unflatten(-1, (self.heads, -1)).split(
            (dims.qk_nope_head_dim, dims.qk_rope_head_dim), dim=-1
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            (dims.kv_lora_rank, dims.qk_rope_head_dim), dim=-1
        )
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = expanded.split((dims.qk_nope_head_dim, dims.v_head_dim), dim=-1)
        k_rope = apply_rope(k_rope.unsqueeze(-2), cos, sin, interleaved=True)
        k_rope = k_rope.expand(*k_nope.shape[:-1], -1)
        q_rope = apply_rope(q_rope, cos, sin, interleaved=True)
        return torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v


class DraftLayer(nn.Module):
    """The one decoder layer, holding the tensors named `layers.0.*` in a checkpoint."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)  # on the embedding
        self.hidden_norm = RMSNorm(size, eps)  # on the fused or recurrent state
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn: LlamaProjections | MlaProjections
        if spec.mla is not None:
            self.self_attn = MlaProjections(spec, spec.mla)
        else:
            self.self_attn = LlamaProjections(spec)
        self.mlp = SwiGLU(size, spec.intermediate_size)


class Eagle3Drafter(nn.Module):
    """An EAGLE-3 drafter built from its `DrafterSpec`; tensors are named as in checkpoints.

    `owns_embeddings` and `owns_lm_head` False mean that the checkpoint has none of its own: the
    caller shares the target's through `share`. Raises DrafterError if the spec contradicts itself.
    """

    d2t: Tensor | None
    t2d: Tensor | None
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        _check_spec(spec)
        self.spec = spec
        self.owns_embeddings = True
        self.owns_lm_head = True
        fused = len(spec.aux_layers) * spec.target_hidden_size
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.fc = nn.Linear(fused, spec.hidden_size, bias=False)
        self.input_norm = RMSNorm(fused, spec.rms_norm_eps) if spec.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(
                RMSNorm(spec.target_hidden_size, spec.rms_norm_eps) for _ in spec.aux_layers
            )
            if spec.fc_norm
            else None
        )
        self.layers = nn.ModuleList([DraftLayer(spec)])
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        self._add_vocabulary_tables(spec)
        self.reset_rope()

    def _add_vocabulary_tables(self, spec: DrafterSpec) -> None:
        if spec.draft_vocab_size == spec.vocab_size:
            self.d2t = self.t2d = None
            return
        # d2t holds OFFSETS: target id = draft id + d2t[draft id]
        self.register_buffer("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
        table = torch.zeros(spec.vocab_size, dtype=torch.bool)
        table[: spec.draft_vocab_size] = True
        self.register_buffer("t2d", table)

    def reset_rope(self) -> None:
        """Compute the rotary tables anew (they are not stored in checkpoints)."""
        spec = self.spec
        dim = spec.mla.qk_rope_head_dim if spec.mla is not None else spec.head_dim
        # draft steps run up to k positions past the context's end
        positions = spec.max_position_embeddings + 16
        cos, sin = rope_table(dim, spec.rope.theta, spec.rope.scaling, positions)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    @property
    def layer(self) -> DraftLayer:
        """The one decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    @property
    def scale(self) -> float:
        """Softmax scale of the attention scores."""
        if self.spec.mla is None:
            return float(self.spec.head_dim**-0.5)
        dims = self.spec.mla
        qk_dim = dims.qk_nope_head_dim + dims.qk_rope_head_dim
        return mla_softmax_scale(qk_dim, self.spec.rope.scaling)

    def share(self, *, embeddings: Tensor | None = None, lm_head: Tensor | None = None) -> None:
        """Use the target's embedding [V, H] or head [V, H] (restricted to the draft vocabulary)."""
        if embeddings is not None:
            self.embed_tokens.weight = nn.Parameter(embeddings, requires_grad=False)
            self.owns_embeddings = False
        if lm_head is not None:
            rows = lm_head if self.t2d is None else lm_head[self.t2d.to(lm_head.device)]
            self.lm_head.weight = nn.Parameter(rows, requires_grad=False)
            self.owns_lm_head = False

    def set_vocabulary(self, kept: Tensor) -> None:
        """Set d2t and t2d from the strictly increasing target ids kept [draft_vocab_size]."""
        if self.d2t is None or self.t2d is None:
            raise DrafterError("the draft vocabulary is the target's: there is no table to set")
        if kept.shape != self.d2t.shape or bool((kept.diff() <= 0).any()):
            raise DrafterError(
                f"a draft vocabulary is {self.d2t.numel()} strictly increasing target ids, "
                f"not {tuple(kept.shape)} ids"
            )
        self.d2t.copy_(kept - torch.arange(kept.numel(), device=kept.device))
        self.t2d.zero_()
        self.t2d[kept] = True

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., H]."""
        return self.embed_tokens(ids)

    def fuse(self, aux: Tensor) -> Tensor:
        """Aux hidden states side by side [..., n * H_target] -> [..., H]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        elif self.fc_norm is not None:
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            pairs = zip(self.fc_norm, chunks, strict=True)
            aux = torch.cat([norm(chunk) for norm, chunk in pairs], dim=-1)
        return self.fc(aux)

    def project(self, embedding: Tensor, hidden: Tensor, positions: Tensor) -> Projection:
        """Embedding and hidden [..., T, H], positions [..., T] -> q, k, v and the residual.

        q [..., T, heads, d_k], k [..., T, kv_heads, d_k], v [..., T, kv_heads, d_v]; rope applied.
        """
        layer = self.layer
        normed = layer.hidden_norm(hidden)
        residual = normed if self.spec.norm_before_residual else hidden
        x = torch.cat((layer.input_layernorm(embedding), normed), dim=-1)
        cos = self.rope_cos[positions].to(x.dtype)
        sin = self.rope_sin[positions].to(x.dtype)
        q, k, v = layer.self_attn(x, cos, sin)
        return q, k, v, residual

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Attention output [..., T, heads, d_v] -> (recurrent state, state for the logits).

        The recurrence takes the pre-norm state unless `norm_output`; both are [..., T, H].
        """
        layer = self.layer
        hidden = residual + layer.self_attn.o_proj(attended.flatten(-2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed = self.norm(hidden)
        return (normed if self.spec.norm_output else hidden), normed

    def logits(self, normed: Tensor) -> Tensor:
        """[..., H] -> logits over the draft vocabulary [..., D]."""
        return self.lm_head(normed)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target-vocabulary ids, same shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def _check_spec(spec: DrafterSpec) -> None:
    if (spec.kind == "mla") != (spec.mla is not None):
        raise DrafterError(f"drafter of kind {spec.kind!r}: `mla` must be set for kind mla only")
    if not spec.aux_layers:
        raise DrafterError("a drafter needs at least one aux layer")
    if spec.norm_before_fc and spec.fc_norm:
        raise DrafterError("norm_before_fc and fc_norm exclude each other")
    if not 0 < spec.draft_vocab_size <= spec.vocab_size:
        raise DrafterError(
            f"draft_vocab_size {spec.draft_vocab_size} is not within 1..{spec.vocab_size}"
        )
