"""What the drafter was trained for: its readings held against the target's own text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from harness.diagnose.experiments.altered import Altered, alter
from harness.diagnose.experiments.expected import (
    acceptance,
    answer_slots,
    as_declared,
    drafted,
    expect,
)
from harness.diagnose.experiments.figures import paired_gain, proportion
from harness.diagnose.experiments.known import Knowledge, Text, batch_of, hidden_states
from harness.diagnose.experiments.running import Run, best, log_chance
from harness.diagnose.readings import AS_DECLARED, READINGS, Reading, layers_reading
from harness.diagnose.records import Length, Proportion, ReadingFit, Wanted
from training.unroll import Captured, shift

MOST_SETS = 60
"""Sets of other layers that are tried; beyond, only those that change one slot at a time."""
FEW = 3
"""Texts of a first look."""
WORSE = 0.3
"""Nats a token by which a set of layers is worse there than the checkpoint's, and left out."""
APART = 7
"""Places along the text from which another token is fed: no neighbour, and seldom the same."""
SAMPLES = 12
"""Of the drafter's training."""


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """One reading's drafts at every slot of the answers, and how many of them are right."""

    reading: Reading
    first: Tensor  # [slots, H], the first step's states, in the order of the texts
    drafts: Tensor  # [rows, length, k]
    accepted: list[tuple[float, float]]  # by text: drafts accepted, slots
    losses: list[tuple[float, float]]  # by text: -log q of the first drafts' tokens, of so many


def want(knowledge: Knowledge) -> Wanted:
    """Every reading of the drafter over the knowledge's texts, the one accepted most first.

    `gain` is over every slot of the answers, not only those that a walk would draft at: the same
    slots for every reading.
    """
    captured = knowledge.captured()
    slots = answer_slots(knowledge, captured)
    base = _tried(as_declared(knowledge), knowledge, captured, slots)
    fits = [_fit(base, base, knowledge, captured)]
    for altered, batch in _candidates(knowledge, captured):
        tried = _tried(altered, knowledge, batch, slots)
        fits.append(_fit(tried, base, knowledge, captured))
    fits.sort(key=lambda fit: -(fit.gain or 0.0))
    right = _right(base.drafts, captured)
    tokens, states = _unread(knowledge, captured, base.drafts, slots)
    head, less, less_low = _without_norm(knowledge, base, slots)
    return Wanted(
        readings=tuple(fits),
        unnormed_head=head,
        unnormed_less=less,
        unnormed_less_low=less_low,
        without_tokens=tokens,
        without_states=states,
        by_step=_by_step(right, slots, after_wrong=False),
        own_tokens_by_step=_by_step(right, slots, after_wrong=True),
        trained=_trained(knowledge),
        other_target=_other_target(knowledge),
    )


def _candidates(knowledge: Knowledge, captured: Captured) -> Iterator[tuple[Altered, Captured]]:
    """Every reading that means something here, with the states it is run on."""
    for reading in READINGS.values():
        if reading.name == AS_DECLARED or reading.by not in ("drafter", "states", "tokens"):
            continue
        altered = alter(reading, knowledge)
        if altered is None:
            continue
        if reading.cause == "states_without_residual":
            yield altered, _branches(knowledge, feed_forward="feed-forward" in reading.name)
        else:
            yield altered, captured
    for reading in _likely(knowledge, layer_readings(knowledge)):
        assert reading.layers is not None
        yield (
            Altered(reading=reading, drafter=knowledge.drafter),
            knowledge.captured(reading.layers),
        )


def _likely(knowledge: Knowledge, readings: Iterator[Reading]) -> Iterator[Reading]:
    """Without those of the many sets of other layers that a first look at few texts excludes."""
    few = like(knowledge, knowledge.texts[:FEW])

    def loss(reading: Reading | None) -> float:
        altered = Altered(reading=reading or READINGS[AS_DECLARED], drafter=few.drafter)
        captured = few.captured(None if reading is None else reading.layers)
        _, _, logs = _first_step(altered, captured, answer_slots(few, captured))
        return -logs[logs.isfinite()].mean().item()

    most = loss(None) + WORSE
    for reading in readings:
        if reading.cause != "layers_other" or len(knowledge.texts) <= FEW or loss(reading) < most:
            yield reading


def _branches(knowledge: Knowledge, *, feed_forward: bool) -> Captured:
    """States that miss the residual stream: what the layer before added."""
    rows = []
    for text in knowledge.texts:
        states = text.states
        parts = [
            states.inputs[0]
            if i == 0
            else (states.mlp[i - 1] if feed_forward else states.branch(i - 1))
            for i in knowledge.aux_layers
        ]
        rows.append((text.tokens, len(text.prompt), torch.cat(parts, dim=-1)))
    return batch_of(rows)


