"""Readings that concern the drafter's cache, run call by call as an engine runs them.

The reference engine's own drafting, with all requests of a trace in step: call c of each together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from engines.reference.cache import Batch, attend
from engines.reference.draft import EagleProposer
from harness.diagnose.experiments.running import proposed
from harness.diagnose.experiments.traced import Replayed, Traced


@torch.no_grad()
def cached_agreement(name: str, drafter: Eagle3Drafter, replayed: Replayed, tie: float) -> Tensor:
    """Where the reading `name` proposes what the engine did, bool [M, k].

    A call that cannot be taken up (more rows than a verify step has) agrees nowhere.
    """
    k = replayed.calls.drafts.shape[1]
    found = torch.zeros(replayed.calls.drafts.shape, dtype=torch.bool)
    firsts = _first_calls(replayed)
    # the requests with the most calls first: those still under way are always the first rows
    order = sorted(range(len(firsts)), key=lambda row: -len(replayed.requests[row].calls))
    requests = [replayed.requests[row] for row in order]
    proposer = _Proposer(name, drafter, k, requests)
    for number in range(len(requests[0].calls)):
        rows = sum(len(one.calls) > number for one in requests)
        at = torch.tensor([firsts[order[row]] + number for row in range(rows)])
        whole = proposer.take(requests[:rows], number)
        agreed = proposer.call(rows, replayed.calls.drafts[at], tie)
        found[at] = agreed & whole[:, None]
    return found


def _first_calls(replayed: Replayed) -> list[int]:
    """Each request's first call among the M."""
    found, done = [], 0
    for one in replayed.requests:
        found.append(done)
        done += len(one.calls)
    return found


class _Proposer(EagleProposer):
    """The drafter's chain, fed what the engine proposed, with the cache as the reading says."""

    def __init__(self, name: str, drafter: Eagle3Drafter, k: int, requests: list[Traced]) -> None:
        length = max(one.known for one in requests) + 1
        super().__init__(
            drafter, k=k, slots=len(requests), length=length, vocab_size=drafter.spec.vocab_size
        )
        self.name = name
        self.prompts = [one.calls[0].slot for one in requests]
        self.keep: Tensor | None = None  # [n, k + 1]: entries that are not overwritten
        for slot, one in enumerate(requests):
            until = one.calls[0].slot + 1
            self.begin(slot, one.tokens[: until + 1], one.aux[:until])
        if name == "cache of the prompt zero":
            self._each(lambda tensor: tensor.zero_())
        elif name == "cache of another's prompt":
            self._each(lambda tensor: tensor.copy_(tensor.roll(1, 0)))

    def _each(self, change) -> None:  # type: ignore[no-untyped-def]
        for tensor in (*self.cache.keys, *(self.cache.values or [])):
            change(tensor)

    def take(self, requests: list[Traced], number: int) -> Tensor:
        """The rows that each request's call brings; which of them have room, bool [n]."""
        whole = torch.ones(len(requests), dtype=torch.bool)
        self.keep = None
        if number == 0:
            return whole
        keep = torch.zeros(len(requests), self.k + 1, dtype=torch.bool)
        for row, one in enumerate(requests):
            start, until = one.calls[number - 1].slot + 1, one.calls[number].slot + 1
            count = until - start
            whole[row] = 1 <= count <= self.k + 1
            count = max(1, min(count, self.k + 1))
            self.tokens[row, :count] = torch.tensor(one.tokens[start + 1 : start + 1 + count])
            self.aux[row, :count] = one.aux[start : start + count]
            self.starts[row], self.last[row] = start, count - 1
            kept = {"cache not overwritten": self.k - 1}
            kept["cache overwritten at its end only"] = min(self.k - 1, count - 1)
            keep[row, : kept.get(self.name, 0)] = True
        self.keep = keep
        return whole

    def call(self, rows: int, drafts: Tensor, tie: float) -> Tensor:
        """One call of the first `rows` requests; whether it proposes `drafts` [n, k]."""
        hidden, normed = self._catch_up(rows)
        self.keep = None
        ends = [self.starts[row] + self.last[row] for row in range(rows)]
        found = []
        for step in range(self.k):
            if step > 0:
                batch = self._batch(0, [end + step for end in ends], 1)
                fed = drafts[:, step - 1 : step].clamp_min(0)
                attended, residual = self._layer(fed, hidden, batch)
                hidden, normed = self.drafter.finish(attended, residual)
            found.append(proposed(self.drafter, normed[:, 0], drafts[:, step], tie))
        return torch.stack(found, dim=1)

    def _layer(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        drafter, cache = self.drafter, self.cache
        q, k, v, residual = drafter.project(drafter.embed(ids), hidden, batch.positions)
        if self.keep is not None:
            rows = torch.arange(batch.rows)[:, None]
            keep = self.keep[: batch.rows, :, None, None]
            assert cache.values is not None
            k = torch.where(keep, cache.keys[0][rows, :, batch.positions], k)
            v = torch.where(keep, cache.values[0][rows, :, batch.positions], v)
        cache.write(0, batch, k, v)
        if self.name == "cache of the prompt unseen" and hasattr(self, "prompts"):
            self._hide_prompts(batch)
        keys, values = cache.read(0, batch)
        return attend(q, keys, values, batch, drafter.scale), residual

    def _hide_prompts(self, batch: Batch) -> None:
        mask = batch.mask
        if mask is None:
            mask = torch.zeros(batch.rows, batch.tokens, batch.span)
        prompts = torch.tensor(self.prompts[batch.first_slot : batch.first_slot + batch.rows])
        hidden = torch.arange(batch.span) < prompts[:, None]
        batch.mask = mask.masked_fill(hidden[:, None], -torch.inf)
