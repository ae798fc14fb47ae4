"""The offline expectation: the target's greedy answers, its states, and the drafter walked over.

Answers and states come from the reference engine's model, the drafts from the trainer's own
unrolled forward pass: what an engine accepts beside it is held against the drafter as it was
trained, not against another engine's reading of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.measure.metrics import pool
from harness.records import DraftCounts
from training.evaluation.records import HeldOut, Offline, Walked, counts_of
from training.evaluation.way import walked_dtype
from training.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.eagle3 import Eagle3Drafter
    from engines.reference.engine import Engine

SLOTS = 8
ATTENTION_BYTES = 1 << 29
"""Scores of one batch in the drafter's unrolled attention; a longer row goes alone."""
MOST_ROWS = 16


class Known:
    """A prompt, its answer, and what the target would go on with; states of all of it.

    `aux` [T, n * H] and `last_normed` [T, H], T = tokens of all three.
    """

    def __init__(self, held: HeldOut, answer: list[int], beyond: list[int]) -> None:
        self.held, self.answer, self.beyond = held, answer, beyond
        self.tokens = [*held.token_ids, *answer, *beyond]


def walk_offline(
    target: Path, drafter: Path, held: Sequence[HeldOut], *, k: int, dtype: str, context: int
) -> Offline:
    """The drafter's counts over the target's greedy answers to `held`, as an engine would count.

    Tokens accepted behind an answer's end count, as they do in every engine. Raises
    `EngineUsageError` where the reference engine cannot serve the target, `DrafterError` where
    the drafter cannot be read.
    """
    from engines.reference.loading import load_engine

    begun = time.perf_counter()
    length = _length(target, context + k + 1)
    engine = load_engine(target, dtype=dtype, max_len=length, slots=min(SLOTS, len(held)))
    head = sharing(drafter, engine)
    known = answers(engine, held, k)
    walked: dict[str, Walked] = {}
    right = scored = 0
    progress = Progress("evaluate: offline", len(known))
    for group in _groups(known, head.spec.num_attention_heads):
        counts, hits, slots = _walk_group(engine, head, group, k)
        right, scored = right + hits, scored + slots
        for each, found in zip(group, counts, strict=True):
            walked[each.held.prompt_id] = _walked(each, found)
        tokens = sum(len(each.tokens) for each in group)
        progress.update(len(walked) - 1, tokens=tokens, text="answers walked")
    ordered = tuple(walked[h.prompt_id] for h in held)
    total = pool([w.counts for w in ordered])
    assert total is not None
    return Offline(
        answers=ordered,
        counts=total,
        proof=right / scored if scored else 0.0,
        seconds=time.perf_counter() - begun,
    )


def _length(target: Path, wanted: int) -> int:
    from engines.reference.config import read_config

    return min(wanted, read_config(target).max_positions)


def sharing(path: Path, engine: Engine, target: Path | None = None) -> Eagle3Drafter:
    """The drafter as it is walked, with the target's embedding and head where it has none.

    `target` as for `drafters.checkpoint.load`. Raises `DrafterError`.
    """
    from drafters.checkpoint import load

    head, model = load(path, target), engine.model
    head.share(
        embeddings=None if head.owns_embeddings else model.embedding,
        lm_head=None if head.owns_lm_head else model.head.weight.t(),
    )
    device = model.embedding.device
    head = head.to(device, walked_dtype(device, model.embedding.dtype))
    return head.eval().requires_grad_(False)


def answers(
    engine: Engine, held: Sequence[HeldOut], k: int, *, stage: str | None = "evaluate"
) -> list[Known]:
    """The greedy answers, and k tokens beyond each: a verify step that meets the end sees them.

    `stage`: whose progress is shown; None: none is.
    """
    given = [_proved(engine, each) for each in held]
    prompts = [list(h.token_ids) for h, answer in zip(held, given, strict=True) if answer is None]
    limits = [h.max_tokens for h, answer in zip(held, given, strict=True) if answer is None]
    what = stage and f"{stage}: greedy answers"
    made = iter(_generate(engine, prompts, limits, what, ignore_eos=False))
    whole = [answer if answer is not None else next(made) for answer in given]
    ends = [[*h.token_ids, *answer] for h, answer in zip(held, whole, strict=True)]
    tails = beyond(engine, ends, k, stage=stage)
    return [Known(h, a, b) for h, a, b in zip(held, whole, tails, strict=True)]


def beyond(
    engine: Engine, ends: list[list[int]], k: int, *, stage: str | None = "evaluate"
) -> list[list[int]]:
    """At most k tokens that the target would go on with, whatever ended the texts `ends`."""
    rooms = [min(k, engine.max_len - len(tokens)) for tokens in ends]
    what = stage and f"{stage}: beyond their ends"
    return _generate(engine, ends, rooms, what, ignore_eos=True)


