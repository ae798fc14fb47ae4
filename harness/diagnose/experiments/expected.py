"""The paper check: what the drafter would be accepted on the target's own text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.diagnose.experiments.altered import Altered
from harness.diagnose.experiments.figures import length, proportion
from harness.diagnose.experiments.known import Knowledge, Text
from harness.diagnose.experiments.running import Run, best, chain
from harness.diagnose.readings import AS_DECLARED, READINGS
from harness.diagnose.records import Expected, Length, Proportion
from harness.records import DraftCounts
from training.evaluate import Span, walk
from training.evaluation.records import counts_of
from training.unroll import Captured, shift


def expect(knowledge: Knowledge, *, step_cost: float | None = None) -> Expected:
    """The drafter as its checkpoint says, walked over the knowledge's texts.

    `step_cost`: a verify step in plain decode steps, where it was measured: so many tokens a step
    has to yield.
    """
    captured = knowledge.captured()
    drafts = chain(as_declared(knowledge), captured, knowledge.k, answer_slots(knowledge, captured))
    outside = outside_vocabulary(knowledge)
    without = None
    if outside.hits:
        told = _told_outside(knowledge, captured)
        without = length(walked(knowledge.texts, captured, told), knowledge.k)
    return Expected(
        acceptance=acceptance(knowledge, captured, drafts),
        proof=_proof(knowledge),
        outside_vocabulary=outside,
        without_vocabulary_loss=without,
        break_even=step_cost,
        degenerate_share=_degenerate(knowledge),
        prompt_surprise=_surprise(knowledge),
    )


def as_declared(knowledge: Knowledge) -> Altered:
    """The drafter as its checkpoint says."""
    return Altered(reading=READINGS[AS_DECLARED], drafter=knowledge.drafter)


def acceptance(knowledge: Knowledge, captured: Captured, drafts: Tensor) -> Length:
    """The walk of drafts [rows, length, k] over the knowledge's texts."""
    return length(walked(knowledge.texts, captured, drafts), knowledge.k)


def walked(texts: Sequence[Text], captured: Captured, drafts: Tensor) -> list[DraftCounts]:
    """Each text's counts, as an engine would count them."""
    spans = [
        Span(row=row, begin=len(text.prompt), end=text.end, known=len(text.tokens))
        for row, text in enumerate(texts)
    ]
    return [counts_of(walk(drafts, captured.batch.ids, span)) for span in spans]


def answer_slots(knowledge: Knowledge, captured: Captured) -> Tensor:
    """The slots [rows, length] that draft tokens of an answer, its first excepted."""
    slots = torch.zeros_like(captured.batch.loss_mask)
    for row, text in enumerate(knowledge.texts):
        slots[row, len(text.prompt) - 1 : max(text.end - 2, len(text.prompt) - 1)] = True
    return slots


def outside_vocabulary(knowledge: Knowledge) -> Proportion:
    """Tokens of the answers that no draft id stands for."""
    inside = drafted(knowledge).tolist()
    return proportion(
        [sum(not inside[token] for token in text.answer) for text in knowledge.texts],
        [len(text.answer) for text in knowledge.texts],
    )


def drafted(knowledge: Knowledge) -> Tensor:
    """Which of the target's ids the drafter can propose, bool [V]."""
    spec = knowledge.drafter.spec
    inside = torch.zeros(spec.vocab_size, dtype=torch.bool)
    ids = knowledge.drafter.to_target(torch.arange(spec.draft_vocab_size))
    inside[ids[(ids >= 0) & (ids < spec.vocab_size)]] = True
    return inside


@torch.no_grad()
def _told_outside(knowledge: Knowledge, captured: Captured) -> Tensor:
    """Drafts [rows, length, k] of a drafter that is told the tokens it has no id for."""
    slots = answer_slots(knowledge, captured).flatten().nonzero().flatten()
    run = Run(as_declared(knowledge), captured, slots)
    inside = drafted(knowledge)
    tokens: list[Tensor] = []
    while len(tokens) < knowledge.k:
        step = len(tokens)
        own = best(run.drafter, run.step(tokens[-1] if tokens else run.text(0)))
        true = shift(captured.batch.ids, 2 + step).flatten()[slots]
        tokens.append(torch.where(inside[true], own, true))
    return run.everywhere(torch.stack(tokens, dim=-1))


def _proof(knowledge: Knowledge) -> float:
    right = scored = 0
    for text in knowledge.texts:
        begin = len(text.prompt)
        choice = knowledge.choice(text.states)[begin - 1 : text.end - 1].tolist()
        right += sum(a == b for a, b in zip(choice, text.answer, strict=True))
        scored += len(text.answer)
    return right / scored if scored else 0.0


@torch.no_grad()
def _surprise(knowledge: Knowledge) -> float | None:
    """None where no prompt has two tokens."""
    total, of, size = 0.0, 0, 1
    for text in knowledge.texts:
        prompt = torch.tensor(text.prompt)
        logits = knowledge.engine.model.logits(text.states.normed[: len(prompt) - 1]).float()
        chances = logits.log_softmax(-1).gather(1, prompt[1:, None])  # [T - 1, 1]
        total, of, size = total - chances.sum().item(), of + chances.numel(), logits.shape[-1]
    return total / of / math.log(size) if of else None


def _degenerate(knowledge: Knowledge) -> float | None:
    """None where no answer is long enough to be judged."""
    from harness.analyse.degenerate import LEAST_TOKENS, in_circles

    judged = [text.answer for text in knowledge.texts if len(text.answer) >= LEAST_TOKENS]
    if not judged:
        return None
    return sum(in_circles(answer, "length") for answer in judged) / len(judged)
