"""Runs the reference engine's drafter otherwise than its checkpoint says.

Each fault is a subclass that takes the place of the proposer's class: whoever wraps the proposer,
the trace above all, sees what it is handed unspoiled and what it proposes.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engines.reference.cache import Batch, attend
from engines.reference.draft import EagleProposer

if TYPE_CHECKING:
    from engines.reference.engine import Engine
    from engines.reference.sampling import SamplingParams

Drafts = tuple[Tensor, Tensor | None]


class Faulty(EagleProposer):
    """An EAGLE proposer that knows which of its calls goes wrong: a `share` of them."""

    share: float
    coins: random.Random
    wrong: bool  # whether this call goes wrong
    catching_up: bool
    step: int  # of the draft steps of this call, from 1

    def planted(self) -> None:
        """Called once, when the class has taken its place."""

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        self.wrong, self.catching_up = self.coins.random() < self.share, False
        self.step = 0
        super().begin(slot, tokens, aux)

    def propose(
        self, rows: int, params: list[SamplingParams] | None, uniform: Tensor | None
    ) -> Drafts:
        self.wrong, self.step = self.coins.random() < self.share, 0
        return super().propose(rows, params, uniform)

    def _catch_up(self, rows: int) -> tuple[Tensor, Tensor]:
        self.catching_up = True
        try:
            return super()._catch_up(rows)
        finally:
            self.catching_up = False

    def _layer(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.catching_up and batch.tokens == 1:
            self.step += 1
        return super()._layer(ids, hidden, batch)


class Unshifted(Faulty):
    """Slot t is fed token t, not token t + 1."""

    def planted(self) -> None:
        self.newest: dict[int, int] = {}

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        self.newest[slot] = tokens[-1]
        wrong = self.coins.random() < self.share
        super().begin(slot, [tokens[0], *tokens[:-1]] if wrong else tokens, aux)

    def record(self, starts: list[int], accepted: list[int], tokens: Tensor, aux: Tensor) -> None:
        late = tokens.clone()
        late[:, 1:] = tokens[:, :-1]
        for row, count in enumerate(accepted):
            late[row, 0] = self.newest[row]
            self.newest[row] = int(tokens[row, count])
            if self.coins.random() >= self.share:
                late[row] = tokens[row]
        super().record(starts, accepted, late, aux)

    def move(self, source: int, target: int) -> None:
        self.newest[target] = self.newest[source]
        super().move(source, target)


class Restarted(Faulty):
    """Positions are counted from 0 in every call, as if the text began there."""

    def _layer(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.wrong and (self.catching_up or batch.tokens == 1):
            begin = torch.tensor(self.starts[: batch.rows])[:, None]
            batch.positions = batch.positions - begin  # the cache's places stay right
        return super()._layer(ids, hidden, batch)


class WithoutResidual(Faulty):
    """The layer's attention is not added to what entered it."""

    def planted(self) -> None:
        drafter: Any = self.drafter
        whole = drafter.finish

        def finish(attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            return whole(attended, torch.zeros_like(residual) if self.wrong else residual)

        drafter.finish = finish


class Forgetful(Faulty):
    """Every draft step takes the fused states again, not the drafter's own."""

    def planted(self) -> None:
        self.fused: Tensor | None = None

    def _layer(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.catching_up:
            at = torch.tensor(self.last[: batch.rows])
            self.fused = hidden[torch.arange(batch.rows), at][:, None]
        elif self.wrong and batch.tokens == 1 and self.fused is not None:
            hidden = self.fused
        return super()._layer(ids, hidden, batch)


class NotOverwritten(Faulty):
    """Slots that drafts were written in keep the drafts' keys and values."""

    def planted(self) -> None:
        self.drafted: set[int] = set()

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        self.drafted.discard(slot)
        super().begin(slot, tokens, aux)

    def move(self, source: int, target: int) -> None:
        known = source in self.drafted
        self.drafted.discard(target)
        if known:
            self.drafted.add(target)
        self.cache.move(source, target, self.starts[source] + self.k)
        super().move(source, target)

    def propose(
        self, rows: int, params: list[SamplingParams] | None, uniform: Tensor | None
    ) -> Drafts:
        drafts = super().propose(rows, params, uniform)
        self.drafted.update(range(rows))
        return drafts

    def _layer(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if not (self.catching_up and self.wrong):
            return super()._layer(ids, hidden, batch)
        drafter = self.drafter
        q, k, v, residual = drafter.project(drafter.embed(ids), hidden, batch.positions)
        assert self.cache.values is not None
        stores = [self.cache.keys[0], self.cache.values[0]]
        kept = [store.clone() for store in stores]
        self.cache.write(0, batch, k, v)
        for row in set(range(batch.rows)) & self.drafted:
            start = self.starts[row]
            for store, old in zip(stores, kept, strict=True):
                store[row, :, start : start + self.k - 1] = old[row, :, start : start + self.k - 1]
        keys, values = self.cache.read(0, batch)
        return attend(q, keys, values, batch, drafter.scale), residual


class PromptLost(Faulty):
    """The prompt's keys and values never reach the drafter's cache."""

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        super().begin(slot, tokens, aux)
        if self.wrong:
            assert self.cache.values is not None
            for store in (self.cache.keys[0], self.cache.values[0]):
                store[slot] = 0


class Swapped(Faulty):
    """Each request of a batch gets the drafts of the next one."""

    def propose(
        self, rows: int, params: list[SamplingParams] | None, uniform: Tensor | None
    ) -> Drafts:
        drafts, chances = super().propose(rows, params, uniform)
        if rows < 2 or not self.wrong:
            return drafts, chances
        return drafts.roll(1, 0), None if chances is None else chances.roll(1, 0)


class StaleInputs(Faulty):
    """The draft steps after the first read the state that the call before left there."""

    def planted(self) -> None:
        self.buffers: dict[int, Tensor] = {}

    def _layer(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.catching_up and batch.tokens == 1:
            place = self.buffers.setdefault(
                self.step, torch.zeros(self.cache.slots, 1, hidden.shape[-1])
            )
            old = place[: batch.rows].clone()
            place[: batch.rows] = hidden
            hidden = old if self.wrong else hidden
        return super()._layer(ids, hidden, batch)


class GreedyDrafts(Faulty):
    """Drafts are the likeliest tokens at every temperature."""

    def propose(
        self, rows: int, params: list[SamplingParams] | None, uniform: Tensor | None
    ) -> Drafts:
        drafts, _ = super().propose(rows, None, None)
        if params is None:
            return drafts, None
        shape = (*drafts.shape, self.vocab_size)
        return drafts, torch.zeros(shape).scatter_(-1, drafts[..., None], 1.0)


KINDS: dict[str, type[Faulty]] = {
    "unshifted": Unshifted,
    "restarted": Restarted,
    "without_residual": WithoutResidual,
    "forgetful": Forgetful,
    "not_overwritten": NotOverwritten,
    "prompt_lost": PromptLost,
    "swapped": Swapped,
    "stale_inputs": StaleInputs,
    "greedy_drafts": GreedyDrafts,
}


def run_wrongly(engine: Engine, *, kind: str, share: float = 1.0, seed: int = 0) -> None:
    """Give the engine's proposer the class of `kind`."""
    proposer: Any = engine.proposer
    while hasattr(proposer, "inner"):
        proposer = proposer.inner
    proposer.__class__ = KINDS[kind]
    proposer.share, proposer.coins = share, random.Random(seed)
    proposer.wrong = proposer.catching_up = False
    proposer.step = 0
    proposer.planted()


def change_drafter(engine: Engine, *, what: str) -> None:
    """Swap or drop a part of the loaded drafter: what an engine does that reads it otherwise."""
    proposer: Any = engine.proposer
    while hasattr(proposer, "inner"):
        proposer = proposer.inner
    drafter = proposer.drafter
    if what == "target_lm_head":
        head = engine.model.head.weight  # [H, V]
        kept = drafter.t2d
        drafter._modules["lm_head"] = _Product(head if kept is None else head[:, kept])
    elif what == "target_embeddings":
        drafter._modules["embed_tokens"] = nn.Embedding.from_pretrained(engine.model.embedding)
    elif what == "no_input_norm":
        drafter._modules.pop("input_norm", None)
        drafter._modules.pop("fc_norm", None)
        drafter.input_norm = drafter.fc_norm = None
    else:  # a flag of the spec, toggled
        import msgspec

        drafter.spec = msgspec.structs.replace(
            drafter.spec, **{what: not getattr(drafter.spec, what)}
        )


class _Product(nn.Module):
    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix
