"""Spoils the states that the reference engine hands its drafter.

A wrapper around the proposer that holds it in `inner`, as the trace expects of a plugin: the trace
is then taken behind it, and shows what the drafter was really handed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engines.reference.model import rms_norm

if TYPE_CHECKING:
    from engines.reference.engine import Engine
    from engines.reference.sampling import SamplingParams

RANKS = 8
Spoil = Callable[["Handed", Tensor, int], Tensor]
"""`spoil(wrapper, rows [T, A], slot) -> rows`; what it needs beside them lies in the wrapper."""


class Handed:
    """A proposer around another, whose states it spoils first.

    `where`: prefill, decode, batch (decode of several requests), late (decode after `after`
    verify steps of the engine) or everywhere. `share` of the rows, or with `unit` request of the
    requests, is spoiled.
    """

    def __init__(
        self, engine: Engine, spoil: Spoil, *, where: str, share: float, unit: str, seed: int
    ) -> None:
        assert engine.proposer is not None, "there is no drafter to spoil the states of"
        self.engine, self.inner, self.spoil = engine, engine.proposer, spoil
        self.where, self.share, self.unit = where, share, unit
        self.coins = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.chosen: dict[int, bool] = {}
        self.before: dict[int, Tensor] = {}  # what was right for a slot in its call before [T, A]
        self.others: list[Tensor] = []  # by slot, in this call
        self.calls, self.after = 0, 12
        self.inside = Inside(engine, engine.proposer.aux_layers)

    @property
    def k(self) -> int:
        return self.inner.k

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.inner.aux_layers

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        self.chosen[slot] = self.unit == "row" or self.coins.random() < self.share
        self.inside.told([0])
        self.others = [self.before.get(at, aux) for at in range(len(self.engine.running))]
        wanted = self.where in ("everywhere", "prefill")
        spoiled = self._spoiled(aux, slot, 0) if wanted else aux
        self.before[slot] = aux
        self.inner.begin(slot, tokens, spoiled)

    def record(self, starts: list[int], accepted: list[int], tokens: Tensor, aux: Tensor) -> None:
        self.calls += 1
        self.inside.told(starts)
        self.others = list(aux)
        rows = [self._decoded(aux[row], row, len(starts)) for row in range(len(starts))]
        self.before.update((row, aux[row, : accepted[row] + 1]) for row in range(len(starts)))
        self.inner.record(starts, accepted, tokens, torch.stack(rows))

    def move(self, source: int, target: int) -> None:
        for kept in (self.chosen, self.before):
            if source in kept:
                kept[target] = kept[source]
        self.inner.move(source, target)

    def propose(
        self, rows: int, params: list[SamplingParams] | None, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.inner.propose(rows, params, uniform)

    def _decoded(self, aux: Tensor, slot: int, batch: int) -> Tensor:
        wanted = {
            "everywhere": True,
            "decode": True,
            "batch": batch > 1,
            "late": self.calls > self.after,
        }.get(self.where, False)
        return self._spoiled(aux, slot, slot) if wanted else aux

    def _spoiled(self, aux: Tensor, slot: int, row: int) -> Tensor:
        """Rows [T, A] of one request; `row`: which of the call's it is to the model."""
        if not self.chosen.get(slot, True):
            return aux
        self.inside.row = row
        spoiled = self.spoil(self, aux, slot)
        if self.unit == "request" or self.share >= 1:
            return spoiled
        coins = torch.rand(len(aux), generator=self.generator)
        return torch.where((coins < self.share)[:, None], spoiled, aux)


class Inside:
    """What the target's layers made in the last call, beyond the states that are handed over.

    `wanted` names what is gathered: `branch`, the aux layers' last feed-forward outputs, `part`,
    what one of two ranks would have of them.
    """

    def __init__(self, engine: Engine, layers: tuple[int, ...]) -> None:
        self.engine, self.layers, self.row = engine, layers, 0
        self.parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def gather(self) -> None:
        """From now on keep the feed-forward outputs before each aux layer."""
        model: Any = self.engine.model
        for index in set(self.layers):
            layer = model.layers[index - 1]
            layer.mlp = _Kept(layer.mlp, self.parts.setdefault(index, []))

    def told(self, starts: list[int]) -> None:
        """A forward pass has ended; its chunks are one."""
        for index, chunks in self.parts.items():
            if chunks:
                whole = [torch.cat([chunk[side] for chunk in chunks], dim=1) for side in (0, 1)]
                self.kept[index] = (whole[0], whole[1])
                chunks.clear()

    def branch(self, side: int) -> Tensor:
        """[T, A] of the row at hand: the whole branch (0), or one rank's part of it (1)."""
        return torch.cat([self.kept[index][side][self.row] for index in self.layers], dim=-1)


