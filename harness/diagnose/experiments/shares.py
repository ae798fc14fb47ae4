"""Rows that hold a part of what a layer's feed-forward should have added: one rank's sum.

A rank of tensor parallelism holds some of the feed-forward's neurons. What it adds is the sum over
these, so that a row r with the stream x before it and the neurons' activations a is
c_0 x_r + sum_j c_j a_rj w_j with the same c for all rows: 1 for the neurons that are there, 0 for
the others. There are many more figures than neurons, so that c is found by least squares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.experiments.rows import Rows

MOST_NEURONS = 4096
FIGURES = 8
"""So many figures a neuron are wanted, to find its share by."""


def shared_out(
    knowledge: Knowledge, rows: Rows, handed: Tensor, layer: int, chosen: Tensor
) -> Tensor | None:
    """The rows [R, H] that such shares of the addition before `layer` make, fitted to the chosen.

    None where the neurons cannot be told one by one, or are too many for the rows.
    """
    matrix = _down(knowledge, layer - 1)
    if matrix is None or matrix.shape[0] > MOST_NEURONS:
        return None
    index = chosen.nonzero().flatten()
    if index.numel() * matrix.shape[1] < FIGURES * matrix.shape[0]:
        return None
    active = torch.cat([_active(knowledge, one.tokens, layer - 1) for one in rows.requests])
    active = active[rows.at]  # [R, I]
    mlp = torch.cat([one.states.mlp[layer - 1] for one in rows.requests])
    stream = (rows.of_layer(layer) - mlp)[rows.at]  # [R, H]
    share = _least_squares(active[index], stream[index], handed[index], matrix)
    return share[0] * stream + (active * share[1:]) @ matrix


def _least_squares(active: Tensor, stream: Tensor, wanted: Tensor, matrix: Tensor) -> Tensor:
    """c [1 + I] for rows `wanted` [R, H]; see the module's docstring."""
    a, x, y, w = (t.double() for t in (active, stream, wanted, matrix))
    size = a.shape[1] + 1
    products = torch.empty(size, size, dtype=torch.float64)
    products[1:, 1:] = (a.t() @ a) * (w @ w.t())
    products[0, 1:] = products[1:, 0] = (a * (x @ w.t())).sum(0)
    products[0, 0] = x.square().sum()
    right = torch.cat(((x * y).sum()[None], (a * (y @ w.t())).sum(0)))
    ridge = 1e-9 * products.diagonal().mean()
    found = torch.linalg.solve(products + ridge * torch.eye(size, dtype=torch.float64), right)
    return found.to(active.dtype)


def _part(knowledge: Knowledge, layer: int) -> tuple[Any, str] | None:
    """The feed-forward of a layer, and the name of its last product; None where it has several."""
    mlp = knowledge.engine.model.layers[layer].mlp
    name = next((n for n in ("down_all", "down") if hasattr(getattr(mlp, n, None), "weight")), None)
    return None if name is None else (mlp, name)


def _down(knowledge: Knowledge, layer: int) -> Tensor | None:
    """What each neuron adds, [I, H]."""
    part = _part(knowledge, layer)
    return None if part is None else getattr(*part).weight


def _active(knowledge: Knowledge, tokens: list[int], layer: int) -> Tensor:
    """The neurons' activations, [T, I]."""
    part = _part(knowledge, layer)
    assert part is not None
    mlp, name = part
    whole = getattr(mlp, name)
    kept: list[Tensor] = []

    def heard(x: Tensor) -> Tensor:
        kept.append(x)
        found: Tensor = whole(x)
        return found

    try:
        setattr(mlp, name, heard)
        knowledge.engine.capture(tokens, (0,))
    finally:
        setattr(mlp, name, whole)
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in kept]).clone()