def _proved(engine: Engine, held: HeldOut) -> list[int] | None:
    """The samples' greedy answer if each of its tokens is this model's own argmax."""
    if held.greedy_ids is None:
        return None
    answer = list(held.greedy_ids)
    tokens = [*held.token_ids, *answer]
    last = engine.capture(tokens, (engine.model.config.layers,))[:, 0]  # [T, H]
    begin = len(held.token_ids)
    choice = engine.model.logits(last[begin - 1 : -1]).argmax(-1).tolist()
    ended = answer[-1] in engine.end_ids or len(answer) == held.max_tokens
    return answer if choice == answer and ended else None


def _generate(
    engine: Engine,
    prompts: list[list[int]],
    limits: list[int],
    what: str | None,
    *,
    ignore_eos: bool,
) -> list[list[int]]:
    """Greedy continuations of at most `limits[i]` tokens; [] where there is no room for any.

    `what`: told as progress; None: none is.
    """
    from engines.reference.request import Request
    from engines.reference.sampling import SamplingParams

    requests: list[Request | None] = []
    for prompt, limit in zip(prompts, limits, strict=True):
        if limit < 1 or not engine.fits(len(prompt)):
            requests.append(None)
            continue
        params = SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=ignore_eos)
        requests.append(Request(prompt, params, stream=False))
        engine.submit(requests[-1])  # type: ignore[arg-type]
    progress, done = None if what is None else Progress(what, max(1, len(prompts))), 0
    while not all(request is None or request.finished for request in requests):
        engine.step()
        ended = [r for r in requests if r is None or r.finished]
        if len(ended) > done:
            tokens = sum(len(r.output) for r in ended[done:] if r is not None)
            done = len(ended)
            if progress is not None:
                progress.update(done - 1, tokens=tokens, text="")
    return [[] if request is None else request.output for request in requests]


def _groups(known: Sequence[Known], heads: int) -> Iterator[list[Known]]:
    """Answers of like length together, as many as the attention scores' memory allows."""
    group: list[Known] = []
    for each in sorted(known, key=lambda one: len(one.tokens)):
        scores = 4 * heads * len(each.tokens) ** 2 * (len(group) + 1)
        if group and (scores > ATTENTION_BYTES or len(group) == MOST_ROWS):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _walk_group(
    engine: Engine, head: Eagle3Drafter, group: list[Known], k: int
) -> tuple[list[DraftCounts], int, int]:
    """Each answer's counts; of the answers' tokens, how many are the states' argmax, and all."""
    import torch

    from training.data import Document, collate
    from training.evaluate import Span, draft_everywhere, walk
    from training.trainer import Captured

    length = max(len(each.tokens) for each in group)
    rows = [[Document(ids=each.tokens, loss_from=len(each.held.token_ids))] for each in group]
    aux, last = _states(engine, head.spec.aux_layers, group, length)
    aux = aux.to(head.lm_head.weight.dtype)
    captured = Captured(batch=collate(rows, length), aux=aux, last_normed=last)
    with torch.no_grad():
        drafts = draft_everywhere(head, captured, k)  # [rows, length, k]
    counts, right, scored = [], 0, 0
    for row, each in enumerate(group):
        begin = len(each.held.token_ids)
        end = begin + len(each.answer)
        span = Span(row=row, begin=begin, end=end, known=len(each.tokens))
        counts.append(counts_of(walk(drafts, captured.batch.ids, span)))
        choice = engine.model.logits(last[row, begin - 1 : end - 1]).argmax(-1).tolist()
        right += sum(a == b for a, b in zip(choice, each.answer, strict=True))
        scored += len(each.answer)
    return counts, right, scored


def _states(
    engine: Engine, layers: tuple[int, ...], group: list[Known], length: int
) -> tuple[Tensor, Tensor]:
    """Aux states [rows, length, n * H] and normed last states [rows, length, H], zero padded."""
    import torch

    hidden = engine.model.config.hidden_size
    like = engine.model.embedding
    aux = like.new_zeros(len(group), length, len(layers) * hidden)
    last = like.new_zeros(len(group), length, hidden)
    with torch.no_grad():
        for row, each in enumerate(group):
            states = engine.capture(each.tokens, (*layers, engine.model.config.layers))
            aux[row, : len(each.tokens)] = states[:, :-1].flatten(1)
            last[row, : len(each.tokens)] = states[:, -1]
    return aux, last


def _walked(known: Known, counts: DraftCounts) -> Walked:
    return Walked(
        prompt_id=known.held.prompt_id,
        category=known.held.category,
        prompt_tokens=len(known.held.token_ids),
        token_ids=tuple(known.answer),
        counts=counts,
    )
