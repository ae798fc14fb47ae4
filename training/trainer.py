"""Train an EAGLE-3 drafter by training-time test (TTT; `training.unroll` says what that is)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from training.counts import StepCounts, count
from training.loss import (
    LossKind,
    TargetHead,
    Wanted,
    head_loss,
    target_choice,
    target_head,
    within_draft_vocabulary,
)
from training.optim import Optimizers
from training.precision import has_tiles
from training.progress import Progress, Smoothed
from training.unroll import (
    Captured,
    Drafting,
    TttStep,
    Unroll,
    drafted_slots,
    drafting,
    greedy_tokens,
    shift,
    unroll,
)

__all__ = [
    "Captured",
    "StepCounts",
    "StepResult",
    "TargetHead",
    "TrainSettings",
    "TttStep",
    "autocast",
    "drafted_slots",
    "drafter_loss",
    "loss_slots",
    "shift",
    "target_head",
    "train_drafter",
    "unroll",
    "with_choice",
]


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`step_decay` is the base of the TTT steps' weights: step i counts step_decay ** i.

    `tokens`: what later steps are fed, the text's own tokens or the drafter's. `noise`: half-width
    of the uniform noise on the aux states, in units of each state's root mean square. The rates
    and `steps` are `train_drafter`'s alone.
    """

    steps: int
    ttt_steps: int = 3
    step_decay: float = 0.8
    muon_lr: float = 0.01
    adam_lr: float = 0.003
    loss: LossKind = "soft_cross_entropy"
    tokens: Literal["teacher", "own"] = "teacher"
    noise: float = 0.0
    gradient_checkpointing: bool = False
    precision: Literal["auto", "float32", "bfloat16"] = "float32"


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The loss of one batch to go backward from, and what was counted on the way."""

    loss: Tensor
    counts: StepCounts

    @property
    def accuracy(self) -> list[float]:
        """Per TTT step how often the target's own choice was drafted; NaN without a slot."""
        return [float("nan") if a is None else a for a in self.counts.accuracy]


def autocast(device: torch.device, precision: str = "auto") -> torch.autocast:
    """A context for forward passes: products in bfloat16 where asked for, or where it is faster.

    `auto`: on GPUs, and on CPUs with instructions for bfloat16 products (AMX, AVX512-BF16).
    Weights, norms, the residual stream and losses stay in float32.
    """
    fast = _quick_bfloat16() if device.type == "cpu" else device.type == "cuda"
    wanted = precision == "bfloat16" or (precision == "auto" and fast)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=wanted)


def _quick_bfloat16() -> bool:
    """Where a CPU has to take bfloat16 apart by itself, products take longer than in float32."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return has_tiles() or bool(supported and supported())


def noisy(aux: Tensor, layers: int, half_width: float, generator: torch.Generator | None) -> Tensor:
    """Aux states [..., layers * H] with uniform noise on each, relative to its root mean square."""
    if not half_width:
        return aux
    states = aux.unflatten(-1, (layers, -1))
    device = generator.device if generator is not None else aux.device
    noise = torch.rand(states.shape, generator=generator, device=device) * 2 - 1
    size = states.float().square().mean(-1, keepdim=True).sqrt() * half_width
    moved: Tensor = (states + noise.to(aux.device) * size).to(aux.dtype).flatten(-2)
    return moved


def with_choice(captured: Captured, lm_head: Tensor, ttt_steps: int) -> Captured:
    """`captured` with the target's choice wherever training looks at it; elsewhere it is 0."""
    if captured.choice is not None:
        return captured
    plan = drafting(captured.batch, ttt_steps)
    states = captured.last_normed.flatten(0, 1)[plan.positions]
    flat = torch.zeros_like(captured.batch.ids).flatten()
    flat[plan.positions] = target_choice(states, lm_head)
    return msgspec.structs.replace(captured, choice=flat.view_as(captured.batch.ids))


def loss_slots(drafter: Eagle3Drafter, captured: Captured, ttt_steps: int) -> Tensor:
    """How many slots carry loss in each TTT step, int64 [ttt_steps].

    Wants `captured.choice` (see `with_choice`), except where the whole vocabulary is drafted.
    Summed over the micro-batches of all ranks it is the `denominators` of `drafter_loss`, which
    make the losses and gradients of the parts add up to those of the whole.
    """
    plan = drafting(captured.batch, ttt_steps)
    if drafter.t2d is None:
        return plan.valid.sum(1)
    assert captured.choice is not None, "the target's choice is not known: see with_choice"
    inside = within_draft_vocabulary(drafter, captured.choice.flatten()[plan.positions])
    return (plan.valid & inside).sum(1)


