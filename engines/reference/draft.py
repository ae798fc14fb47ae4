"""Drafting with an EAGLE-3 head: a chain of k tokens for every running request at once.

Slot t of the drafter's cache holds token t + 1 beside the target's aux states of token t, at
position t. A verify step that accepted a tokens makes a + 1 new slots known. The next call first
writes these from the target's states (`_catch_up`), which replaces whatever the drafter had
written there from its own, and gives the first draft; each further draft continues one position
on with the drafter's own hidden state.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from engines.base import EngineUsageError
from engines.reference.cache import Batch, KvCache, attend
from engines.reference.sampling import SamplingParams, distributions, pick

if TYPE_CHECKING:
    from drafters.eagle3 import Eagle3Drafter


class Proposer(Protocol):
    """Whatever proposes draft tokens for the running requests, held in slots 0 to n-1."""

    k: int
    aux_layers: tuple[int, ...]

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        """A request enters `slot`: its prompt and first output token [n + 1], aux [n, A]."""

    def record(self, starts: list[int], accepted: list[int], tokens: Tensor, aux: Tensor) -> None:
        """A verify step from positions `starts`: tokens [n, k + 1] of which a + 1 count, aux."""

    def move(self, source: int, target: int) -> None:
        """A request changes its slot."""

    def propose(
        self, rows: int, params: list[SamplingParams] | None, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Drafts [n, k] and, where `params` are given, what they were sampled from [n, k, V]."""


class EagleProposer:
    """An EAGLE-3 drafter with its own cache, in step with the target's slots."""

    def __init__(
        self, drafter: Eagle3Drafter, *, k: int, slots: int, length: int, vocab_size: int
    ) -> None:
        spec = drafter.spec
        if spec.max_position_embeddings < length:
            raise EngineUsageError(
                f"the drafter knows {spec.max_position_embeddings} positions, fewer than the "
                f"context of {length}; serve with --max-model-len {spec.max_position_embeddings}"
            )
        self.drafter, self.k, self.aux_layers = input_major(drafter), k, spec.aux_layers
        self.vocab_size = vocab_size
        self.device = str(drafter.embed_tokens.weight.device)
        dtype = drafter.embed_tokens.weight.dtype
        if spec.mla is not None:
            heads, value_dim = spec.num_attention_heads, spec.mla.v_head_dim
            key_dim = spec.mla.qk_nope_head_dim + spec.mla.qk_rope_head_dim
        else:
            heads, key_dim, value_dim = spec.num_key_value_heads, spec.head_dim, spec.head_dim
        self.cache = KvCache(
            layers=1,
            slots=slots,
            length=length + 2 * k + 2,
            kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
            device=self.device,
        )
        # what the target has said and the drafter has not seen yet, by slot
        width = len(spec.aux_layers) * spec.target_hidden_size
        self.aux = torch.zeros(slots, k + 1, width, dtype=dtype, device=self.device)
        self.tokens = torch.zeros(slots, k + 1, dtype=torch.int64, device=self.device)
        self.starts = [0] * slots  # position of the first new slot
        self.last = [0] * slots  # index of the last one within the k + 1

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        """Write the prompt's slots but the last, which `propose` writes."""
        known = len(tokens) - 2
        if known > 0:
            batch = self._batch(slot, [0], known)
            ids = torch.tensor([tokens[1:-1]], device=self.device)
            self._layer(ids, self.drafter.fuse(aux[None, :-1]), batch)
        self.aux[slot, 0] = aux[-1]
        self.tokens[slot, 0] = tokens[-1]
        self.starts[slot], self.last[slot] = known, 0

    def record(self, starts: list[int], accepted: list[int], tokens: Tensor, aux: Tensor) -> None:
        """Keep the step's tokens and aux states for the next `propose`."""
        rows = len(starts)
        self.tokens[:rows], self.aux[:rows] = tokens, aux
        self.starts[:rows], self.last[:rows] = starts, accepted

    def move(self, source: int, target: int) -> None:
        """Take a slot's cache and unseen states along."""
        self.cache.move(source, target, self.starts[source])
        self.aux[target], self.tokens[target] = self.aux[source], self.tokens[source]
        self.starts[target], self.last[target] = self.starts[source], self.last[source]

    def propose(
        self, rows: int, params: list[SamplingParams] | None, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A chain of k drafts a row, greedy, or sampled by `uniform` [n, k] where `params` are."""
        hidden, normed = self._catch_up(rows)
        ends = [self.starts[row] + self.last[row] for row in range(rows)]
        drafts: list[Tensor] = []
        chances: list[Tensor] = []
        for step in range(self.k):
            if step > 0:
                batch = self._batch(0, [end + step for end in ends], 1)
                attended, residual = self._layer(drafts[-1], hidden, batch)
                hidden, normed = self.drafter.finish(attended, residual)
            logits = self.drafter.logits(normed)  # [n, 1, D]
            if params is None or uniform is None:
                drafts.append(self.drafter.to_target(logits.argmax(-1)))
                continue
            chance = distributions(logits.float(), params)
            drafts.append(self.drafter.to_target(pick(chance, uniform[:, step : step + 1])))
            chances.append(self._in_target_vocabulary(chance))
        return torch.cat(drafts, dim=1), torch.cat(chances, dim=1) if chances else None

    def _catch_up(self, rows: int) -> tuple[Tensor, Tensor]:
        """Write the new slots, k + 1 a row of which the last count is; the last one's states."""
        batch = self._batch(0, self.starts[:rows], self.k + 1)
        fused = self.drafter.fuse(self.aux[:rows])
        attended, residual = self._layer(self.tokens[:rows], fused, batch)
        at = (torch.arange(rows), torch.tensor(self.last[:rows], device=self.device))
        return self.drafter.finish(attended[at][:, None], residual[at][:, None])

    def _layer(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Attention of the drafter's layer for ids [n, T], hidden [n, T, H]; and the residual."""
        drafter = self.drafter
        q, k, v, residual = drafter.project(drafter.embed(ids), hidden, batch.positions)
        self.cache.write(0, batch, k, v)
        keys, values = self.cache.read(0, batch)
        return attend(q, keys, values, batch, drafter.scale), residual

    def _in_target_vocabulary(self, chance: Tensor) -> Tensor:
        if self.drafter.d2t is None:
            return chance
        ids = self.drafter.to_target(torch.arange(chance.shape[-1], device=chance.device))
        full = chance.new_zeros(*chance.shape[:-1], self.vocab_size)
        full[..., ids] = chance
        return full

    def _batch(self, slot: int, starts: list[int], tokens: int) -> Batch:
        return Batch(self.cache, first_slot=slot, starts=starts, tokens=tokens, device=self.device)


class _InputMajor(nn.Module):
    """An nn.Linear without bias whose weight lies input-major, as `model.Matrix` does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.matrix = linear.weight.detach().t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def input_major(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """A copy of the drafter whose linear layers are laid out for few rows."""
    fast = copy.copy(drafter)
    fast._modules = {name: _rebuilt(module) for name, module in drafter._modules.items()}
    return fast


def _rebuilt(module: nn.Module | None) -> nn.Module | None:
    if isinstance(module, nn.Linear) and module.bias is None:
        return _InputMajor(module)
    if module is None or not module._modules:
        return module
    clone = copy.copy(module)
    clone._modules = {name: _rebuilt(part) for name, part in module._modules.items()}
    return clone
