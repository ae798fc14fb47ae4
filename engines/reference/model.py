"""The target models' forward pass in plain torch: Llama and DeepSeek-V3 (Kimi).

A model is a list of layers, each an attention and a feed-forward part; what they share (norms,
residuals, embedding, head) is written once in `Model`. Weights are plain tensors, never trained.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.layers import apply_rope, mla_softmax_scale, rope_table
from engines.reference.cache import Batch, KvCache, attend
from engines.reference.config import MlaConfig, ModelConfig, MoeConfig
from engines.reference.weights import Weights

# Above this many new tokens a row, latent attention expands keys and values per head: the
# absorbed form does less per cached position but more per pair of positions.
EXPAND_FROM = 32
# Up to this many experts all of them are computed for every token in two products.
DENSE_EXPERTS = 16


class Part(Protocol):
    """An attention block: normed states [n, T, H] in, its contribution [n, T, H] out."""

    def __call__(self, x: Tensor, batch: Batch, cache: KvCache, rope: Rope) -> Tensor: ...


Rope = tuple[Tensor, Tensor]  # cos and sin, each [n, T, rope_dim / 2]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, computed in float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


class Matrix:
    """A linear map, stored input-major: products of few rows are twice as fast so on a CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight.t().contiguous(), bias  # [in, out]

    def __call__(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        return out if self.bias is None else out + self.bias


class GroupedAttention:
    """Llama's attention: fewer key heads than query heads, rope on halves."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        base = f"model.layers.{layer}.self_attn"
        self.layer, self.heads, self.kv_heads = layer, config.heads, config.kv_heads
        self.dim, self.scale = config.head_dim, config.head_dim**-0.5
        names = [f"{base}.{part}_proj" for part in "qkv"]
        self.qkv = Matrix(*weights.take_linear(*names))
        self.out = Matrix(*weights.take_linear(f"{base}.o_proj"))

    def __call__(self, x: Tensor, batch: Batch, cache: KvCache, rope: Rope) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.dim))
        rotated, value = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        rotated = apply_rope(rotated, *rope, interleaved=False)
        query, key = rotated.split((self.heads, self.kv_heads), dim=2)
        cache.write(self.layer, batch, key, value)
        keys, values = cache.read(self.layer, batch)
        mixed = attend(query, keys, values, batch, self.scale)
        return self.out(mixed.flatten(2))


class LatentAttention:
    """DeepSeek's multi-head latent attention (arXiv 2405.04434, section 2.1).

    The cache holds one latent and one rotary key a position. Few new tokens: the key and value
    expansions are absorbed into query and output. Many: keys and values are expanded per head.
    """

    EPS = 1e-6  # of the latents' norms; not the config's rms_norm_eps, as in transformers

    def __init__(self, config: ModelConfig, mla: MlaConfig, weights: Weights, layer: int) -> None:
        base = f"model.layers.{layer}.self_attn"
        self.layer, self.mla, self.heads = layer, mla, config.heads
        self.scale = mla_softmax_scale(mla.nope_dim + mla.rope_dim, config.rope_scaling)
        first = "q_a_proj" if mla.q_lora_rank else "q_proj"
        self.q_width = mla.q_lora_rank or config.heads * (mla.nope_dim + mla.rope_dim)
        names = (f"{base}.{first}", f"{base}.kv_a_proj_with_mqa")
        self.down = Matrix(*weights.take_linear(*names))
        if mla.q_lora_rank:
            self.q_norm = weights.take(f"{base}.q_a_layernorm.weight")
            self.q_up = Matrix(*weights.take_linear(f"{base}.q_b_proj"))
        self.kv_norm = weights.take(f"{base}.kv_a_layernorm.weight")
        self.kv_up = weights.take(f"{base}.kv_b_proj.weight")  # [heads * (nope + v), latent]
        split = self.kv_up.view(config.heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)
        self.key_up = split[:, : mla.nope_dim].contiguous()  # [heads, nope, latent]
        self.value_up = split[:, mla.nope_dim :].mT.contiguous()  # [heads, latent, v]
        self.out = Matrix(*weights.take_linear(f"{base}.o_proj"))

    def __call__(self, x: Tensor, batch: Batch, cache: KvCache, rope: Rope) -> Tensor:
        mla = self.mla
        query, latent, k_rope = self.down(x).split(
            (self.q_width, mla.kv_lora_rank, mla.rope_dim), dim=-1
        )
        if mla.q_lora_rank:
            query = self.q_up(rms_norm(query, self.q_norm, self.EPS))
        query = query.unflatten(-1, (self.heads, -1))
        q_nope, q_rope = query.split((mla.nope_dim, mla.rope_dim), dim=-1)
        rotary = torch.cat((q_rope, k_rope.unsqueeze(2)), dim=2)  # [n, T, heads + 1, rope]
        rotary = apply_rope(rotary, *rope, interleaved=mla.interleaved_rope)
        latent = rms_norm(latent, self.kv_norm, self.EPS)
        entry = torch.cat((latent.unsqueeze(2), rotary[:, :, -1:]), dim=-1)
        cache.write(self.layer, batch, entry, None)
        entries, _ = cache.read(self.layer, batch)  # [n, 1, S, latent + rope]
        inner = self._expanded if batch.tokens >= EXPAND_FROM else self._absorbed
        mixed = inner(q_nope, rotary[:, :, :-1], entries, batch)  # [n, T, heads * v]
        return self.out(mixed)

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, entries: Tensor, batch: Batch) -> Tensor:
        rows, tokens = q_nope.shape[:2]
        by_head = q_nope.flatten(0, 1).transpose(0, 1)  # [heads, n * T, nope]
        latent_query = torch.bmm(by_head, self.key_up).transpose(0, 1)  # [n * T, heads, latent]
        query = torch.cat((latent_query.view(rows, tokens, self.heads, -1), q_rope), dim=-1)
        values = entries[..., : self.mla.kv_lora_rank]
        mixed = attend(query, entries, values, batch, self.scale)  # [n, T, heads, latent]
        by_head = mixed.flatten(0, 1).transpose(0, 1)
        return torch.bmm(by_head, self.value_up).transpose(0, 1).reshape(rows, tokens, -1)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, entries: Tensor, batch: Batch) -> Tensor:
        mla = self.mla
        latent, k_rope = entries.split((mla.kv_lora_rank, mla.rope_dim), dim=-1)
        expanded = F.linear(latent[:, 0], self.kv_up).unflatten(-1, (self.heads, -1))
        k_nope, values = expanded.transpose(1, 2).split((mla.nope_dim, mla.v_dim), dim=-1)
        keys = torch.cat((k_nope, k_rope.expand(-1, self.heads, -1, -1)), dim=-1)
        query = torch.cat((q_nope, q_rope), dim=-1)
        return attend(query, keys, values, batch, self.scale).flatten(2)


class Mlp:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, weights: Weights, base: str) -> None:
        self.gate_up = Matrix(*weights.take_linear(f"{base}.gate_proj", f"{base}.up_proj"))
        self.down = Matrix(*weights.take_linear(f"{base}.down_proj"))

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class MixtureOfExperts:
    """DeepSeek-V3's experts: sigmoid scores, choice by biased score within the best groups.

    The bias steers the choice alone; the weights are the plain scores of the chosen (arXiv
    2412.19437, section 2.1.2). With few experts all are computed for every token and the unchosen
    weighted by zero, the shared ones by one: two products, whatever the routing.
    """

    def __init__(self, moe: MoeConfig, weights: Weights, base: str) -> None:
        self.moe = moe
        self.router = Matrix(weights.take(f"{base}.gate.weight", dtype=torch.float32))
        self.bias = weights.take(f"{base}.gate.e_score_correction_bias", dtype=torch.float32)
        gate_up, down = weights.take_experts(f"{base}.experts", moe.experts)
        self.shared = Mlp(weights, f"{base}.shared_experts") if moe.shared_experts else None
        self.dense = moe.experts <= DENSE_EXPERTS
        if self.dense:
            self._join(gate_up, down)
        else:
            self.gate_up, self.down = gate_up, down

    def _join(self, gate_up: Tensor, down: Tensor) -> None:
        """Lay experts and shared experts side by side as one wide MLP."""
        gate, up = (half.flatten(0, 1) for half in gate_up.chunk(2, dim=1))  # [E * I, H]
        out = down.transpose(0, 1).flatten(1)  # [H, E * I]
        if self.shared is not None:
            shared_gate, shared_up = self.shared.gate_up.weight.t().chunk(2)
            gate, up = torch.cat((gate, shared_gate)), torch.cat((up, shared_up))
            out = torch.cat((out, self.shared.down.weight.t()), dim=1)
        self.gate_up_all, self.down_all = Matrix(torch.cat((gate, up))), Matrix(out)

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen, weight = self.route(flat)
        out = self._all(flat, chosen, weight) if self.dense else self._some(flat, chosen, weight)
        return out.view_as(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts and their weights, each [N, experts_per_token], for x [N, H]."""
        moe = self.moe
        scores = self.router(x.float()).sigmoid()
        choice = scores + self.bias
        if moe.groups_kept < moe.groups:
            grouped = choice.unflatten(-1, (moe.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(moe.groups_kept, dim=-1).indices
            dropped = torch.ones_like(grouped[..., 0]).scatter_(1, best, 0).bool()
            choice = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
        chosen = choice.topk(moe.experts_per_token, dim=-1, sorted=False).indices
        weight = scores.gather(1, chosen)
        if moe.normalise:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return chosen, weight * moe.scaling

    def _all(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        experts = self.moe.experts + self.moe.shared_experts
        share = x.new_ones(x.shape[0], experts)
        share[:, : self.moe.experts] = 0
        share.scatter_(1, chosen, weight.to(x.dtype))
        gate, up = self.gate_up_all(x).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).unflatten(-1, (experts, -1)) * share[..., None]
        return self.down_all(inner.flatten(1))

    def _some(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        out = self.shared(x) if self.shared is not None else torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, token, part * weight[token, place, None].to(part.dtype))
        return out


class Layer:
    """One decoder layer: attention and feed-forward, each on normed states, added back."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        base = f"model.layers.{index}"
        self.eps = config.norm_eps
        self.attention_norm = weights.take(f"{base}.input_layernorm.weight")
        self.mlp_norm = weights.take(f"{base}.post_attention_layernorm.weight")
        self.attention: Part
        if config.mla is not None:
            self.attention = LatentAttention(config, config.mla, weights, index)
        else:
            self.attention = GroupedAttention(config, weights, index)
        self.mlp: Mlp | MixtureOfExperts
        if config.moe is not None and index >= config.moe.first_dense:
            self.mlp = MixtureOfExperts(config.moe, weights, f"{base}.mlp")
        else:
            self.mlp = Mlp(weights, f"{base}.mlp")

    def __call__(self, x: Tensor, batch: Batch, cache: KvCache, rope: Rope) -> Tensor:
        normed = rms_norm(x, self.attention_norm, self.eps)
        x = x + self.attention(normed, batch, cache, rope)
        return x + self.mlp(rms_norm(x, self.mlp_norm, self.eps))


class Model:
    """A loaded target. `forward` reads and writes the cache it is given."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.embedding = weights.take("model.embed_tokens.weight")  # [V, H]
        self.layers = [Layer(config, weights, index) for index in range(config.layers)]
        self.norm = weights.take("model.norm.weight")
        tied = config.tied_embeddings or "lm_head.weight" not in weights
        self.head = Matrix(self.embedding if tied else weights.take("lm_head.weight"))
        self._rope: Rope | None = None

    def prepare_rope(self, positions: int) -> None:
        """Tabulate the rotary embedding for this many positions."""
        config = self.config
        dim = config.mla.rope_dim if config.mla is not None else config.head_dim
        cos, sin = rope_table(dim, config.rope_theta, config.rope_scaling, positions)
        like = self.embedding
        self._rope = (cos.to(like.device, like.dtype), sin.to(like.device, like.dtype))

    def new_cache(self, *, slots: int, length: int) -> KvCache:
        """An empty cache that fits this model."""
        config, mla = self.config, self.config.mla
        return KvCache(
            layers=config.layers,
            slots=slots,
            length=length,
            kv_heads=1 if mla is not None else config.kv_heads,
            key_dim=mla.kv_lora_rank + mla.rope_dim if mla is not None else config.head_dim,
            value_dim=None if mla is not None else config.head_dim,
            dtype=self.embedding.dtype,
            device=str(self.embedding.device),
        )

    def forward(
        self, ids: Tensor, batch: Batch, cache: KvCache, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [n, T] -> normed last states [n, T, H] and aux states [n, T, aux * H].

        `aux_layers` index transformers' hidden states: 0 the embeddings, i the input of layer i,
        the number of layers the normed last state.
        """
        assert self._rope is not None, "prepare_rope comes first"
        rope = (self._rope[0][batch.positions], self._rope[1][batch.positions])
        x = F.embedding(ids, self.embedding)
        wanted: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                wanted[index] = x
            x = layer(x, batch, cache, rope)
        x = rms_norm(x, self.norm, self.config.norm_eps)
        wanted[len(self.layers)] = x
        aux = torch.cat([wanted[i] for i in aux_layers], dim=-1) if aux_layers else None
        return x, aux

    def logits(self, states: Tensor) -> Tensor:
        """Normed states [..., H] -> float32 logits [..., V]."""
        return self.head(states).float()