def layer_readings(knowledge: Knowledge) -> Iterator[Reading]:
    """Other aux layers, the likely ones first, each set once."""
    seen = {knowledge.aux_layers}
    depth = knowledge.layers
    for kind, layers in _layer_sets(knowledge):
        if layers not in seen and all(0 <= i <= depth for i in layers):
            seen.add(layers)
            yield layers_reading(kind, layers)


def _layer_sets(knowledge: Knowledge) -> Iterator[tuple[str, tuple[int, ...]]]:
    from drafters.ids import default_layers, family_of, to_index
    from drafters.reading import read_folder, read_target

    own, depth = knowledge.aux_layers, knowledge.layers
    yield "layers off by +1", tuple(i + 1 for i in own)
    yield "layers off by -1", tuple(i - 1 for i in own)
    default = default_layers(depth)
    yield "layers by default", (default * len(own))[: len(own)]
    target = read_target(Path(knowledge.subject.target))
    ids = read_folder(Path(knowledge.subject.drafter), target).ids
    if ids is not None:
        read = to_index("sglang", ids, family_of(target.architecture), depth)
        yield "layers as SGLang reads them", read
        yield "layers as vLLM reads them", tuple(ids)
    for order in itertools.permutations(own):
        yield "layers in another order", order
    for at, other in itertools.product(range(len(own)), range(depth + 1)):
        yield "other layers", (*own[:at], other, *own[at + 1 :])
    every = list(itertools.combinations(range(depth + 1), len(own)))
    if len(every) <= MOST_SETS:
        yield from (("other layers", layers) for layers in every)


@torch.no_grad()
def _tried(altered: Altered, knowledge: Knowledge, captured: Captured, slots: Tensor) -> _Tried:
    """A token that no draft id stands for has no q, and is in no loss."""
    run, first, logs = _first_step(altered, captured, slots)
    tokens = [best(altered.drafter, first)]
    while len(tokens) < knowledge.k:
        tokens.append(best(altered.drafter, run.step(run.fed(tokens[-1], len(tokens)))))
    drafts = run.everywhere(torch.stack(tokens, dim=-1))
    prefix = _right(drafts, captured).cumprod(-1).sum(-1) * slots  # [rows, length]
    row = run.slots // captured.batch.ids.shape[1]
    known = logs.isfinite()
    total = torch.zeros(len(slots)).index_add(0, row, torch.where(known, -logs, 0.0))
    of = torch.zeros(len(slots)).index_add(0, row, known.float())
    return _Tried(
        reading=altered.reading,
        first=first,
        drafts=drafts,
        accepted=list(zip(prefix.sum(1).tolist(), slots.sum(1).tolist(), strict=True)),
        losses=list(zip(total.tolist(), of.tolist(), strict=True)),
    )


@torch.no_grad()
def _first_step(altered: Altered, captured: Captured, slots: Tensor) -> tuple[Run, Tensor, Tensor]:
    """The run after its first step, that step's states [M, H], and log q of the true tokens [M]."""
    run = Run(altered, captured, slots.flatten().nonzero().flatten())
    normed = run.step(run.text(0))
    true = shift(captured.batch.ids, 2).flatten()[run.slots]
    return run, normed, log_chance(altered.drafter, normed, true)


def _right(drafts: Tensor, captured: Captured) -> Tensor:
    """Which drafts are the text's own tokens, int64 [rows, length, k]; beyond its end none."""
    batch = captured.batch
    found = []
    for step in range(drafts.shape[-1]):
        ahead = 2 + step
        same = drafts[..., step] == shift(batch.ids, ahead)
        inside = shift(batch.documents, ahead) == 0
        inside[:, -ahead:] = False
        found.append(same & inside)
    return torch.stack(found, dim=-1).long()


def _fit(tried: _Tried, base: _Tried, knowledge: Knowledge, captured: Captured) -> ReadingFit:
    lost, of = (sum(column) for column in zip(*tried.losses, strict=True))
    fit = ReadingFit(
        reading=tried.reading.name,
        acceptance=acceptance(knowledge, captured, tried.drafts),
        loss=lost / of if of else None,
    )
    if tried is base:
        return msgspec.structs.replace(fit, gain=0.0)
    gain, low, high = paired_gain(tried.accepted, base.accepted)
    less, least, most = paired_gain(base.losses, tried.losses)
    return msgspec.structs.replace(
        fit,
        gain=gain,
        gain_low=low,
        gain_high=high,
        loss_less=less,
        loss_less_low=least,
        loss_less_high=most,
    )


