"""The demo's targets as trainable torch models: DeepSeek-V3's architecture, and Llama's.

Parameters are laid out for quick training on a CPU (experts side by side in one matrix, a small
latent); `training.demo.export` writes them under the names and shapes transformers knows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.layers import RMSNorm, SwiGLU, apply_rope, mla_softmax_scale, rope_table
from training.demo.config import LATENT_ON_DISK, TargetConfig

EMBEDDING_STD = 0.5
QUIET = 0.1
HEAD_SCALE = 0.3

Cache = list[tuple[Tensor, Tensor]]


class MlaAttention(nn.Module):
    """Multi-head latent attention, keys and values expanded."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c = config
        self.config = c
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_rank, c.eps)
        self.q_b_proj = nn.Linear(c.q_rank, c.heads * (c.head_dim + c.rope_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.latent + c.rope_dim, bias=False)
        # the padded norm divides by the padded width, its eps is seen that much larger here
        self.kv_a_layernorm = RMSNorm(c.latent, c.eps * LATENT_ON_DISK / c.latent)
        self.kv_b_proj = nn.Linear(c.latent, c.heads * 2 * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden_size, bias=False)
        self.scale = mla_softmax_scale(c.head_dim + c.rope_dim, c.rope_scaling)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, H] -> q, k [B, T, heads, d_k] and v [B, T, heads, d_v]."""
        c = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (c.heads, -1))
        q_nope, q_rope = q.split((c.head_dim, c.rope_dim), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((c.latent, c.rope_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c.heads, -1))
        k_nope, v = kv.split((c.head_dim, c.head_dim), -1)
        q_rope = apply_rope(q_rope, cos, sin, interleaved=True)
        k_rope = apply_rope(k_rope.unsqueeze(-2), cos, sin, interleaved=True)
        k_rope = k_rope.expand(*k_nope.shape[:-1], -1)
        return torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v


class GroupedAttention(nn.Module):
    """Llama's grouped-query attention."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c = config
        self.config = c
        self.q_proj = nn.Linear(c.hidden_size, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden_size, bias=False)
        self.scale = c.head_dim**-0.5

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, H] -> q, k and v [B, T, heads, head_dim], key heads repeated."""
        c = self.config
        q, k, v = (
            p(x).unflatten(-1, (-1, c.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (apply_rope(z, cos, sin, interleaved=False) for z in (q, k))
        groups = c.heads // c.kv_heads
        return q, k.repeat_interleave(groups, -2), v.repeat_interleave(groups, -2)


class MixtureOfExperts(nn.Module):
    """DeepSeek-V3's routed experts with a shared one, computed densely.

    The experts lie side by side in three matrices, the shared expert last; a token's expert is
    switched off by a weight of zero. For experts this small that is quicker than gathering, and
    the numbers are the same.
    """

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        c = config
        self.config = c
        wide = (c.experts + 1) * c.expert_size
        self.gate = nn.Linear(c.hidden_size, c.experts, bias=False)
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(c.experts))
        self.experts = SwiGLU(c.hidden_size, wide)
        for linear, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            # each expert is a matrix of its own to the optimiser
            getattr(self.experts, linear).weight.muon_blocks = (c.experts + 1, dim)
        self.load: Tensor | None = None  # share of tokens per expert in the last forward

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        scores = self.gate(x).sigmoid()  # [B, T, E]
        chosen = (scores.detach() + self.bias).topk(c.experts_per_token, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.load = mask.flatten(0, -2).mean(0)
        weights = scores * mask
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scale
        weights = torch.cat((weights, torch.ones_like(weights[..., :1])), -1).unsqueeze(-1)
        inner = F.silu(self.experts.gate_proj(x)) * self.experts.up_proj(x)
        inner = inner.unflatten(-1, (c.experts + 1, c.expert_size)) * weights
        return self.experts.down_proj(inner.flatten(-2))

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Nudge the routing bias towards an even load, without an auxiliary loss (noaux_tc)."""
        if self.load is not None:
            self.bias += rate * (self.load.mean() - self.load).sign()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q, k, v [B, heads, T or S, d] and an additive mask [B, T, S] -> [B, T, heads, d_v].

    Written out because torch's fused CPU kernel wants keys and values of one width.
    """
    batch, heads = q.shape[:2]
    q, k, v = (z.flatten(0, 1) for z in (q, k, v))
    wide = mask.unsqueeze(1).expand(-1, heads, -1, -1).flatten(0, 1)
    scores = torch.baddbmm(wide, q, k.transpose(1, 2), alpha=scale)
    return (scores.softmax(-1) @ v).unflatten(0, (batch, heads)).transpose(1, 2)


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: TargetConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.self_attn: MlaAttention | GroupedAttention
        self.mlp: MixtureOfExperts | SwiGLU
        if config.kind == "mla":
            self.self_attn = MlaAttention(config)
        else:
            self.self_attn = GroupedAttention(config)
        if config.kind == "mla" and index > 0:
            self.mlp = MixtureOfExperts(config)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        past: tuple[Tensor, Tensor, Tensor] | None,
    ) -> Tensor:
        """x [B, T, H], mask [B, T, S]; `past` (keys, values, slots) is written in place."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            keys, values, slots = past  # [B, heads, S, d], [B, T]
            at = slots.unsqueeze(1).unsqueeze(-1)
            keys.scatter_(2, at.expand_as(k), k)
            values.scatter_(2, at.expand_as(v), v)
            k, v = keys, values
        attended = attend(q, k, v, mask, self.self_attn.scale)
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DemoTarget(nn.Module):
    """The target: `forward` gives every hidden state, `logits` the head over the last one."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        dim = config.rope_dim if config.kind == "mla" else config.head_dim
        cos, sin = rope_table(dim, config.rope_theta, config.rope_scaling, config.context)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Embeddings of unit size and quiet branches: tokens stay legible through the depth."""
        for name, parameter in self.named_parameters():
            if "embed_tokens" in name:
                nn.init.normal_(parameter, std=EMBEDDING_STD)
            elif "o_proj" in name or "down_proj" in name:
                nn.init.normal_(parameter, std=QUIET * parameter.shape[1] ** -0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        # the head begins as the embedding, so that to copy a token is one linear map for all
        size = EMBEDDING_STD * self.config.hidden_size**0.5
        self.lm_head.weight.data.copy_(self.embed_tokens.weight.detach() * (HEAD_SCALE / size))

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None = None
    ) -> list[Tensor]:
        """ids, positions [B, T] -> the input of each layer, then the final-NORMED state.

        `mask` [B, T, S] is added to the scores (0 or -inf); with a `cache` of
        [B, heads, S, d] keys and values, S is the cache's length and a token is
        written at the slot of its position.
        """
        rope = (self.rope_cos[positions], self.rope_sin[positions])
        x = self.embed_tokens(ids)
        states = [x]
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, mask, None if cache is None else (*cache[i], positions))
            states.append(x)
        states[-1] = self.norm(x)
        return states

    def logits(self, normed: Tensor) -> Tensor:
        """Final-normed state [..., H] -> logits [..., V]."""
        return self.lm_head(normed)

    def new_cache(self, batch: int, length: int) -> Cache:
        """Empty keys and values for `batch` sequences of up to `length` tokens."""
        c = self.config
        k_dim = c.head_dim + (c.rope_dim if c.kind == "mla" else 0)
        shape = (batch, c.heads, length)
        return [
            (torch.zeros(*shape, k_dim), torch.zeros(*shape, c.head_dim)) for _ in range(c.layers)
        ]

    def balance(self, rate: float) -> None:
        """Balance the experts' load in every layer that has experts."""
        for layer in self.layers:
            if isinstance(layer.mlp, MixtureOfExperts):
                layer.mlp.balance(rate)


def document_mask(documents: Tensor) -> Tensor:
    """Documents [B, T] (-1: padding) -> additive causal mask within each, [B, T, T]."""
    length = documents.shape[1]
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(same.shape).masked_fill_(~(same & causal), float("-inf"))
