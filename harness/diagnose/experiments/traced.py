"""A trace put together by request: its text, the states that were handed over, its calls.

Rows of rejected drafts are left out. What a prefix cache spared the engine is not in its trace:
there the reference's own states stand in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engines.trace.base import TraceStep
from harness.diagnose.experiments.known import HiddenStates, Knowledge, Text, batch_of
from harness.diagnose.experiments.running import Calls

if TYPE_CHECKING:
    from training.unroll import Captured


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call that proposed: the last token's position, where the call's rows began, its drafts.

    `since`: 0 for the first call after a prefill, then 1, 2, …. `drafts`: what the target was then
    fed, where the trace tells; else what the drafter answered.
    """

    step: TraceStep
    slot: int
    start: int
    since: int
    drafts: list[int]


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One request: `tokens` of its whole text (an answer of `begin` … `end` - 1), and its trace.

    `aux` [known, A]: the states handed over for the first `known` tokens, float32; `own` [known]:
    which of them are the trace's. `group`: the number of its prompt among the knowledge's texts.
    """

    request: str
    tokens: list[int]
    begin: int
    end: int
    aux: Tensor
    own: Tensor
    states: HiddenStates
    calls: tuple[Call, ...]
    verified: tuple[tuple[Call, TraceStep], ...]
    steps: tuple[TraceStep, ...]
    group: int

    @property
    def known(self) -> int:
        return self.aux.shape[0]

    @property
    def reused(self) -> bool:
        """Whether the engine took the prompt's beginning from its cache."""
        return not bool(self.own[0])


def put_together(knowledge: Knowledge, trace: Mapping[str, Sequence[TraceStep]]) -> list[Traced]:
    """Every request of the trace that proposed at least once, and whose text is whole."""
    found = []
    for request, steps in trace.items():
        one = _traced(knowledge, request, [s for s in steps if s.valid > 0])
        if one is not None:
            found.append(one)
    return found


def _traced(knowledge: Knowledge, request: str, steps: list[TraceStep]) -> Traced | None:
    if not any(s.drafts.numel() for s in steps):
        return None
    placed: dict[int, int] = {}
    for step in steps:
        valid = step.valid
        pairs = zip(step.positions[:valid].tolist(), step.token_ids[:valid].tolist(), strict=True)
        placed.update(pairs)
    last = max(placed)
    final = steps[-1].next_token
    if final is not None:
        placed[last + 1] = final
    prompt_end = max(
        (int(s.positions[: s.valid].max()) + 1 for s in steps if s.kind == "prefill"), default=0
    )
    group, text = _matching(knowledge, placed, prompt_end)
    whole = range(max(placed) + 1)
    if text is None and any(p not in placed for p in whole):
        return None
    tokens = [placed[p] if p in placed else text.tokens[p] for p in whole]  # type: ignore[union-attr]
    begin, end = prompt_end or len(tokens), len(tokens)
    if text is not None and text.tokens[: len(tokens)] == tokens:
        tokens, begin, end = text.tokens, len(text.prompt), text.end
    states = knowledge.states(tokens)
    aux, own = _handed(knowledge, steps, states, last + 1)
    calls, verified = _calls(steps)
    return Traced(
        request=request,
        tokens=tokens,
        begin=begin,
        end=end,
        aux=aux,
        own=own,
        states=states,
        calls=calls,
        verified=verified,
        steps=tuple(steps),
        group=group,
    )


def _matching(
    knowledge: Knowledge, placed: Mapping[int, int], prompt_end: int
) -> tuple[int, Text | None]:
    """The text whose prompt this is, with the most tokens in common; its number, else a new one."""
    best, most = None, -1
    for number, text in enumerate(knowledge.texts):
        tokens, prompt = text.tokens, len(text.prompt)
        if prompt_end and prompt != prompt_end:
            continue
        if any(tokens[p] != token for p, token in placed.items() if p < prompt):
            continue
        same = sum(p < len(tokens) and tokens[p] == token for p, token in placed.items())
        if same > most:
            best, most = number, same
    return (len(knowledge.texts), None) if best is None else (best, knowledge.texts[best])


