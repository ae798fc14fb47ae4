"""Cheap proofs before the first update: are these the target's own states, its norm included?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from drafters.spec import RopeSpec
from harness.errors import GateFailed, UsageError
from training.loss import target_choice
from training.norm_count import count_votes
from training.states import SampleStates, StateSource
from training.train.target import TargetTensors, off_norm
from training.train.validation import HeldOut

SAMPLES = 16
MOST_TOKENS = 4096  # the proof is a look, not a pass over the data
NORM_OFF = 0.02  # bfloat16 and fp8 with a scale a row stay well below
LEAST_SAMPLED = 0.3  # of tokens sampled at a temperature that are still the target's argmax


def prove_states(
    source: StateSource,
    members: Sequence[int],
    greedy: frozenset[str],
    tensors: TargetTensors,
    *,
    least: float,
    layers: int,
) -> float:
    """The share of answer tokens that are the argmax of the state before, over some samples.

    Raises `GateFailed` where it is too small, or where the states did not pass the target's final
    norm: the drafter would learn from wrong targets, in silence.
    """
    greedy_first = sorted(members, key=lambda i: source.sample_ids[i] not in greedy)
    right = scored = tokens = 0
    least_share = least
    answers: list[tuple[Tensor, Tensor]] = []
    for index in greedy_first[:SAMPLES]:
        if tokens >= MOST_TOKENS:
            break
        states = source.read(index)
        _check_widths(states, tensors, layers)
        _check_norm(states, tensors)
        if states.sample_id not in greedy:
            least_share = min(least, LEAST_SAMPLED)
        first = max(states.loss_from, 1)
        answer = states.last_normed[first - 1 : -1], states.token_ids[first:]
        answers.append(answer)
        right += right_choices(*answer, tensors.lm_head)
        scored, tokens = scored + len(answer[1]), tokens + len(states.token_ids)
    share = right / scored if scored else 0.0
    if share < least_share:
        raise GateFailed(
            f"states: only {share:.3f} of {scored} answer tokens are the target's own choice by "
            f"lm_head of the state before them (wanted >= {least_share:.2f}): the states are of "
            "other tokens, miss the final norm or have it twice; capture them again"
        )
    votes = count_votes(answers, tensors.lm_head, tensors.norm)
    if votes.twice:
        raise GateFailed(
            f"states: {votes.undone} of {votes.tokens} answer tokens are the target's own choice "
            f"only with one final norm undone ({votes.kept} only as the states are): they passed "
            "the final norm twice; capture them again"
        )
    return share


def _check_widths(states: SampleStates, tensors: TargetTensors, layers: int) -> None:
    width = tensors.norm.shape[0]
    if states.aux.shape[-1] != layers * width or states.last_normed.shape[-1] != width:
        raise GateFailed(
            f"states: sample {states.sample_id} has aux states of {states.aux.shape[-1]} and last "
            f"states of {states.last_normed.shape[-1]} numbers, {layers} layers of the target's "
            f"{width} were captured; these states are of another target"
        )


def _check_norm(states: SampleStates, tensors: TargetTensors) -> None:
    off = off_norm(states.last_normed, tensors.norm)
    if not off <= NORM_OFF:
        raise GateFailed(
            f"states: the last states of sample {states.sample_id} did not pass the target's final "
            f"norm (their size is off by {off:.0%}, wanted <= {NORM_OFF:.0%}); capture them again"
        )


def right_choices(states: Tensor, tokens: Tensor, lm_head: Tensor) -> int:
    """How many of `tokens` [N] are the target's choice after the states before them [N, H].

    The choice is the loss's own (`target_choice`): of a bfloat16 head too no logits are rounded,
    which would make near ones tie. `lm_head` [V, H] may lie on another device.
    """
    head = lm_head if lm_head.dtype == torch.bfloat16 else lm_head.float()
    choice = target_choice(states.to(head.device, head.dtype), head)
    return int((choice.cpu() == tokens).sum())


def prove_rope(
    drafter: Eagle3Drafter,
    wanted: RopeSpec,
    measure: Callable[[], HeldOut],
) -> str:
    """A finetuned drafter whose rope is not the target's: keep it where it drafts better so.

    Returns what was found. Raises `UsageError` where the target's rope does as well or better: the
    config then says another rope than the drafter was trained with.
    """

    own = drafter.spec
    said = _score(measure())
    try:
        drafter.spec = msgspec.structs.replace(own, rope=wanted)
        drafter.reset_rope()
        with_targets = _score(measure())
    finally:
        drafter.spec = own
        drafter.reset_rope()
    told = (
        f"rope theta {own.rope.theta:g}, scaling {_kind(own.rope)} against the target's "
        f"{wanted.theta:g}, {_kind(wanted)}: held-out accuracy {said:.4f} as the config says, "
        f"{with_targets:.4f} with the target's"
    )
    if said <= with_targets:
        raise UsageError(
            f"drafter.finetune: {told}; correct rope_theta and rope_scaling in its config.json"
        )
    return told


def _score(held_out: HeldOut) -> float:
    """Accuracy over all draft steps: rope matters more the further a step looks."""
    accuracy = [a for a in held_out.accuracy if a is not None]
    return sum(accuracy) / max(len(accuracy), 1)


def _kind(rope: RopeSpec) -> str:
    return str((rope.scaling or {}).get("rope_type", "default"))
