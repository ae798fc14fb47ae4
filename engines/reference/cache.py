"""The slotted KV cache, and the batch of rows that one forward pass reads and writes in it.

Every running request owns one slot: a row of `length` positions in each layer's tensors. The
running requests always hold slots 0 to n-1 (`move` fills a hole with the last one), so that a
batch reads the cache through a view and never copies it. A rejected draft token needs no undoing:
its entry lies beyond the sequence's end, where the mask hides it until it is overwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KvCache:
    """Keys [slots, length, kv_heads, key_dim] and values of every layer.

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
        self.slots, self.length = slots, length

        def tensors(width: int) -> list[Tensor]:
            shape = (slots, length, kv_heads, width)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

        self.keys = tensors(key_dim)
        self.values = tensors(value_dim) if value_dim is not None else None

    def write(self, layer: int, batch: Batch, key: Tensor, value: Tensor | None) -> None:
        """Store key (and value) [n, T, kv_heads, dim] at the batch's positions."""
        tensor = self.keys[layer]
        tensor.view(-1, *tensor.shape[2:]).index_copy_(0, batch.index, key.flatten(0, 1))
        if self.values is not None and value is not None:
            tensor = self.values[layer]
            tensor.view(-1, *tensor.shape[2:]).index_copy_(0, batch.index, value.flatten(0, 1))

    def read(self, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Views of keys and values [n, S, kv_heads, dim] of the batch's rows."""
        rows = slice(batch.first_slot, batch.first_slot + batch.rows)
        key = self.keys[layer][rows, : batch.span]
        return key, key if self.values is None else self.values[layer][rows, : batch.span]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another."""
        for tensor in [*self.keys, *(self.values or [])]:
            tensor[target, :length] = tensor[source, :length]

    @property
    def bytes(self) -> int:
        """Memory held by all layers."""
        return sum(t.numel() * t.element_size() for t in [*self.keys, *(self.values or [])])


class Batch:
    """Rows of consecutive slots, each with T new tokens at consecutive positions.

    `positions` [n, T]; `index` [n * T] into the cache's flattened positions; `span` S is the
    number of cached positions that any row may look at; `mask` [n, T, S] is added to the scores
    (0 or -inf), None where every row sees all of S.
    """

    def __init__(
        self, cache: KvCache, *, first_slot: int, starts: list[int], tokens: int, device: str
    ) -> None:
        self.first_slot, self.rows, self.tokens = first_slot, len(starts), tokens
        self.span = max(starts) + tokens
        steps = torch.arange(tokens, device=device)
        self.positions = torch.tensor(starts, device=device)[:, None] + steps  # [n, T]
        slots = torch.arange(first_slot, first_slot + self.rows, device=device)
        self.index = (slots[:, None] * cache.length + self.positions).flatten()
        self.mask: Tensor | None = None
        if tokens > 1 or min(starts) != max(starts):
            hidden = torch.arange(self.span, device=device) > self.positions[..., None]
            self.mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
        self._grouped: dict[int, Tensor] = {}

    def grouped_mask(self, group: int) -> Tensor | None:
        """The mask for `group` query heads folded into T: [n, T * group, S]; made once."""
        if self.mask is None or group == 1:
            return self.mask
        if group not in self._grouped:
            self._grouped[group] = self.mask.repeat_interleave(group, dim=1)
        return self._grouped[group]


def attend(query: Tensor, key: Tensor, value: Tensor, batch: Batch, scale: float) -> Tensor:
    """Masked attention of query [n, T, heads, d_k] over the cache [n, S, kv_heads, d_k | d_v].

    Query heads that share a key head are folded into T, so that one product serves them all.
    Returns [n, T, heads, d_v].
    """
    rows, tokens, heads, width = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    mask = batch.grouped_mask(group)
    if mask is not None and mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    if kv_heads == 1:
        folded = query.reshape(rows, tokens * heads, width)
        key, value = key[:, :, 0], value[:, :, 0]
        scores = torch.bmm(folded * scale, key.mT)
        scores = scores if mask is None else scores.add_(mask)
        return torch.bmm(scores.softmax(-1), value).view(rows, tokens, heads, -1)
    folded = query.view(rows, tokens, kv_heads, group, width).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(
        folded.reshape(rows, kv_heads, tokens * group, width),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None],
        scale=scale,
    )  # [n, kv_heads, T * group, d_v]
    out = out.view(rows, kv_heads, tokens, group, -1).transpose(1, 2)
    return out.reshape(rows, tokens, heads, -1)
