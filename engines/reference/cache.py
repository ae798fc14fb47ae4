"""The slotted KV cache, and the batch of rows that one forward pass reads and writes in it.

Every running request owns one slot: a row of `length` positions in each layer's tensors. The
running requests always hold slots 0 to n-1 (`move` fills a hole with the last one), so that a
batch reads the cache through a view and never copies it. A rejected draft token needs no undoing:
its entry lies beyond the sequence's end, where the mask hides it until it is overwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# From this many new tokens a row on, torch's fused attention is the faster one.
FUSED_FROM = 32


class KvCache:
    """Keys [slots, kv_heads, length, key_dim] and values of every layer.

    `value_dim` None: latent attention, where the values are the first part of the keys and are
    not stored a second time.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        length: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int | None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.slots, self.length, self.kv_heads = slots, length, kv_heads

        def tensors(width: int) -> list[Tensor]:
            shape = (slots, kv_heads, length, width)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

        self.keys = tensors(key_dim)
        self.values = tensors(value_dim) if value_dim is not None else None

    def write(self, layer: int, batch: Batch, key: Tensor, value: Tensor | None) -> None:
        """Store key (and value) [n, T, kv_heads, dim] at the batch's positions."""
        _store(self.keys[layer], batch, key)
        if self.values is not None and value is not None:
            _store(self.values[layer], batch, value)

    def read(self, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Views of keys and values [n, kv_heads, S, dim] of the batch's rows."""
        rows = slice(batch.first_slot, batch.first_slot + batch.rows)
        key = self.keys[layer][rows, :, : batch.span]
        return key, key if self.values is None else self.values[layer][rows, :, : batch.span]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another."""
        for tensor in [*self.keys, *(self.values or [])]:
            tensor[target, :, :length] = tensor[source, :, :length]


class Batch:
    """Rows of consecutive slots, each with T new tokens at consecutive positions.

    `positions` [n, T]; `index` [n * kv_heads * T] into the cache's flattened positions; `span` S
    is the number of cached positions that any row may look at; `mask` [n, T, S] is added to the
    scores (0 or -inf), None where every row sees all of S.
    """

    def __init__(
        self, cache: KvCache, *, first_slot: int, starts: list[int], tokens: int, device: str
    ) -> None:
        self.first_slot, self.rows, self.tokens = first_slot, len(starts), tokens
        self.span = max(starts) + tokens
        steps = torch.arange(tokens, device=device)
        self.positions = torch.tensor(starts, device=device)[:, None] + steps  # [n, T]
        slots = torch.arange(first_slot, first_slot + self.rows, device=device)[:, None, None]
        lines = slots * cache.kv_heads + torch.arange(cache.kv_heads, device=device)[:, None]
        self.index = (lines * cache.length + self.positions[:, None]).flatten()
        self.mask: Tensor | None = None
        if tokens > 1 or min(starts) != max(starts):
            hidden = torch.arange(self.span, device=device) > self.positions[..., None]
            self.mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
        self._grouped: dict[tuple[int, torch.dtype], Tensor] = {}

    def grouped_mask(self, group: int, dtype: torch.dtype) -> Tensor | None:
        """The mask for `group` query heads folded into T: [n, 1, T * group, S]; made once."""
        if self.mask is None:
            return None
        if (group, dtype) not in self._grouped:
            repeated = self.mask.repeat_interleave(group, dim=1).to(dtype)
            self._grouped[group, dtype] = repeated[:, None]
        return self._grouped[group, dtype]


def _store(tensor: Tensor, batch: Batch, new: Tensor) -> None:
    flat = new.transpose(1, 2).reshape(-1, new.shape[-1])
    tensor.view(-1, tensor.shape[-1]).index_copy_(0, batch.index, flat)


def attend(query: Tensor, key: Tensor, value: Tensor, batch: Batch, scale: float) -> Tensor:
    """Masked attention of query [n, T, heads, d_k] over keys and values [n, kv_heads, S, d].

    Query heads that share a key head are folded into T, so that one product serves them all.
    Returns [n, T, heads, d_v].
    """
    rows, tokens, heads, width = query.shape
    kv_heads, span = key.shape[1:3]
    group = heads // kv_heads
    folded = query.view(rows, tokens, kv_heads, group, width).transpose(1, 2)
    folded = folded.reshape(rows, kv_heads, tokens * group, width)
    mask = batch.grouped_mask(group, query.dtype)
    if tokens >= FUSED_FROM:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    else:
        # slots and heads of the cache lie evenly spaced: they merge without a copy
        scores = torch.bmm((folded * scale).flatten(0, 1), key.flatten(0, 1).mT)
        if mask is not None:
            scores.view(rows, kv_heads, -1, span).add_(mask)
        out = torch.bmm(scores.softmax(-1), value.flatten(0, 1))
    out = out.view(rows, kv_heads, tokens, group, -1).transpose(1, 2)
    return out.reshape(rows, tokens, heads, -1)
