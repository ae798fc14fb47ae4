"""Held-out figures that serving will show: accuracies by draft step, and the engine's walk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from training.data import Batch
from training.evaluate import DraftCounts, Span, draft_everywhere, walk_all
from training.train.feed import LoadedRow
from training.train.objective import Objective
from training.train.parallel import World, total
from training.trainer import Captured, drafted_slots, shift


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over held-out samples; None where nothing was there to count.

    `accuracy` by TTT step: fed the text's tokens, against the target's choice in its whole
    vocabulary. `marginal` and `conditional` by draft step: fed the drafter's own tokens, against
    the text; conditional on all earlier drafts being right. `acceptance_length` and
    `acceptance_rate` at `k`, walked as an engine walks; tokens behind an answer's end are unknown
    and count as not accepted. `outside`: share of slots whose target choice cannot be drafted.
    """

    samples: int
    tokens: int
    k: int
    loss: float | None
    accuracy: tuple[float | None, ...]
    marginal: tuple[float | None, ...]
    conditional: tuple[float | None, ...]
    outside: float | None
    drafts: int
    acceptance_length: float | None
    acceptance_rate: float | None
    position_rates: tuple[float, ...] | None

    @property
    def standard_error(self) -> float | None:
        """Of the acceptance length, drafts taken as independent; None without a draft."""
        if self.position_rates is None:
            return None
        mean = sum(self.position_rates)
        square = sum((2 * i + 1) * p for i, p in enumerate(self.position_rates))
        return float((max(square - mean**2, 0.0) / self.drafts) ** 0.5)


class Tally:
    """Counts of one process, to be added up over all."""

    def __init__(self, k: int, objective: Objective) -> None:
        self.k, self.objective = k, objective
        self.samples = self.tokens = 0
        self.trained = objective.no_counts()
        self.slots, self.hits = [0] * k, [0] * k
        self.eligible, self.all_right = [0] * k, [0] * k
        self.counts = DraftCounts(drafts=0, drafted=0, accepted=0, per_position=(0,) * k)

    def add_drafts(self, row: LoadedRow, drafts: Tensor, batch: Batch) -> None:
        """What the drafter proposes at every slot of a row, [1, length, k]."""
        answering = drafted_slots(batch, 0)
        before = torch.ones_like(answering)
        for step in range(self.k):
            slots = drafted_slots(batch, step) & answering
            hit = (drafts[..., step] == shift(batch.ids, step + 2)) & slots
            self.slots[step] += int(slots.sum())
            self.hits[step] += int(hit.sum())
            self.eligible[step] += int((slots & before).sum())
            before = before & hit
            self.all_right[step] += int(before.sum())
        self.counts = self.counts + walk_all(drafts.cpu(), batch.ids.cpu(), spans(row))

    def figures(self, world: World) -> HeldOut:
        """The pooled figures of all processes."""
        trained = self.trained.table.flatten().tolist()
        by_step = (self.slots, self.hits, self.eligible, self.all_right, self.counts.per_position)
        head = [
            *(self.samples, self.tokens),
            *(self.counts.drafts, self.counts.drafted, self.counts.accepted),
        ]
        values = total([*head, *trained, *(n for group in by_step for n in group)], world)
        samples, tokens, drafts, drafted, accepted = values[: len(head)]
        counts = self.objective.counts_of(values[len(head) : len(head) + len(trained)])
        rest = values[len(head) + len(trained) :]
        slots, hits, eligible, all_right, positions = (
            rest[i * self.k : (i + 1) * self.k] for i in range(len(by_step))
        )
        walked = DraftCounts(
            drafts=int(drafts),
            drafted=int(drafted),
            accepted=int(accepted),
            per_position=tuple(int(p) for p in positions),
        )
        return HeldOut(
            samples=int(samples),
            tokens=int(tokens),
            k=self.k,
            loss=counts.loss(self.objective.decay),
            accuracy=tuple(counts.accuracy),
            marginal=_shares(hits, slots),
            conditional=_shares(all_right, eligible),
            outside=outside_share(counts.get("outside"), counts.get("judged")),
            drafts=walked.drafts,
            acceptance_length=walked.acceptance_length,
            acceptance_rate=walked.acceptance_rate,
            position_rates=walked.position_rates,
        )


def _shares(part: Sequence[float], whole: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(p / w if w else None for p, w in zip(part, whole, strict=True))


def outside_share(outside: Sequence[float], judged: Sequence[float]) -> float | None:
    """The share of slots whose target choice cannot be drafted, over all TTT steps."""
    return sum(outside) / sum(judged) if sum(judged) else None


def spans(row: LoadedRow) -> list[Span]:
    """Where the answers of a row lie, for the walk; an answer without a prompt cannot be walked."""
    return [
        Span(row=0, begin=first, end=end, known=end)
        for begin, first, end in row.places
        if begin < first < end
    ]


def measure(
    objective: Objective, tally: Tally, row: LoadedRow, captured: Captured
) -> Callable[[Eagle3Drafter], None]:
    """The work of validating one row (already on the device), for `Replica.look`."""

    def work(drafter: Eagle3Drafter) -> None:
        counts = objective.loss(drafter, captured).counts
        tally.trained = tally.trained + type(counts)(table=counts.table.cpu())
        tally.samples += len(row.sample_ids)
        tally.tokens += row.row.tokens
        slots = drafted_slots(captured.batch, 0)
        if bool(slots.any()):
            with objective.precision():
                drafts = draft_everywhere(drafter, captured, tally.k, slots=slots)
            tally.add_drafts(row, drafts, captured.batch)

    return work