class _Kept:
    """A feed-forward part that keeps its output, and what one rank of `RANKS` has of it."""

    def __init__(self, inner: Any, kept: list[tuple[Tensor, Tensor]]) -> None:
        self.inner, self.kept = inner, kept
        self.half = copy.copy(inner)
        name = "down_all" if hasattr(inner, "down_all") else "down"
        matrix = copy.copy(getattr(inner, name))
        kept_rows = torch.arange(len(matrix.weight)) % RANKS == 0
        matrix.weight = torch.where(kept_rows[:, None], matrix.weight, 0)
        setattr(self.half, name, matrix)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.kept.append((out, self.half(x)))
        return out


def zero(handed: Handed, aux: Tensor, slot: int) -> Tensor:
    return torch.zeros_like(aux)


def stale(handed: Handed, aux: Tensor, slot: int) -> Tensor:
    """The rows of the call before, as many as there are, the last ones repeated."""
    before = handed.before.get(slot, aux)
    at = torch.arange(len(aux)).clamp_max(len(before) - 1)
    return before[at]


def moved(handed: Handed, aux: Tensor, slot: int) -> Tensor:
    """Each row is the one of the token before."""
    before = handed.before.get(slot)
    first = aux[:1] if before is None or handed.where == "prefill" else before[-1:]
    return torch.cat((first, aux[:-1]))


def other_request(handed: Handed, aux: Tensor, slot: int) -> Tensor:
    """The rows of the next request of the batch; one that is alone keeps its own."""
    if len(handed.others) < 2:
        return aux
    other = handed.others[(slot + 1) % len(handed.others)]
    at = torch.arange(len(aux)) % len(other)
    return other[at]


def scaled(handed: Handed, aux: Tensor, slot: int) -> Tensor:
    return aux * 8.0


def normed(handed: Handed, aux: Tensor, slot: int) -> Tensor:
    """Each state after the norm of the layer that it enters."""
    model = handed.engine.model
    parts = aux.chunk(len(handed.aux_layers), dim=-1)
    pairs = zip(handed.aux_layers, parts, strict=True)
    eps = model.config.norm_eps
    return torch.cat([rms_norm(x, model.layers[i].attention_norm, eps) for i, x in pairs], dim=-1)


def branch(handed: Handed, aux: Tensor, slot: int) -> Tensor:
    """The last layer's own addition alone."""
    return handed.inside.branch(0)


def partial(handed: Handed, aux: Tensor, slot: int) -> Tensor:
    """One rank's part of the last feed-forward; the residual stream is added on another."""
    return handed.inside.branch(1)


def noisy(handed: Handed, aux: Tensor, slot: int) -> Tensor:
    """Noise of six tenths of each state's own size."""
    noise = torch.randn(aux.shape, generator=handed.generator)
    parts = aux.unflatten(-1, (len(handed.aux_layers), -1))
    size = parts.square().mean(-1, keepdim=True).sqrt()
    return aux + 0.6 * (noise.view_as(parts) * size).flatten(-2)


SPOILS: dict[str, Spoil] = {
    spoil.__name__: spoil
    for spoil in (*(zero, stale, moved, other_request, scaled, normed, branch, partial, noisy),)
}


def spoil_states(
    engine: Engine,
    *,
    kind: str,
    where: str = "everywhere",
    share: float = 1.0,
    unit: str = "row",
    seed: int = 0,
) -> None:
    """Plant it: see `Handed`."""
    handed = Handed(engine, SPOILS[kind], where=where, share=share, unit=unit, seed=seed)
    if kind in ("branch", "partial"):
        handed.inside.gather()
    engine.proposer = handed


def reuse_prefix(engine: Engine, *, share: float = 1.0, seed: int = 0) -> None:
    """States of a prompt's tokens that an earlier prompt began with too are zeros.

    The reference engine keeps no prefixes; the hook stands for a cache of them that keeps keys and
    values and no states.
    """
    seen: list[list[int]] = []

    def spoil(handed: Handed, aux: Tensor, slot: int) -> Tensor:
        prompt = engine.running[slot].prompt
        known = max((_common(prompt, other) for other in seen), default=0)
        seen.append(list(prompt))
        whole = min(known - known % 8, len(prompt) - 1)  # in blocks, and never the last token
        return torch.cat((torch.zeros_like(aux[:whole]), aux[whole:]))

    handed = Handed(engine, spoil, where="prefill", share=share, unit="request", seed=seed)
    engine.proposer = handed


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