def _by_step(right: Tensor, slots: Tensor, *, after_wrong: bool) -> tuple[Proportion, ...]:
    """By step, the drafts that are right where all before were; or where one before was wrong."""
    found = []
    for step in range(right.shape[-1]):
        sound = right[..., :step].all(-1)
        chosen = slots & (~sound if after_wrong else sound)
        hits = (right[..., step].bool() & chosen).sum(1)
        found.append(proportion(hits.tolist(), chosen.sum(1).tolist()))
    return tuple(found)


@torch.no_grad()
def _unread(
    knowledge: Knowledge, captured: Captured, drafts: Tensor, slots: Tensor
) -> tuple[Proportion, Proportion]:
    """Of the right first drafts those that stay right on other tokens, and on others' states."""
    rows = len(captured.batch.ids)
    foreign = msgspec.structs.replace(captured, aux=captured.aux.roll(1, dims=0))
    index = slots.flatten().nonzero().flatten()
    found = []
    for batch, moved in ((captured, APART), (foreign, 0)):
        run = Run(as_declared(knowledge), batch, index)
        again = best(knowledge.drafter, run.step(run.text(0).roll(moved)))
        true = shift(captured.batch.ids, 2).flatten()[index]
        right = drafts[..., 0].flatten()[index] == true
        row = index // captured.batch.ids.shape[1]
        hits = torch.bincount(row[right & (again == true)], minlength=rows)
        found.append(proportion(hits.tolist(), torch.bincount(row[right], minlength=rows).tolist()))
    return found[0], found[1]


@torch.no_grad()
def _without_norm(
    knowledge: Knowledge, base: _Tried, slots: Tensor
) -> tuple[Proportion, float, float | None]:
    """First drafts beside what the head says of the last state without its norm.

    Those that it draws so, of slots where that is not the target's token. And by how much
    KL(p || q) of the drafts' q is less for such a p than for the target's own, over the draft
    vocabulary.
    Slot t drafts token t + 2, which the target draws from its state at t + 1.
    """
    drafter, model, known = knowledge.drafter, knowledge.engine.model, drafted(knowledge)
    ids = drafter.to_target(torch.arange(drafter.spec.draft_vocab_size))
    ids = ids.clamp(0, drafter.spec.vocab_size - 1)
    hits, of = [], []
    own: list[tuple[float, float]] = []
    plain: list[tuple[float, float]] = []
    parts = base.first.split(slots.sum(1).tolist())
    for row, (text, part) in enumerate(zip(knowledge.texts, parts, strict=True)):
        at = slots[row].nonzero().flatten()
        normed = model.logits(text.states.normed[at + 1])  # [T, V]
        unnormed = model.logits(text.states.inputs[-1][at + 1])
        wrong = unnormed.masked_fill(~known, -torch.inf).argmax(-1)
        differs = wrong != normed.argmax(-1)
        hits.append(int(((base.drafts[row, at, 0] == wrong) & differs).sum()))
        of.append(int(differs.sum()))
        q = drafter.logits(part).float().log_softmax(-1)  # [T, D]
        for sums, logits in ((own, normed), (plain, unnormed)):
            p = logits[:, ids].float().log_softmax(-1)
            sums.append(((p.exp() * (p - q)).sum().item(), float(len(at))))
    less, low, _ = paired_gain(own, plain)
    return proportion(hits, of), less, low


def _trained(knowledge: Knowledge) -> Length | None:
    """The walk over samples of the drafter's training."""
    from training.samples import read_samples, samples_in

    if knowledge.subject.trained_on is None:
        return None
    folder = samples_in(Path(knowledge.subject.trained_on))
    texts = []
    most = knowledge.engine.max_len
    for sample in itertools.islice(read_samples(folder), SAMPLES):
        ids = list(sample.token_ids[:most])
        if len(ids) - sample.loss_from > 2:
            states = hidden_states(knowledge.engine, ids)
            prompt, answer = ids[: sample.loss_from], ids[sample.loss_from :]
            texts.append(Text(prompt=prompt, answer=answer, beyond=[], states=states))
    if not texts:
        return None
    return expect(like(knowledge, texts)).acceptance


def like(knowledge: Knowledge, texts: Sequence[Text]) -> Knowledge:
    """The same target and drafter with other texts."""
    return Knowledge(
        subject=knowledge.subject,
        engine=knowledge.engine,
        drafter=knowledge.drafter,
        texts=texts,
        layers_named=knowledge.layers_named,
        greedy=False,
    )


def _other_target(knowledge: Knowledge) -> Length | None:
    """The walk over the named target's answers to the same prompts."""
    from harness.diagnose.experiments.known import know

    folder = knowledge.subject.trained_target
    if folder is None:
        return None
    subject = msgspec.structs.replace(knowledge.subject, target=folder)
    return expect(know(subject, [text.prompt for text in knowledge.texts])).acceptance
