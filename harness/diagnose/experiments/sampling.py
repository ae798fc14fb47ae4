"""Acceptance at a temperature: what the engine accepted beside what the distributions imply.

With p the target's distribution and q the drafter's, a draft drawn from q is accepted with
probability sum(min(p, q)), and one that is the drafter's likeliest with p(argmax q). Further drafts
count only where all before were accepted. The text was drawn from p, so that sums over drafts
become means over the text: sum over x of min(p, q)(x) f(x) = E[min(1, q(x) / p(x)) f(x)].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.analyse.ratio import ratio
from harness.diagnose.experiments.asking import Answered, Asked
from harness.diagnose.experiments.known import Knowledge, batch_of
from harness.diagnose.experiments.lengths import counts_of_steps, length_of, share_of
from harness.diagnose.experiments.observed import accepted_steps
from harness.diagnose.records import Length, Proportion, Sampling
from harness.findings import Estimate
from harness.records import DraftCounts

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.eagle3 import Eagle3Drafter
    from engines.trace.base import TraceStep

MOSTLY = 0.95
"""Drafts are the likeliest tokens if so many of them are."""
Traces = Mapping[str, Sequence["TraceStep"]]


@dataclass(frozen=True, kw_only=True)
class Start:
    """A verify step: its newest known token is at `newest`; `drafts` as traced."""

    newest: int
    accepted: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sampled answer: its question, all its tokens, and its steps before its last token."""

    question: str
    prompt_tokens: int
    tokens: list[int]
    starts: tuple[Start, ...]


def sampled(
    knowledge: Knowledge,
    asked: Asked,
    questions: Mapping[str, Sequence[int]],
    traces: Traces | None = None,
) -> Sampling | None:
    """`asked` beside what is implied; `questions`: prompts by name. None: no step can be judged.

    Observed and implied are of the same drafts: those that stand for a token of the text. What a
    step drafts behind the text's end is neither; whether a token is the last does not depend on the
    draft that stands for it, so that this selects nothing.
    """
    k, temperature = knowledge.k, asked.way.temperature
    rows = list(_rows(asked, questions, traces or {}, k))
    if not any(row.starts for row in rows):
        return None
    drawn, likeliest, firsts = _implied(knowledge, rows, temperature, k)
    names = [row.question for row in rows for _ in row.starts]
    by_argmax = _argmax(rows, firsts)
    share = None if by_argmax is None else by_argmax.share
    found = {
        "sampled": _estimate(names, drawn, k),
        "greedy": _estimate(names, likeliest, k),
    }
    own = found["greedy" if share is not None and share >= MOSTLY else "sampled"]
    return Sampling(
        temperature=temperature,
        observed=_observed(rows, k),
        implied_sampled=found["sampled"].value,
        implied_greedy=found["greedy"].value,
        implied_low=own.low,
        implied_high=own.high,
        drafts_are_argmax=by_argmax,
    )


def _rows(
    asked: Asked, questions: Mapping[str, Sequence[int]], traces: Traces, k: int
) -> Iterator[Row]:
    for answer in asked.ok:
        prompt = list(questions[answer.question])
        tokens = [*prompt, *answer.token_ids]
        row = Row(
            question=answer.question,
            prompt_tokens=len(prompt),
            tokens=tokens,
            starts=tuple(_starts(answer, len(prompt), len(tokens), traces, k)),
        )
        if len(answer.token_ids) > 1:
            yield row


def _starts(answer: Answered, begin: int, length: int, traces: Traces, k: int) -> Iterator[Start]:
    """The steps with a draft that stands for a token of the text, in the answer's own order."""
    traced = traces.get(answer.request, ())
    proposals = [tuple(step.drafts.tolist()) for step in traced if len(step.drafts)]
    accepted = answer.steps if answer.steps is not None else accepted_steps(traced)
    newest = begin
    for i, count in enumerate(accepted):
        within = min(k, length - 1 - newest)
        if within < 1:
            return
        drafts = proposals[i] if i < len(proposals) else ()
        yield Start(newest=newest, accepted=min(count, within), drafts=drafts)
        newest += count + 1


def _observed(rows: Sequence[Row], k: int) -> Length:
    """What the judged drafts were accepted."""
    by_question: dict[str, list[DraftCounts]] = defaultdict(list)
    for row in rows:
        accepted = [start.accepted for start in row.starts]
        by_question[row.question].append(counts_of_steps(accepted, k))
    return length_of(by_question, k=k)


