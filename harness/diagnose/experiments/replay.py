"""The drafter in float32 on the engine's own states and tokens, beside what the engine proposed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from engines.trace.base import TraceStep
from harness.diagnose.experiments.altered import alter
from harness.diagnose.experiments.cached import cached_agreement
from harness.diagnose.experiments.expected import as_declared
from harness.diagnose.experiments.figures import by_group, length
from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.experiments.running import agreement, chain
from harness.diagnose.experiments.target import dtype_of
from harness.diagnose.experiments.traced import Replayed, Traced, as_batch, put_together
from harness.diagnose.readings import AS_DECLARED, READINGS, Reading
from harness.diagnose.records import Length, Proportion, ReadingFit, Replay
from harness.errors import UsageError
from harness.records import DraftCounts
from training.evaluate import Span, walk
from training.evaluation.records import counts_of

TIES = {"float32": 2e-3, "float16": 0.02, "bfloat16": 0.12}
"""Logits that honest arithmetic of a type may confuse, in nats."""
PARTS = 4
"""Of a text, by position."""
FEWEST, ODD = 20, 0.02
"""From so many calls that are not as declared, or such a share of all, readings are held against
them. Fewer are the near-ties of honest arithmetic."""
LOOK = 48
"""Calls of a first look; a reading that falls behind by `BEHIND` there is not followed further."""
BEHIND = 0.3
FEW, GIVES = 8, 0.2
"""Of so many odd calls there, it is followed nevertheless where it gives such a share of them."""


def replay(knowledge: Knowledge, trace: Mapping[str, Sequence[TraceStep]]) -> Replay:
    """Every reading of the drafter on the trace's states, the one that fits best first.

    Raises `UsageError` where no request of the trace proposed anything.
    """
    requests = put_together(knowledge, trace)
    if not requests:
        raise UsageError("the trace holds no call of the drafter whose text is whole")
    replayed = as_batch(requests, knowledge.k)
    tie = TIES[dtype_of(knowledge.subject)]
    agreed = _agreements(knowledge, replayed, tie)
    most = _explains_most(agreed)
    fits = [
        _fit(name, found, agreed[AS_DECLARED], None if name == most else agreed.get(most), replayed)
        for name, found in agreed.items()
    ]
    # as declared comes first among equals: it is the first of the dict, and the sort is stable
    fits.sort(key=lambda fit: -(fit.agreement.share or 0.0) if fit.agreement else 0.0)
    own, group = agreed[AS_DECLARED], replayed.group
    first = own[:, 0]

    def of(found: Tensor, chosen: Tensor) -> Proportion | None:
        return by_group(found.numpy(), group.numpy(), chosen.numpy())

    parts = _parts(replayed)
    by_position = [of(own, parts == part) for part in range(PARTS)]
    return Replay(
        readings=tuple(fits),
        on_engine_states=_on_engine_states(knowledge, replayed),
        proposals=_proposals(replayed, knowledge.k),
        first_call=of(first, replayed.since == 0),
        later_calls=of(first, replayed.since > 0),
        alone=of(own, replayed.batch == 1),
        batched=of(own, replayed.batch > 1),
        by_position=tuple(p for p in by_position if p is not None),
        verified=_verified(knowledge, requests, tie),
    )


def _agreements(knowledge: Knowledge, replayed: Replayed, tie: float) -> dict[str, Tensor]:
    """Where each reading proposes what the engine did, bool [M, k], by its name.

    As declared alone where that leaves nothing for another reading to explain.
    """
    look = _first_look(replayed)
    own = None if look is None else _agreed(READINGS[AS_DECLARED], knowledge, look, tie)
    found: dict[str, Tensor] = {}
    most = 0.0
    for reading in _readings():
        if found and _all_explained(found[AS_DECLARED]):
            break
        if look is not None and own is not None and found:
            glimpse = _agreed(reading, knowledge, look, tie)
            if glimpse is None:
                continue
            share = glimpse.float().mean().item()
            most = max(most, share)
            if share < most - BEHIND and not _may_explain(glimpse, own):
                continue
        agreed = _agreed(reading, knowledge, replayed, tie)
        if agreed is not None:
            found[reading.name] = agreed
            most = max(most, agreed.float().mean().item())
    return found


def _may_explain(glimpse: Tensor, own: Tensor) -> bool:
    """Whether a reading may be behind the calls of a first look that are not as declared.

    What goes wrong now and then agrees less than the declared reading, over all. Of too few such
    calls nothing is told yet.
    """
    odd = ~own.all(1)
    given = int(glimpse.all(1)[odd].sum())
    return int(odd.sum()) < FEW or given >= GIVES * int(odd.sum())


def _explains_most(agreed: Mapping[str, Tensor]) -> str:
    """The reading that gives most of the calls which are not as declared."""
    odd = ~agreed[AS_DECLARED].all(1)
    return max(agreed, key=lambda name: int(agreed[name].all(1)[odd].sum()))


def _all_explained(own: Tensor) -> bool:
    """Whether so few calls are not as declared that nothing could be told of them."""
    calls, odd = len(own), int((~own.all(1)).sum())
    return odd < FEWEST and odd <= ODD * calls


def _readings() -> Iterator[Reading]:
    """As declared first, then the rest; without what only states of other layers could tell."""
    for reading in READINGS.values():
        if reading.cause != "states_without_residual":
            yield reading


def _first_look(replayed: Replayed) -> Replayed | None:
    """The first requests alone; None where the whole is little more."""
    requests, calls = [], 0
    for one in replayed.requests:
        if calls >= LOOK:
            break
        requests.append(one)
        calls += len(one.calls)
    if 2 * calls > replayed.slots.numel():
        return None
    return as_batch(requests, replayed.calls.drafts.shape[1])


def _agreed(
    reading: Reading, knowledge: Knowledge, replayed: Replayed, tie: float
) -> Tensor | None:
    """None where the reading means nothing here."""
    if reading.by == "cache":
        return cached_agreement(reading.name, knowledge.drafter, replayed, tie)
    if reading.by == "batch":
        return _of_others(knowledge, replayed)
    altered = alter(reading, knowledge)
    if altered is None:
        return None
    return agreement(altered, replayed.captured, replayed.slots, replayed.calls, tie)


def _of_others(knowledge: Knowledge, replayed: Replayed) -> Tensor | None:
    """Agreement with what the drafter proposes for another request of the same call.

    None where no call had several requests. Of a call's others the one that fits a row best counts.
    """
    number, drafts = replayed.number, replayed.calls.drafts
    own = _declared_chain(knowledge, replayed)  # [M, k]
    found = torch.zeros_like(drafts, dtype=torch.bool)
    several = False
    for call in number.unique().tolist():
        members = (number == call).nonzero().flatten()
        if len(members) < 2:
            continue
        several = True
        same = drafts[members][:, None] == own[members][None]  # [n, n, k]
        score = same.sum(-1).masked_fill(torch.eye(len(members), dtype=torch.bool), -1)
        found[members] = same[torch.arange(len(members)), score.argmax(1)]
    return found if several else None


def _declared_chain(knowledge: Knowledge, replayed: Replayed) -> Tensor:
    mask = torch.zeros(replayed.captured.batch.ids.numel(), dtype=torch.bool)
    mask[replayed.slots] = True
    drafts = chain(
        as_declared(knowledge),
        replayed.captured,
        knowledge.k,
        mask.view_as(replayed.captured.batch.ids),
    )
    return drafts.flatten(0, 1)[replayed.slots]


def _fit(
    name: str, agreed: Tensor, declared: Tensor, most: Tensor | None, replayed: Replayed
) -> ReadingFit:
    """`most`: what the reading that explains the most agrees with; None for that one itself."""
    real = (replayed.calls.drafts >= 0).numpy()
    group = replayed.group.numpy()
    found, whole = agreed.numpy(), agreed.all(1)
    odd = ~declared.all(1)
    beaten = None
    if most is not None and name != AS_DECLARED:
        other = most.all(1)
        beaten = by_group(other.numpy(), group, (odd & (other ^ whole)).numpy())
    each = [by_group(found[:, i], group, real[:, i]) for i in range(found.shape[1])]
    return ReadingFit(
        reading=name,
        agreement=by_group(found, group),
        explains=by_group(whole.numpy(), group, odd.numpy()),
        beaten=beaten,
        by_draft=tuple(p for p in each if p is not None),
    )


def _parts(replayed: Replayed) -> Tensor:
    """Which part of the longest text each call lies in, [M]."""
    most = int(replayed.position.max()) + 1
    return replayed.position * PARTS // most


def _on_engine_states(knowledge: Knowledge, replayed: Replayed) -> Length:
    """The walk over the engine's text and states, drafter as declared."""
    captured = replayed.captured
    slots = torch.zeros_like(captured.batch.loss_mask)
    for row, one in enumerate(replayed.requests):
        slots[row, one.begin - 1 : one.known] = True
    drafts = chain(as_declared(knowledge), captured, knowledge.k, slots)
    counts: dict[int, list[DraftCounts]] = {}
    for row, one in enumerate(replayed.requests):
        known = min(len(one.tokens), one.known + knowledge.k + 1)
        span = Span(row=row, begin=one.begin, end=min(one.end, one.known + 2), known=known)
        counts.setdefault(one.group, []).append(counts_of(walk(drafts, captured.batch.ids, span)))
    return _pooled(counts, knowledge.k)


