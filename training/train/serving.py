"""A checkpoint in the reference engine: what is really accepted, beside what states foretell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from harness.errors import UsageError
from training.data import Document, collate
from training.evaluate import DraftCounts, Span, draft_everywhere, walk_all
from training.plan import TrainingPlan
from training.states import SampleStates
from training.targets import reference_refusal
from training.train.feed import to_device
from training.trainer import Captured

if TYPE_CHECKING:
    from engines.reference.engine import Engine
    from engines.reference.request import Request

MOST_TOKENS = 128  # of one answer
REPRODUCED_SHARE = 0.5  # of the prompts; below, states of the engine's own answers are taken
TOLERANCE = 0.03  # of the acceptance rate: rounding of stored states flips few drafts


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the engine and of the offline walk over the same prompts and answers.

    `reproduced` of `prompts` were answered as their samples say. `states`: whose states were
    walked, the stored ones or (too few reproduced) those the engine computed for its answers.
    """

    prompts: int
    reproduced: int
    states: str
    real: DraftCounts
    expected: DraftCounts

    @property
    def tolerance(self) -> float:
        """The gap of the two rates that rounding may make: of few drafts, two that flip whole.

        The two are of the same prompts and answers, so that chance has no part in it.
        """
        k = len(self.expected.per_position)
        return max(TOLERANCE, 2 * k / max(self.expected.drafted, 1))

    @property
    def gap(self) -> float | None:
        """Expected minus real acceptance rate; None where nothing was drafted."""
        real, expected = self.real.acceptance_rate, self.expected.acceptance_rate
        return None if real is None or expected is None else expected - real


def check_servable(target: Path, device: str) -> None:
    """Raises `UsageError` where the reference engine could never serve the target here."""
    refused = reference_refusal(target, in_memory=device == "cpu")
    if refused is not None:
        raise UsageError(
            f"train.serve_check: {refused}; use --set train.serve_check=0 to train without"
        )


def serve(
    checkpoint: Path,
    drafter: Eagle3Drafter,
    target: Path,
    samples: Sequence[SampleStates],
    plan: TrainingPlan,
) -> Served:
    """Answer the samples' prompts greedily with the checkpoint drafting.

    What is expected is walked with `drafter`, as it stands in memory: the engine reads the folder.
    Raises `EngineUsageError`.
    """
    from engines.reference.loading import load_engine
    from engines.reference.sampling import SamplingParams

    k = plan.evaluate.k
    wanted = [_answer_length(states) for states in samples]
    longest = max(s.loss_from + n for s, n in zip(samples, wanted, strict=True)) + 1
    engine = load_engine(
        target,
        drafter=checkpoint,
        k=k,
        dtype=plan.engine.dtype,
        device=plan.engine.device,
        max_len=max(2, min(longest, drafter.spec.max_position_embeddings)),
        slots=1,
    )
    requests: list[Request] = []
    for states, n in zip(samples, wanted, strict=True):
        prompt = states.token_ids[: states.loss_from].tolist()
        requests += engine.generate([prompt], SamplingParams(max_tokens=n, temperature=0.0))
    return _compare(engine, drafter, samples, requests, k)


def _answer_length(states: SampleStates) -> int:
    return min(len(states.token_ids) - states.loss_from, MOST_TOKENS)


def _compare(
    engine: Engine,
    drafter: Eagle3Drafter,
    samples: Sequence[SampleStates],
    requests: Sequence[Request],
    k: int,
) -> Served:
    same = [
        states.token_ids[states.loss_from :][: len(r.output)].tolist() == r.output
        for states, r in zip(samples, requests, strict=True)
    ]
    stored = sum(same) >= max(1, REPRODUCED_SHARE * len(samples))
    real = expected = DraftCounts(drafts=0, drafted=0, accepted=0, per_position=(0,) * k)
    for states, request, agrees in zip(samples, requests, same, strict=True):
        if stored and not agrees:
            continue
        real = real + _counted(request, k)
        aux = states.aux if stored else _states(engine, drafter, states, request)
        expected = expected + _walked(drafter, states, request, aux, k)
    return Served(
        prompts=len(samples),
        reproduced=sum(same),
        states="stored" if stored else "of the engine's own answers",
        real=real,
        expected=expected,
    )


def _counted(request: Request, k: int) -> DraftCounts:
    """A request's accepted drafts within its answer; those behind its end are left out."""
    log = request.drafts
    assert log is not None
    accepted = list(log.accepted)
    if accepted:
        accepted[-1] -= log.past_end
    return DraftCounts(
        drafts=len(accepted),
        drafted=k * len(accepted),
        accepted=sum(accepted),
        per_position=tuple(sum(a > i for a in accepted) for i in range(k)),
    )


def _states(
    engine: Engine, drafter: Eagle3Drafter, states: SampleStates, request: Request
) -> Tensor:
    tokens = states.token_ids[: states.loss_from].tolist() + request.output
    return engine.capture(tokens, drafter.spec.aux_layers).flatten(1)


@torch.no_grad()
def _walked(
    drafter: Eagle3Drafter, states: SampleStates, request: Request, aux: Tensor, k: int
) -> DraftCounts:
    begin = states.loss_from
    ids = states.token_ids[:begin].tolist() + request.output
    batch = collate([[Document(ids=ids, loss_from=begin)]], len(ids))
    last = torch.zeros(1, len(ids), 1)  # nothing is asked of it
    captured = Captured(batch=batch, aux=aux[None, : len(ids)], last_normed=last)
    device = drafter.embed_tokens.weight.device
    drafts = draft_everywhere(drafter, to_device(captured, device, torch.float32), k)
    span = Span(row=0, begin=begin, end=len(ids), known=len(ids))
    return walk_all(drafts.cpu(), batch.ids, [span])
