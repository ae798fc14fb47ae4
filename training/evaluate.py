"""What a drafter would be accepted, walked offline over the target's own output.

The walk goes as an engine goes: draft at t, verify, continue at t + accepted + 1. With greedy
decoding and equal arithmetic its counts equal an engine's, draft for draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from training.loss import target_choice
from training.unroll import Captured, Unroll, greedy_tokens


class DraftCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a walk; rates are pooled from counts, never averaged."""

    drafts: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verify step, bonus included; None without a draft."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens; None without a draft."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def position_rates(self) -> tuple[float, ...] | None:
        """Per position, the share of drafts accepted at least that far; None without a draft."""
        return tuple(n / self.drafts for n in self.per_position) if self.drafts else None

    def __add__(self, other: DraftCounts) -> DraftCounts:
        pairs = zip(self.per_position, other.per_position, strict=True)
        return DraftCounts(
            drafts=self.drafts + other.drafts,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            per_position=tuple(a + b for a, b in pairs),
        )


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Where one reply lies in a row: its tokens are begin … end - 1, `known` may reach beyond.

    Tokens end … known - 1 are what the target would have gone on with; an engine that drafts past
    the end token has them verified too.
    """

    row: int
    begin: int
    end: int
    known: int


@torch.no_grad()
def draft_everywhere(
    drafter: Eagle3Drafter, captured: Captured, k: int, *, slots: Tensor | None = None
) -> Tensor:
    """The k tokens the drafter proposes at every slot, [rows, length, k] target ids.

    `slots` [rows, length], bool: only at these; elsewhere, and on padding, zeros.
    """
    real = captured.batch.documents >= 0
    chosen = real if slots is None else real & slots
    run = Unroll(drafter, captured, chosen.flatten().nonzero().flatten())
    tokens = [greedy_tokens(drafter, run.step(run.text(0)))]
    while len(tokens) < k:
        tokens.append(greedy_tokens(drafter, run.step(tokens[-1])))
    return run.everywhere(torch.stack(tokens, dim=-1))


def walk(drafts: Tensor, ids: Tensor, span: Span) -> DraftCounts:
    """Walk one reply; `drafts` [rows, length, k], `ids` [rows, length] the target's greedy output.

    The first token of the reply comes from the prefill, so the first draft is made at the slot of
    the prompt's last token.
    """
    k = drafts.shape[-1]
    proposed = drafts[span.row].tolist()
    tokens = ids[span.row].tolist()
    made, per_position = 0, [0] * k
    newest = span.begin  # index of the newest token known to the engine
    while newest < span.end - 1:
        made += 1
        accepted = 0
        for i, token in enumerate(proposed[newest - 1]):
            at = newest + 1 + i
            if at >= span.known or token != tokens[at]:
                break
            per_position[i] += 1
            accepted += 1
        newest += accepted + 1
    return DraftCounts(
        drafts=made, drafted=made * k, accepted=sum(per_position), per_position=tuple(per_position)
    )


def walk_all(drafts: Tensor, ids: Tensor, spans: Sequence[Span]) -> DraftCounts:
    """The pooled counts of several replies."""
    k = drafts.shape[-1]
    total = DraftCounts(drafts=0, drafted=0, accepted=0, per_position=(0,) * k)
    for span in spans:
        total = total + walk(drafts, ids, span)
    return total


def proof_share(captured: Captured, lm_head: Tensor) -> float:
    """How often argmax lm_head(last state) is the very next token, over loss-masked tokens.

    On greedy output of the target this is nearly 1; far less means that the states belong to
    other tokens, or miss (or have twice) the final norm.
    """
    batch = captured.batch
    slots = batch.loss_mask[:, 1:]
    choice = target_choice(captured.last_normed[:, :-1][slots], lm_head)
    return (choice == batch.ids[:, 1:][slots]).float().mean().item()