def _implied(
    knowledge: Knowledge, rows: Sequence[Row], temperature: float, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For each step the accepted drafts that are implied: drawn [S], likeliest [S].

    And the drafter's likeliest first draft [S], ids of the target's vocabulary.
    """
    import torch

    drafter, model = knowledge.drafter, knowledge.engine.model
    states = [knowledge.states(row.tokens) for row in rows]
    unrolled = _unrolled(knowledge, rows, k)
    normed = [s.normed for s in states]
    at = [(r, start.newest) for r, row in enumerate(rows) for start in row.starts]
    drawn = torch.zeros(len(at))
    likeliest = torch.zeros(len(at))
    weight, same = torch.ones(len(at)), torch.ones(len(at))
    firsts = torch.zeros(len(at), dtype=torch.int64)
    vocabulary = drafter.to_target(torch.arange(drafter.spec.draft_vocab_size))  # [D]
    lengths = torch.tensor([len(row.tokens) for row in rows for _ in row.starts])
    newest = torch.tensor([n for _, n in at])
    for depth, logits in enumerate(unrolled):
        inside = newest + depth + 1 < lengths  # [S]; elsewhere a step's last token stands in
        places = [(r, min(n + depth, len(rows[r].tokens) - 2)) for r, n in at]
        q = (logits.float() / temperature).softmax(-1)  # [S, D]
        before = torch.stack([normed[r][place] for r, place in places])  # [S, H]
        p = (model.logits(before).float() / temperature).softmax(-1)  # [S, V]
        text = torch.tensor([rows[r].tokens[place + 1] for r, place in places])
        best = vocabulary[q.argmax(-1)]
        firsts = best if depth == 0 else firsts
        drawn += weight * torch.minimum(_chances_in(p, vocabulary.expand_as(q)), q).sum(-1) * inside
        likeliest += same * _chances_in(p, best[:, None])[:, 0] * inside
        p_text = p.gather(1, text[:, None])[:, 0]
        weight = weight * (chances_of(q, drafter, text) / p_text.clamp_min(1e-12)).clamp_max(1.0)
        same = same * (best == text)
    return drawn, likeliest, firsts


def _chances_in(p: Tensor, ids: Tensor) -> Tensor:
    """p's [S, V] probability of ids [S, n]; 0 of those that a damaged table points nowhere with."""
    size = p.shape[-1]
    found = p.gather(1, ids.clamp(0, size - 1))
    return found.masked_fill((ids < 0) | (ids >= size), 0.0)


def _unrolled(knowledge: Knowledge, rows: Sequence[Row], k: int) -> Iterator[Tensor]:
    """The drafter's logits [S, D] at each depth, fed with the text's own tokens."""
    import torch

    from training.unroll import Unroll

    aux = [knowledge.states(row.tokens).aux(knowledge.aux_layers) for row in rows]
    captured = batch_of(
        [(row.tokens, row.prompt_tokens, a) for row, a in zip(rows, aux, strict=True)]
    )
    length = captured.batch.ids.shape[1]
    # Slot t has token t + 1 and drafts t + 2: a step draws at the slot before its newest token.
    slots = [r * length + s.newest - 1 for r, row in enumerate(rows) for s in row.starts]
    with torch.no_grad():
        run = Unroll(knowledge.drafter, captured, torch.tensor(slots))
        for depth in range(k):
            yield knowledge.drafter.logits(run.step(run.text(depth)))


def chances_of(q: Tensor, drafter: Eagle3Drafter, tokens: Tensor) -> Tensor:
    """q's probability of tokens of the target's vocabulary, 0 where the drafter lacks them."""
    from harness.diagnose.experiments.running import draft_ids

    at = draft_ids(drafter, tokens)
    found = q.gather(1, at.clamp_min(0)[:, None])[:, 0]
    return found.masked_fill(at < 0, 0.0)


def _argmax(rows: Sequence[Row], firsts: Tensor) -> Proportion | None:
    starts = [(row.question, start) for row in rows for start in row.starts]
    return share_of(
        (question, start.drafts[0] == best)
        for (question, start), best in zip(starts, firsts.tolist(), strict=True)
        if start.drafts
    )


def _estimate(names: Sequence[str], values: Tensor, k: int) -> Estimate:
    import numpy as np

    total: dict[str, float] = defaultdict(float)
    of: dict[str, int] = defaultdict(int)
    for name, value in zip(names, values.tolist(), strict=True):
        total[name] += value
        of[name] += 1
    y = np.array([total[n] for n in of], dtype=float)
    x = np.array([of[n] for n in of], dtype=float)
    return ratio(y, x, offset=1, most=k + 1)
