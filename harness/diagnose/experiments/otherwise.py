"""The states that readings hand to the drafter in the place of those it is handed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engines.reference.model import rms_norm
from training.unroll import shift

if TYPE_CHECKING:
    from engines.reference.model import Model
    from harness.diagnose.experiments.known import Knowledge

States = Callable[[Tensor], Tensor]
"""Aux states [rows, length, A] -> the same shape."""


def _per_layer(change: Callable[[Tensor, int], Tensor], layers: tuple[int, ...]) -> States:
    def states(aux: Tensor) -> Tensor:
        parts = aux.chunk(len(layers), dim=-1)
        return torch.cat([change(x, i) for x, i in zip(parts, layers, strict=True)], dim=-1)

    return states


def _normed(weight: Callable[[Model, int], Tensor]) -> Callable[[Knowledge], States | None]:
    """Under the norm of that weight; the state behind the last layer is normed already."""

    def of(knowledge: Knowledge) -> States | None:
        model, depth = knowledge.engine.model, knowledge.layers

        def change(x: Tensor, layer: int) -> Tensor:
            if layer == depth:
                return x
            return rms_norm(x, weight(model, layer), model.config.norm_eps)

        return _per_layer(change, knowledge.aux_layers)

    return of


def _scaled(factor: Callable[[Knowledge], float | None]) -> Callable[[Knowledge], States | None]:
    def of(knowledge: Knowledge) -> States | None:
        by = factor(knowledge)
        return None if by is None or by == 1 else (lambda aux: aux * by)

    return of


def _routed(knowledge: Knowledge) -> float | None:
    moe = knowledge.engine.model.config.moe
    return None if moe is None else 1 / moe.scaling


def _moved(by: int) -> Callable[[Knowledge], States | None]:
    """Each token has the states of the one `by` places further on."""

    def states(aux: Tensor) -> Tensor:
        if by > 0:
            return shift(aux, by)
        return torch.cat((aux[:, :1].expand(-1, -by, -1), aux[:, :by]), dim=1)

    return lambda _: states


STATES: dict[str, Callable[[Knowledge], States | None]] = {
    "states under the final norm": _normed(lambda model, _: model.norm),
    "states under their layers' norms": _normed(
        lambda model, layer: model.layers[layer].attention_norm
    ),
    "states doubled": _scaled(lambda _: 2.0),
    "states halved": _scaled(lambda _: 0.5),
    "states scaled as routed": _scaled(_routed),
    "states moved by +1": _moved(1),
    "states moved by -1": _moved(-1),
}
