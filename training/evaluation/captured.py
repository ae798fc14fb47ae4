"""The offline expectation from states captured before: for a target too large to be loaded here.

The walk is validation's (`training.train.validation`), over the held-out samples' own answers.
Greedy answers are what an engine gives at temperature 0, so that the counts are an engine's too.
Of sampled answers each token is a draw from the target's distribution p, and a draft d equals it
with probability p(d): what speculative sampling accepts of a drafter that proposes its likeliest
token, as in vLLM and SGLang unless they are told otherwise. The counts are then those of such an
engine at the same temperature, but for chance. The reference engine draws its drafts: others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from harness.errors import UsageError
from harness.measure.metrics import pool
from harness.records import DraftCounts
from training.evaluation.online import Serving, served_dtype
from training.evaluation.records import HeldOut, Offline, Walked, counts_of
from training.evaluation.way import Way, walked_dtype
from training.heads import TargetFacts, read_facts
from training.progress import Progress, note
from training.states import StateSource, StoredStates
from training.targets import target_digest, target_identity

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.eagle3 import Eagle3Drafter
    from training.train.feed import LoadedRow

MOST_PROVED = 4096
"""Answers' tokens whose next one is held against the states' argmax: a look, as before training."""


def walk_captured(
    serving: Serving, held: Sequence[tuple[HeldOut, int]], source: StateSource, way: Way
) -> Offline:
    """The drafter's counts over the captured states of `held` (prompts, sample numbers).

    Of the target the embedding, the head and the last norm alone are read. Raises `UsageError`
    where the states are not of this target or not of the drafter's layers, `TrainingError` where a
    shard is damaged.
    """
    import torch

    begun = time.perf_counter()
    plan, facts = serving.plan, read_facts(serving.target)
    device = torch.device(plan.engine.device if torch.cuda.is_available() else "cpu")
    kind = served_dtype(plan, serving.target)
    dtype = torch.float32 if kind == "auto" else getattr(torch, kind)
    head, lm_head = _sharing(serving, facts, source)
    head = head.to(device, walked_dtype(device, dtype))
    lm_head = lm_head.to(device) if device.type == "cuda" else lm_head.float()
    walked: list[Walked] = []
    right = scored = 0
    progress = Progress("evaluate: offline, from states", len(held))
    with torch.no_grad():
        for (each, _), row in zip(held, _rows(source, held, facts), strict=True):
            counts = _walk(head, row, each, serving.k)
            walked.append(_walked(each, row, counts))
            if scored < MOST_PROVED:
                hits, slots = _proved(row, lm_head)
                right, scored = right + hits, scored + slots
            progress.update(len(walked) - 1, tokens=row.row.tokens, text="answers walked")
    if device.type == "cuda":
        del head, lm_head
        torch.cuda.empty_cache()  # an engine is to be started there
    total = pool([w.counts for w in walked])
    assert total is not None
    return Offline(
        answers=tuple(walked),
        counts=total,
        proof=right / scored if scored else 0.0,
        seconds=time.perf_counter() - begun,
        least_proof=_least_proof(serving),
        walked_from=way.walked_from,
        why=way.why,
        greedy=serving.greedy,
    )


def check_states(serving: Serving, source: StateSource, layers: Sequence[int]) -> None:
    """Raise `UsageError` where the states cannot be those that the drafter sees when served."""
    if tuple(source.aux_layers) != tuple(layers):
        raise UsageError(
            f"evaluate: the drafter takes the hidden states {list(layers)}, captured were "
            f"{list(source.aux_layers)}; capture again with --set "
            f"capture.aux_layers={','.join(map(str, layers))}"
        )
    if not isinstance(source, StoredStates):
        return
    told = source.index.made_from.get("target")
    if told != target_digest(target_identity(serving.target)):
        raise UsageError(
            f"{source.folder}: captured from another target than {serving.target}, or that was "
            "changed since; capture again"
        )


def _sharing(
    serving: Serving, facts: TargetFacts, source: StateSource
) -> tuple[Eagle3Drafter, Tensor]:
    """The drafter, with the target's embedding and head where it has none, and that head [V, H]."""
    from drafters.checkpoint import load
    from training.train.target import read_tensors

    head = load(serving.drafter, serving.target)
    check_states(serving, source, head.spec.aux_layers)
    tensors = read_tensors(facts)
    head.share(
        embeddings=None if head.owns_embeddings else tensors.embedding,
        lm_head=None if head.owns_lm_head else tensors.lm_head,
    )
    return head.eval().requires_grad_(False), tensors.lm_head


def _rows(
    source: StateSource, held: Sequence[tuple[HeldOut, int]], facts: TargetFacts
) -> Iterator[LoadedRow]:
    """The states of each answer, a row of its own, read ahead."""
    from training.train.feed import Feed
    from training.train.rows import Row

    rows = [
        Row(number=place, indices=(number,), tokens=source.lengths[number])
        for place, (_, number) in enumerate(held)
    ]

    def on_wait(seconds: float) -> None:
        note(f"evaluate: waiting for states since {seconds:.0f} s")

    with closing(Feed(source, rows, facts.vocab_size, on_wait)) as feed:
        yield from feed


def _walk(head: Eagle3Drafter, row: LoadedRow, held: HeldOut, k: int) -> DraftCounts:
    """An answer's counts, walked to the limit that it is asked with."""
    from training.evaluate import draft_everywhere, walk
    from training.train.feed import to_device
    from training.train.validation import spans
    from training.unroll import drafted_slots

    weight = head.lm_head.weight
    captured = to_device(row.captured, weight.device, weight.dtype)
    drafts = draft_everywhere(head, captured, k, slots=drafted_slots(captured.batch, 0))
    (span,) = spans(row)
    span = msgspec.structs.replace(span, end=span.begin + held.max_tokens)
    return counts_of(walk(drafts.cpu(), row.captured.batch.ids, span))


def _walked(held: HeldOut, row: LoadedRow, counts: DraftCounts) -> Walked:
    begin = len(held.token_ids)
    tokens = row.captured.batch.ids[0].tolist()
    return Walked(
        prompt_id=held.prompt_id,
        category=held.category,
        prompt_tokens=begin,
        token_ids=tuple(tokens[begin : begin + held.max_tokens]),
        counts=counts,
    )


def _proved(row: LoadedRow, lm_head: Tensor) -> tuple[int, int]:
    """Of an answer's tokens, how many are the argmax of the state before; and all."""
    from training.train.proof import right_choices

    _, begin, end = row.places[0]
    captured = row.captured
    before, tokens = captured.last_normed[0, begin - 1 : end - 1], captured.batch.ids[0, begin:end]
    return right_choices(before, tokens, lm_head), end - begin


def _least_proof(serving: Serving) -> float:
    from training.train.proof import LEAST_SAMPLED

    least = serving.plan.capture.least_proof
    return least if serving.greedy else min(least, LEAST_SAMPLED)