def _handed(
    knowledge: Knowledge, steps: Sequence[TraceStep], states: HiddenStates, known: int
) -> tuple[Tensor, Tensor]:
    aux = states.aux(knowledge.aux_layers)[:known].clone()
    own = torch.zeros(known, dtype=torch.bool)
    width = aux.shape[1]
    for step in steps:
        rows = step.aux[: step.valid].float()
        if rows.shape[1] != width:
            rows = torch.nn.functional.pad(rows[:, :width], (0, max(0, width - rows.shape[1])))
        at = step.positions[: step.valid].long()
        aux[at], own[at] = rows, True
    return aux, own


def _calls(
    steps: Sequence[TraceStep],
) -> tuple[tuple[Call, ...], tuple[tuple[Call, TraceStep], ...]]:
    """The calls that proposed, and of these each that was verified with the step that did."""
    found: list[Call] = []
    verified: list[tuple[Call, TraceStep]] = []
    since = -1
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if step.kind == "prefill":
            since = -1
        if not step.drafts.numel():
            continue
        since += 1
        call = Call(
            step=step,
            slot=int(step.positions[step.valid - 1]),
            start=int(step.positions[0]),
            since=since,
            drafts=_fed(step, after),
        )
        found.append(call)
        if after is not None and after.kind == "decode":
            verified.append((call, after))
    return tuple(found), tuple(verified)


def _fed(step: TraceStep, after: TraceStep | None) -> list[int]:
    """The drafts that the target was fed after `step`."""
    answered: list[int] = step.drafts.tolist()
    if after is None or after.kind != "decode":
        return answered
    fed: list[int] = after.token_ids[1:].tolist()
    return fed if len(fed) == len(answered) and min(fed, default=-1) >= 0 else answered


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """All requests of a trace as one batch, a row each; the M calls in the order of their slots.

    `slots` [M]: flat over [rows, length]. `group`, `since`, `batch`, `position` [M]: the prompt of
    each call, the calls since its prefill, the requests in it, and its place in the text.
    """

    requests: tuple[Traced, ...]
    captured: Captured
    slots: Tensor
    calls: Calls
    group: Tensor
    since: Tensor
    batch: Tensor
    position: Tensor
    number: Tensor


def as_batch(requests: Sequence[Traced], k: int) -> Replayed:
    """The requests' texts as far as states were handed over, one token more where it is known."""
    rows = []
    for one in requests:
        tokens = one.tokens[: one.known + k + 1]
        aux = torch.nn.functional.pad(one.aux, (0, 0, 0, len(tokens) - one.known))
        rows.append((tokens, one.begin, aux))
    captured = batch_of(rows)
    length = captured.batch.ids.shape[1]
    first = captured.batch.positions.clone()
    decode = torch.zeros_like(first, dtype=torch.bool)
    last = torch.zeros_like(decode)
    slots: list[int] = []
    before: list[int] = []
    drafts: list[list[int]] = []
    facts: dict[str, list[int]] = {
        "group": [],
        "since": [],
        "batch": [],
        "position": [],
        "number": [],
    }
    for row, one in enumerate(requests):
        for step in one.steps:
            at = step.positions[: step.valid].long()
            first[row, at] = int(step.positions[0])
            decode[row, at] = step.kind == "decode"
        for call in one.calls:
            last[row, call.slot] |= call.step.kind == "prefill"
            before.append(len(slots) - (call.since > 0))
            slots.append(row * length + call.slot)
            drafts.append((call.drafts + [-1] * k)[:k])
            facts["group"].append(one.group)
            facts["since"].append(call.since)
            facts["batch"].append(call.step.batch)
            facts["position"].append(call.slot)
            facts["number"].append(call.step.call)
    calls = Calls(
        first=first,
        decode=decode,
        last=last,
        before=torch.tensor(before),
        drafts=torch.tensor(drafts),
    )
    told = {name: torch.tensor(values) for name, values in facts.items()}
    return Replayed(
        requests=tuple(requests),
        captured=captured,
        slots=torch.tensor(slots),
        calls=calls,
        **told,
    )