def drafter_loss(
    drafter: Eagle3Drafter,
    captured: Captured,
    lm_head: Tensor | TargetHead,
    settings: TrainSettings,
    *,
    generator: torch.Generator | None = None,
    denominators: Tensor | None = None,
) -> StepResult:
    """The loss of one batch over all TTT steps: the weighted mean of the steps' mean losses.

    The accuracies are against the argmax over the target's whole vocabulary; a slot whose argmax
    cannot be drafted carries no loss. `lm_head` [V, H] is the target's; who calls often makes a
    `target_head` of it once. `generator` draws the noise. `denominators` [ttt_steps]: divide each
    step's sum of losses by this instead of its own number of slots (see `loss_slots`).
    """
    steps = settings.ttt_steps
    head = lm_head if isinstance(lm_head, TargetHead) else target_head(drafter, lm_head)
    with autocast(captured.aux.device, settings.precision):
        if drafter.t2d is not None:
            captured = with_choice(captured, head.whole, steps)
        plan = drafting(captured.batch, steps)
        wanted = _wanted(drafter, captured, head, plan)
        slots = (plan.valid & wanted.inside).sum(1) if denominators is None else denominators
        decay = settings.step_decay ** torch.arange(steps, device=slots.device).float()
        weights = decay / decay.sum() / slots.clamp_min(1)
        normed = _states(drafter, captured, plan, settings, generator)
        result = head_loss(drafter, normed, plan, wanted, kind=settings.loss, weights=weights)
    return StepResult(loss=result.loss, counts=count(plan, wanted.inside, result))


def _wanted(drafter: Eagle3Drafter, captured: Captured, head: TargetHead, plan: Drafting) -> Wanted:
    at = plan.positions
    choice = None if captured.choice is None else captured.choice.flatten()[at]
    everything = torch.ones(at.shape, dtype=torch.bool, device=at.device)
    return Wanted(
        states=captured.last_normed.flatten(0, 1)[at],
        choice=choice,
        inside=everything if choice is None else within_draft_vocabulary(drafter, choice),
        head=head.drafted,
    )


def _states(
    drafter: Eagle3Drafter,
    captured: Captured,
    plan: Drafting,
    settings: TrainSettings,
    generator: torch.Generator | None,
) -> Tensor:
    """The states for the logits of every TTT step [J, M, H]."""
    aux = noisy(captured.aux, len(drafter.spec.aux_layers), settings.noise, generator)
    checkpointing = settings.gradient_checkpointing
    run = Unroll(drafter, captured, plan.slots, aux=aux, checkpointing=checkpointing)
    states = [run.step(run.text(0))]
    for step in range(1, settings.ttt_steps):
        own = settings.tokens == "own"
        states.append(run.step(greedy_tokens(drafter, states[-1]) if own else run.text(step)))
    return torch.stack(states)


def train_drafter(
    drafter: Eagle3Drafter, data: Iterator[Captured], lm_head: Tensor, settings: TrainSettings
) -> Eagle3Drafter:
    """Train in place for `settings.steps` batches of `data`; `lm_head` [V, H] is the target's."""
    drafter.train()
    optimizers = Optimizers(
        drafter, muon_lr=settings.muon_lr, adam_lr=settings.adam_lr, steps=settings.steps
    )
    progress = Progress(f"drafter ({drafter.spec.kind})", settings.steps)
    smooth = Smoothed()
    head = target_head(drafter, lm_head)
    for step in range(settings.steps):
        captured = next(data)
        result = drafter_loss(drafter, captured, head, settings)
        result.loss.backward()
        optimizers.step(step)
        smooth.add(result.loss.item(), *result.accuracy)
        loss, *accuracy = smooth.values
        shown = " ".join(f"{a:.3f}" for a in accuracy)
        progress.update(
            step,
            tokens=captured.batch.ids.numel(),
            text=f"loss {loss:.3f}  accuracy per TTT step {shown}",
        )
    return drafter.eval()
