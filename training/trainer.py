"""Train an EAGLE-3 drafter by training-time test (TTT).

Slot t holds the aux hidden states of token t. In step 0 it takes the embedding of token t + 1 and
predicts token t + 2; in step j it takes the drafter's own state of step j - 1, the embedding of
token t + 1 + j and position t + j, and predicts token t + 2 + j. Its attention in step j sees the
keys of step 0 up to t within its own dialogue, and its own keys of the steps 1 to j: exactly what
an engine's drafter sees after a verify step that ended at t.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from training.data import Batch
from training.loss import restrict, soft_cross_entropy, target_logits, within_draft_vocabulary
from training.optim import Optimizers
from training.progress import Progress, Smoothed


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with what the target computed for it.

    `aux` [rows, length, n * H]: the aux hidden states side by side, in the drafter's order;
    `last_normed` [rows, length, H]: the last state after the target's final norm.
    """

    batch: Batch
    aux: Tensor
    last_normed: Tensor


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`step_decay` is the base of the TTT steps' weights: step i counts step_decay ** i."""

    steps: int
    ttt_steps: int = 3
    step_decay: float = 0.8
    muon_lr: float = 0.01
    adam_lr: float = 0.003


class TttStep(msgspec.Struct, frozen=True, kw_only=True):
    """One TTT step over every slot: logits [rows, length, D] and the tokens drafted [rows, length].

    `tokens` are ids of the target's vocabulary.
    """

    logits: Tensor
    tokens: Tensor


def shift(x: Tensor, by: int) -> Tensor:
    """x[:, t + by] at t; the last `by` columns repeat the final one and mean nothing."""
    if by == 0:
        return x
    tail = x[:, -1:].expand(-1, by, *x.shape[2:])
    return torch.cat((x[:, by:], tail), dim=1)


def unroll(
    drafter: Eagle3Drafter, captured: Captured, steps: int, *, own_tokens: bool
) -> Iterator[TttStep]:
    """Run the TTT steps over all slots at once.

    With `own_tokens` each step after the first is fed the token the drafter itself chose, as when
    drafting; else the true one, as in training.
    """
    batch = captured.batch
    mask = slot_mask(batch.documents)
    attention = TttAttention(mask, drafter.scale)
    hidden = drafter.fuse(captured.aux)
    ids = shift(batch.ids, 1)
    for step in range(steps):
        positions = batch.positions + step
        q, k, v, residual = drafter.project(drafter.embed(ids), hidden, positions)
        hidden, normed = drafter.finish(attention(q, k, v), residual)
        logits = drafter.logits(normed)
        tokens = drafter.to_target(logits.detach().argmax(-1))
        yield TttStep(logits=logits, tokens=tokens)
        ids = tokens if own_tokens else shift(batch.ids, step + 2)


def slot_mask(documents: Tensor) -> Tensor:
    """Documents [B, T] -> additive mask [B, T, T]: causal, within a document."""
    length = documents.shape[1]
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    zeros = torch.zeros(same.shape, device=documents.device)
    return zeros.masked_fill_(~(same & causal), float("-inf"))


class TttAttention:
    """Attention of one TTT step; it keeps the keys and values of the steps before."""

    def __init__(self, mask: Tensor, scale: float) -> None:
        self.mask, self.scale = mask, scale
        self.keys: list[Tensor] = []  # each [B, heads, T, d_k]
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, heads, d_k], k and v [B, T, kv_heads, d] -> [B, T, heads, d_v]."""
        groups = q.shape[2] // k.shape[2]
        q = q.transpose(1, 2)
        self.keys.append(k.repeat_interleave(groups, 2).transpose(1, 2))
        self.values.append(v.repeat_interleave(groups, 2).transpose(1, 2))
        scores = q @ self.keys[0].transpose(2, 3) * self.scale + self.mask.unsqueeze(1)
        diagonal = [(q * key).sum(-1, keepdim=True) * self.scale for key in self.keys[1:]]
        weights = torch.cat((scores, *diagonal), dim=-1).softmax(-1)
        length = scores.shape[-1]
        out = weights[..., :length] @ self.values[0]
        for i, value in enumerate(self.values[1:]):
            out = out + weights[..., length + i].unsqueeze(-1) * value
        return out.transpose(1, 2)


def drafted_slots(batch: Batch, step: int) -> Tensor:
    """True at the slots [rows, length] whose prediction in TTT step `step` carries loss."""
    ahead = 2 + step
    same = shift(batch.documents, ahead) == batch.documents
    real = (batch.documents >= 0) & same & shift(batch.loss_mask, ahead)
    real[:, -ahead:] = False
    return real


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The weighted loss, and per TTT step how often the target's own choice was drafted."""

    loss: Tensor
    accuracy: list[float]


def drafter_loss(
    drafter: Eagle3Drafter, captured: Captured, lm_head: Tensor, settings: TrainSettings
) -> StepResult:
    """The loss of one batch over all TTT steps.

    The accuracy is against the argmax over the target's whole vocabulary; a slot whose argmax
    cannot be drafted carries no loss.
    """
    with torch.no_grad():
        wanted = target_logits(captured.last_normed, lm_head)  # [B, T, V]: of token t + 1
        choice = wanted.argmax(-1)
    total, weight_sum, accuracy = torch.zeros(()), 0.0, []
    for step, result in enumerate(unroll(drafter, captured, settings.ttt_steps, own_tokens=False)):
        ahead = step + 1
        slots = drafted_slots(captured.batch, step)
        chosen = shift(choice, ahead)
        accuracy.append((result.tokens == chosen)[slots].float().mean().item())
        slots = slots & within_draft_vocabulary(drafter, chosen)
        step_loss = soft_cross_entropy(
            result.logits[slots], restrict(drafter, shift(wanted, ahead)[slots])
        )
        weight = settings.step_decay**step
        total, weight_sum = total + weight * step_loss, weight_sum + weight
    return StepResult(loss=total / weight_sum, accuracy=accuracy)


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
    for step in range(settings.steps):
        captured = next(data)
        result = drafter_loss(drafter, captured, lm_head, settings)
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
