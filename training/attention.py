"""Attention of the training-time test: a causal part within documents, and each slot's own past.

In TTT step j a query sees the keys of step 0 up to its own slot, and the keys that its own slot
made in the steps 1 to j. The causal part goes through a flash kernel, document by document; the
others are one score each, and the two are joined by their log-sum-exp, which is exact. The
backward pass hands the joint output and log-sum-exp to the flash kernel: it recomputes
p = exp(score - log-sum-exp) and takes p * (dp - output · d output), so both have to be the joint
ones for its share to be right (the argument of ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

# Documents whose lengths differ by less than this factor share a padded group.
_SAME_GROUP = 0.8


class Group(msgspec.Struct, frozen=True):
    """Documents of about one length: which flat slots fill the [documents, length] grid.

    Cells past a document's end repeat its last slot: no query before them sees them.
    """

    slots: Tensor  # [documents, length]
    first: int  # where the group's cells begin among all groups'


class Documents:
    """How N slots, side by side, fall into documents of the given lengths; all on one device."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.count, self.longest = sum(lengths), max(lengths)
        ends = torch.tensor(lengths).cumsum(0)
        edges = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
        self.edges = edges.to(device, torch.int32)  # [documents + 1]
        self.groups: list[Group] = []
        cell_of = torch.empty(self.count, dtype=torch.int64)  # [N]: each slot's cell
        self.cells = 0
        for members in _by_length(lengths):
            starts = edges[torch.tensor(members)].unsqueeze(1)
            sizes = torch.tensor([lengths[i] for i in members]).unsqueeze(1)
            steps = torch.arange(int(sizes.max())).unsqueeze(0)
            slots = starts + steps.minimum(sizes - 1)  # [documents, length]
            within = steps < sizes
            grid = torch.arange(slots.numel()).view_as(slots) + self.cells
            cell_of[slots[within]] = grid[within]
            self.groups.append(Group(slots.to(device), self.cells))
            self.cells += slots.numel()
        self.cell_of = cell_of.to(device)
        # One document a group of its own, in order: cells are slots, and nothing is moved.
        self.as_they_are = self.cells == self.count and bool(
            (cell_of == torch.arange(self.count)).all()
        )

    def spread(self, x: Tensor) -> list[Tensor]:
        """Slots [N, heads, d] -> one [documents, heads, length, d] a group."""
        return [x[group.slots].transpose(1, 2) for group in self.groups]

    def place(self, x: Tensor, at: Tensor) -> list[Tensor]:
        """Rows [M, heads, d] of the slots `at` [M], elsewhere zeros; laid out as by `spread`."""
        grid = x.new_zeros(self.cells, *x.shape[1:])
        grid[self.cell_of[at]] = x
        return self._split(grid)

    def collect(self, parts: Sequence[Tensor], at: Tensor | None = None) -> Tensor:
        """What `spread` laid out, [documents, heads, length, ...] a group, at slots `at`."""
        flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        grid = flat[0] if len(flat) == 1 else torch.cat(flat)
        if at is None:
            return grid if self.as_they_are else grid[self.cell_of]
        return grid[self.cell_of[at]]

    def _split(self, grid: Tensor) -> list[Tensor]:
        return [
            grid[g.first : g.first + g.slots.numel()].unflatten(0, g.slots.shape).transpose(1, 2)
            for g in self.groups
        ]


def document_lengths(documents: Tensor) -> list[int]:
    """Documents [rows, length], -1 for padding -> the length of each, row by row."""
    row = torch.arange(documents.shape[0], device=documents.device).unsqueeze(1)
    names = documents + row * (int(documents.max()) + 2)
    lengths: list[int] = names[documents >= 0].unique_consecutive(return_counts=True)[1].tolist()
    return lengths


