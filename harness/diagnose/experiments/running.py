"""A reading run over many slots at once: the trainer's unrolled pass with one thing otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from harness.diagnose.experiments.altered import Altered
from training.unroll import CHUNK, Captured, Unroll, shift


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Where an engine's calls lie, for M drafting slots in a batch of [rows, length] tokens.

    `first` [rows, length]: the position at which the call began that brought each token's states.
    `decode` [rows, length]: whether that call was a verify step. `before` [M]: for each slot the
    one of the same request's previous call, itself where there is none. `drafts` [M, k]: what the
    engine proposed.
    """

    first: Tensor
    decode: Tensor
    last: Tensor
    before: Tensor
    drafts: Tensor


class Run(Unroll):
    """The trainer's steps with a reading's one thing otherwise."""

    def __init__(
        self, altered: Altered, captured: Captured, slots: Tensor, calls: Calls | None = None
    ) -> None:
        aux = captured.aux if altered.states is None else altered.states(captured.aux)
        super().__init__(altered.drafter, captured, slots, aux=aux)
        self.name, self.calls = altered.name, calls
        self.fused = self.hidden[self.attention.at]  # [M, H]
        self.first: Tensor | None = None

    def text(self, step: int) -> Tensor:
        """The text's tokens, or those beside them."""
        by = {"tokens not shifted": 0, "tokens shifted twice": 2}.get(self.name, 1)
        index = self.slots if step else self.real
        return shift(self.batch.ids, step + by).flatten()[index]

    def step(self, ids: Tensor) -> Tensor:
        """Run the next step; states for the logits [M, H]."""
        if self.done == 1:
            self.first = self.hidden
        if self.done:
            self.hidden = self._carried(self.hidden)
        return super().step(ids)

    def fed(self, tokens: Tensor, step: int) -> Tensor:
        """What the engine feeds in `step` >= 1 where the step before proposed `tokens` [M]."""
        if self.name == "first token fed again":
            return shift(self.batch.ids, 1).flatten()[self.slots]
        if self.name.endswith("tokens of the previous call") and self.calls is not None:
            return self.calls.drafts[self.calls.before, step - 1]
        return tokens

    def _carried(self, hidden: Tensor) -> Tensor:
        if self.name == "fused state fed again":
            return self.fused
        if self.name == "recurrent state zero":
            return torch.zeros_like(hidden)
        if self.name == "first state fed again" and self.first is not None:
            return self.first
        if self.name.startswith("states") and self.name.endswith("of the previous call"):
            return hidden if self.calls is None else hidden[self.calls.before]
        return hidden

    def _project(self, ids: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        ids = ids.clamp(0, self.drafter.spec.vocab_size - 1)
        return super()._project(ids, hidden, self._positions(positions))

    def _positions(self, positions: Tensor) -> Tensor:
        done = self.done
        if self.name == "positions frozen in drafting":
            return positions - done
        if self.name == "positions doubled in drafting":
            return positions + done
        if self.calls is None:
            return positions
        index = self.slots if done else self.real
        first, decode = self.calls.first.flatten()[index], self.calls.decode.flatten()[index]
        if self.name == "positions restarted at each call":
            return torch.where(decode, positions - first, positions)
        if self.name == "positions of a call frozen":
            return torch.where(decode, first + done, positions)
        if self.name == "positions ahead by one in decode":
            return positions + decode.long()
        if self.name == "positions zero in decode":
            return torch.where(decode, 0, positions)
        if self.name == "positions zero from the prompt's last token on":
            last = self.calls.last.flatten()[index]
            return torch.where(decode | last, 0, positions)
        return positions


@torch.no_grad()
def chain(altered: Altered, captured: Captured, k: int, slots: Tensor) -> Tensor:
    """The k tokens that the reading proposes at `slots` [rows, length]; [rows, length, k]."""
    run = Run(
        altered, captured, (slots & (captured.batch.documents >= 0)).flatten().nonzero().flatten()
    )
    tokens = [best(altered.drafter, run.step(run.text(0)))]
    while len(tokens) < k:
        tokens.append(best(altered.drafter, run.step(run.fed(tokens[-1], len(tokens)))))
    return run.everywhere(torch.stack(tokens, dim=-1))


def best(drafter: Eagle3Drafter, normed: Tensor) -> Tensor:
    """The likeliest token [M], as the target's id."""
    size = max(CHUNK // drafter.spec.draft_vocab_size, 1)
    found = torch.cat([drafter.logits(part).argmax(-1) for part in normed.split(size)])
    return drafter.to_target(found)


@torch.no_grad()
def agreement(
    altered: Altered, captured: Captured, slots: Tensor, calls: Calls, tie: float
) -> Tensor:
    """Where the reading proposes what the engine did, bool [M, k]; `slots` [M], flat.

    Each step is fed what the engine proposed before, so that one difference is counted once. A
    token whose logit is within `tie` of the largest counts as proposed.
    """
    run = Run(altered, captured, slots, calls)
    found = []
    for step in range(calls.drafts.shape[1]):
        fed = run.fed(calls.drafts[:, step - 1], step) if step else run.text(0)
        found.append(proposed(altered.drafter, run.step(fed), calls.drafts[:, step], tie))
    return torch.stack(found, dim=1)


def proposed(drafter: Eagle3Drafter, normed: Tensor, tokens: Tensor, tie: float) -> Tensor:
    """Whether the target's ids `tokens` [M] are the likeliest for states [M, H], or tie, [M]."""
    mine = draft_ids(drafter, tokens)
    found = []
    for logits, draft in _by_parts(drafter, normed, mine):
        own = logits.gather(1, draft.clamp_min(0)[:, None]).squeeze(1)
        found.append((draft >= 0) & (own >= logits.amax(-1) - tie))
    return torch.cat(found)


def log_chance(drafter: Eagle3Drafter, normed: Tensor, tokens: Tensor) -> Tensor:
    """log q of the target's ids `tokens` [M] for states [M, H]; -inf where no draft id is one."""
    mine = draft_ids(drafter, tokens)
    found = []
    for logits, draft in _by_parts(drafter, normed, mine):
        own = logits.log_softmax(-1).gather(1, draft.clamp_min(0)[:, None]).squeeze(1)
        found.append(own.masked_fill(draft < 0, -torch.inf))
    return torch.cat(found)


def draft_ids(drafter: Eagle3Drafter, tokens: Tensor) -> Tensor:
    """The draft ids [M] that stand for the target's ids [M]; -1 where none does."""
    size = drafter.spec.vocab_size
    ids = drafter.to_target(torch.arange(drafter.spec.draft_vocab_size))
    inside = (ids >= 0) & (ids < size)
    back = torch.full((size,), -1)
    back[ids[inside]] = torch.arange(ids.numel())[inside]
    known = (tokens >= 0) & (tokens < size)
    return torch.where(known, back[tokens.clamp(0, size - 1)], -1)


def _by_parts(
    drafter: Eagle3Drafter, normed: Tensor, ids: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Float logits of a part of the states at a time, and the ids [M] that belong to them."""
    size = max(CHUNK // drafter.spec.draft_vocab_size, 1)
    for part, own in zip(normed.split(size), ids.split(size), strict=True):
        yield drafter.logits(part).float(), own
