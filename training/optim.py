"""Muon for the matrices, AdamW for the rest, under one schedule."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from training.precision import has_tiles

# Newton-Schulz quintic that drives all singular values towards 1 (K. Jordan, "Muon", 2024).
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Approximate polar factor of each matrix in [N, rows, columns], float32."""
    a, b, c = _QUINTIC
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    x = x.bfloat16() if has_tiles() else x
    for _ in range(iterations):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.to(matrices.dtype)
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised (Muon), matrices of one shape treated together.

    The update is scaled by sqrt(max(1, rows / columns)). A parameter with an attribute
    `muon_blocks` (count, dim) is that many matrices side by side along `dim`, such as experts
    stored in one tensor, each orthogonalised alone.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                buffer = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp_(buffer, group["momentum"])  # Nesterov
                count, dim = getattr(parameter, "muon_blocks", (1, 0))
                pairs = zip(parameter.chunk(count, dim), direction.chunk(count, dim), strict=True)
                for block, update in pairs:
                    by_shape.setdefault(tuple(block.shape), []).append((block, update))
            for shape, pairs_of_shape in by_shape.items():
                updates = orthogonalise(torch.stack([update for _, update in pairs_of_shape]))
                step = -group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for (block, _), update in zip(pairs_of_shape, updates, strict=True):
                    block.add_(update, alpha=step)


class Optimizers:
    """Muon on matrices and AdamW on embeddings, heads, norms and routers, stepped as one.

    The rates rise over `warmup` steps, hold, and fall linearly over the last 70% of all.
    """

    def __init__(
        self, model: nn.Module, *, muon_lr: float, adam_lr: float, steps: int, warmup: int = 20
    ) -> None:
        self.steps, self.warmup = steps, warmup
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            other = any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate.", "norm"))
            (rest if other or parameter.dim() != 2 else matrices).append(parameter)
        self.parameters = matrices + rest
        self.parts: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=muon_lr),
            torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.base = [muon_lr, adam_lr]

    def rate(self, step: int) -> float:
        """The factor on the rates at `step` (from 0)."""
        left = (self.steps - step) / (0.7 * self.steps)
        return min((step + 1) / self.warmup, 1.0, max(left, 0.02))

    def step(self, step: int) -> None:
        """Clip the gradients, update, and clear them."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for part, base in zip(self.parts, self.base, strict=True):
            for group in part.param_groups:
                group["lr"] = base * self.rate(step)
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        """The state of both parts."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: list[dict[str, object]]) -> None:
        """Restore what `state_dict` gave."""
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)