def _proposals(replayed: Replayed, k: int) -> Length:
    """The engine's proposals against the text that it then wrote."""
    counts: dict[int, list[DraftCounts]] = {}
    for one in replayed.requests:
        for call in one.calls:
            if call.slot + 2 >= one.end:
                continue
            counts.setdefault(one.group, []).append(_verified_counts(one, call.slot, call.drafts))
    return _pooled(counts, k)


def _verified_counts(one: Traced, slot: int, drafts: Sequence[int]) -> DraftCounts:
    accepted = 0
    for at, draft in enumerate(drafts, slot + 2):
        if at >= len(one.tokens) or one.tokens[at] != draft:
            break
        accepted += 1
    return DraftCounts(
        drafts=1,
        drafted=len(drafts),
        accepted=accepted,
        per_position=tuple(int(i < accepted) for i in range(len(drafts))),
    )


def _pooled(counts: Mapping[int, Sequence[DraftCounts]], k: int) -> Length:
    """The acceptance of all, by prompt; each has some counts."""
    from harness.measure.metrics import pool

    pooled = [pool(list(each)) for each in counts.values()]
    assert None not in pooled
    return length([each for each in pooled if each is not None], k)


def _verified(knowledge: Knowledge, requests: Sequence[Traced], tie: float) -> Proportion | None:
    """Greedy verify steps that accepted what they had to; None where drafts are drawn.

    Too little: the token behind the accepted drafts is the next draft. Too much: an accepted draft
    is not the reference's token there, by more than ten near-ties.
    """
    if knowledge.subject.temperature > 0:
        return None
    right, group = [], []
    for one in requests:
        logits = knowledge.engine.model.logits(one.states.normed)
        most = logits.amax(-1)
        for call, after in one.verified:
            drafts, taken = call.drafts, after.valid - 1
            short = taken < len(drafts) and after.next_token == drafts[taken]
            wrong = any(
                logits[call.slot + 1 + i, drafts[i]] < most[call.slot + 1 + i] - 10 * tie
                for i in range(min(taken, len(drafts)))
            )
            right.append(not (short or wrong))
            group.append(one.group)
    if not right:
        return None
    return by_group(torch.tensor(right).numpy(), torch.tensor(group).numpy())