def _by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Documents in groups of similar lengths; in their order within each."""
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[i] < _SAME_GROUP * longest:
            groups.append([])
            longest = lengths[i]
        groups[-1].append(i)
    return [sorted(group) for group in groups]


class TttAttention:
    """The attention of M queries, each at a slot of its own, over the N slots of `documents`.

    `at` [M]: the queries' slots, ascending. The keys and values of step 0 are those of all slots.
    """

    def __init__(self, documents: Documents, at: Tensor, scale: float) -> None:
        self.documents, self.at, self.scale = documents, at, scale
        self.first: tuple[Tensor, Tensor] | None = None
        self.spread_out: tuple[list[Tensor], list[Tensor]] | None = None

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take step 0's keys [N, kv_heads, d_k] and values [N, kv_heads, d_v]."""
        self.first = (keys, values)
        if keys.device.type == "cpu":
            wide = max(keys.shape[-1], values.shape[-1])
            self.spread_out = (
                self.documents.spread(_widened(keys.detach(), wide)),
                self.documents.spread(_widened(values.detach(), wide)),
            )

    def __call__(self, q: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """q [M, heads, d_k] and the keys and values of its own steps, each [M, kv_heads, d].

        Returns [M, heads, d_v].
        """
        assert self.first is not None
        flat = [x for pair in own for x in pair]
        if q.device.type != "cpu" and q.dtype not in (torch.bfloat16, torch.float16):
            return self._by_hand(q, own)
        attended: Tensor = _Attend.apply(self, q, *self.first, *flat)
        return attended

    def _by_hand(self, q: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Where no flash kernel takes the dtype: scores written out, group by group."""
        assert self.first is not None
        documents, (k0, v0) = self.documents, self.first
        groups = q.shape[1] // k0.shape[1]
        outs, sums = [], []
        grids = (documents.place(q, self.at), documents.spread(k0), documents.spread(v0))
        for query, key, value in zip(*grids, strict=True):
            by_key = query.unflatten(1, (-1, groups))  # [D, kv_heads, groups, L, d]
            scores = by_key @ key.unsqueeze(2).transpose(3, 4) * self.scale
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
            total = scores.logsumexp(-1, keepdim=True)
            outs.append(((scores - total).exp() @ value.unsqueeze(2)).flatten(1, 2))
            sums.append(total.flatten(1, 2))
        out = documents.collect(outs, self.at)  # [M, heads, d_v]
        total = documents.collect(sums, self.at).squeeze(-1)  # [M, heads]
        scores_own = [_own_scores(q, key) * self.scale for key, _ in own]
        joint = torch.stack([total, *scores_own]).logsumexp(0)
        out = out * (total - joint).exp().unsqueeze(-1)
        for score, (_, value) in zip(scores_own, own, strict=True):
            out = out + _per_group(value, groups) * (score - joint).exp().unsqueeze(-1)
        return out


def _widened(x: Tensor, wide: int) -> Tensor:
    """The flash kernels want keys and values of one width; zeros change neither."""
    return x if x.shape[-1] == wide else F.pad(x, (0, wide - x.shape[-1]))


def _per_group(x: Tensor, groups: int) -> Tensor:
    """[M, kv_heads, d] -> [M, kv_heads * groups, d], a key head's queries side by side."""
    return x if groups == 1 else x.unsqueeze(2).expand(-1, -1, groups, -1).flatten(1, 2)


def _own_scores(q: Tensor, key: Tensor) -> Tensor:
    """q [M, heads, d] · key [M, kv_heads, d] -> [M, heads], unscaled, float32."""
    by_key = q.unflatten(1, (key.shape[1], -1))  # [M, kv_heads, groups, d]
    return (by_key * key.unsqueeze(2)).sum(-1, dtype=_score_dtype(q)).flatten(1)


def _score_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Attend(torch.autograd.Function):
    """The causal part and the own past, joined; see the module's docstring."""

    @staticmethod
    def forward(ctx: Any, attention: TttAttention, q: Tensor, *past: Tensor) -> Tensor:
        """`past`: keys and values of step 0 [N, ...], then of each own step [M, ...]."""
        k0, v0, *own = past
        causal, state, total = _causal(attention, q, k0, v0)
        keys, values = own[0::2], own[1::2]
        groups = q.shape[1] // k0.shape[1]
        scores = [_own_scores(q, key) * attention.scale for key in keys]  # each [M, heads]
        joint = torch.stack([total, *scores]).logsumexp(0) if scores else total
        weights = [(score - joint).exp_() for score in scores]
        out = causal[..., : v0.shape[-1]]
        if scores:
            out = out * (total - joint).exp_().unsqueeze(-1)
        for weight, value in zip(weights, values, strict=True):
            spread = weight.unsqueeze(-1).unflatten(1, (-1, groups))
            out.unflatten(1, (-1, groups)).add_(value.unsqueeze(2) * spread)
        out = out.to(q.dtype)
        ctx.attention, ctx.state = attention, state
        ctx.save_for_backward(q, joint, out, *past, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attention = ctx.attention
        q, joint, out, k0, v0, *rest = ctx.saved_tensors
        steps = len(rest) // 3
        own, weights = rest[: 2 * steps], rest[2 * steps :]
        grad = grads[0].contiguous()
        dq, dk0, dv0 = _causal_backward(attention, ctx.state, grad, (q, k0, v0, out, joint))
        groups = q.shape[1] // k0.shape[1]
        by_key = grad.unflatten(1, (-1, groups))  # [M, kv_heads, groups, d_v]
        query = q.unflatten(1, (-1, groups))
        along = (grad * out).sum(-1, dtype=joint.dtype).unflatten(1, (-1, groups))
        dq = dq.unflatten(1, (-1, groups))
        past: list[Tensor] = []
        for i in range(steps):
            key, value = own[2 * i], own[2 * i + 1]
            weight = weights[i].unflatten(1, (-1, groups))  # [M, kv_heads, groups]
            slope = (by_key * value.unsqueeze(2)).sum(-1, dtype=joint.dtype) - along
            slope = (slope * weight * attention.scale).unsqueeze(-1).to(q.dtype)
            dq = dq + slope * key.unsqueeze(2)
            past.append((slope * query).sum(2))
            past.append((by_key * weight.unsqueeze(-1).to(q.dtype)).sum(2))
        return None, dq.flatten(1, 2), dk0, dv0, *past


def _causal(
    attention: TttAttention, q: Tensor, k0: Tensor, v0: Tensor
) -> tuple[Tensor, Any, Tensor]:
    """The causal part alone: output [M, heads, d], what backward needs, log-sum-exp [M, heads]."""
    documents, at, scale = attention.documents, attention.at, attention.scale
    wide = max(k0.shape[-1], v0.shape[-1])
    q = _widened(q, wide)
    if q.device.type == "cpu":
        assert attention.spread_out is not None
        outs, sums = [], []
        grids = (documents.place(q, at), *attention.spread_out)
        for query, key, value in zip(*grids, strict=True):
            out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, True, scale=scale
            )
            outs.append(out)
            sums.append(total)  # [documents, heads, length]
        return documents.collect(outs, at), None, documents.collect(sums, at)
    everywhere = _everywhere(q, at, documents.count)
    out, total, *state = torch.ops.aten._flash_attention_forward(
        everywhere, _widened(k0, wide), _widened(v0, wide), documents.edges, documents.edges,
        documents.longest, documents.longest, 0.0, True, False, scale=scale,
    )  # fmt: skip
    return out[at], state[:2], total.T[at]  # total: [heads, N]


def _causal_backward(
    attention: TttAttention, state: Any, grad: Tensor, saved: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The causal part's gradients of q [M, ...], and of step 0's keys and values [N, ...]."""
    q, k0, v0, out, joint = saved
    documents, at, scale = attention.documents, attention.at, attention.scale
    wide = max(k0.shape[-1], v0.shape[-1])
    q, grad, out = (_widened(x, wide) for x in (q, grad, out))
    if q.device.type == "cpu":
        assert attention.spread_out is not None
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        placed = (documents.place(x, at) for x in (grad, q))
        results = (documents.place(x, at) for x in (out, joint))
        for d, query, key, value, o, total in zip(
            *placed, *attention.spread_out, *results, strict=True
        ):
            found.append(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    d, query, key, value, o, total, 0.0, True, scale=scale
                )
            )
        dq, dk, dv = zip(*found, strict=True)
        grads = documents.collect(dq, at), documents.collect(dk), documents.collect(dv)
    else:
        d, query, o, total = (_everywhere(x, at, documents.count) for x in (grad, q, out, joint))
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            d, query, _widened(k0, wide), _widened(v0, wide), o, total.T.contiguous(),
            documents.edges, documents.edges, documents.longest, documents.longest,
            0.0, True, *state, scale=scale,
        )  # fmt: skip
        grads = dq[at], dk, dv
    d_k, d_v = k0.shape[-1], v0.shape[-1]
    return grads[0][..., :d_k], grads[1][..., :d_k], grads[2][..., :d_v]


def _everywhere(x: Tensor, at: Tensor, count: int) -> Tensor:
    """Rows [M, ...] of the slots `at` among all [N, ...], elsewhere zeros."""
    if at.numel() == count:
        return x
    grid = x.new_zeros(count, *x.shape[1:])
    grid[at] = x
    return grid
