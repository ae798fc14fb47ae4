"""Hidden states from the reference engine's own forward pass, in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.base import EngineUsageError
from engines.capture.base import CaptureSpec, RowStates
from engines.capture.target import capture_target, check_layers
from engines.reference.cache import Batch
from engines.reference.config import read_config
from engines.reference.loading import load_model
from engines.reference.weights import DTYPES

MASK_ELEMENTS = 2**26
"""The most elements of one batch's attention mask [rows, T, T]: 256 MiB in float32."""


class ReferenceCapturer:
    """Rows of a batch are padded to the longest; what follows a row's end cannot change it."""

    name = "reference"

    def __init__(self, spec: CaptureSpec) -> None:
        self.spec = spec
        check_layers(spec.aux_layers, capture_target(spec.target))
        config = read_config(spec.target)
        if spec.max_length > config.max_positions:
            raise EngineUsageError(
                f"{spec.target}: samples of {spec.max_length} tokens, but the target has "
                f"{config.max_positions} positions: lower capture.max_length"
            )
        if spec.device.startswith("cuda") and not torch.cuda.is_available():
            raise EngineUsageError(f"device {spec.device}: torch finds no CUDA device; use cpu")
        name = (config.dtype if spec.dtype == "auto" else spec.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise EngineUsageError(f"dtype {name}: must be auto or one of {', '.join(DTYPES)}")
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.model = load_model(spec.target, config, DTYPES[name], spec.device)
        self.model.prepare_rope(spec.max_length)

    def capture(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """Few long rows at a time, so that the mask of a batch stays small."""
        done: list[RowStates] = []
        while len(done) < len(rows):
            left = rows[len(done) :]
            count = 1
            while count < len(left):
                longest = max(len(row) for row in left[: count + 1])
                if (count + 1) * longest**2 > MASK_ELEMENTS:
                    break
                count += 1
            done += self._forward(left[:count])
        return done

    def close(self) -> None:
        """Nothing is held but memory."""

    @torch.no_grad()
    def _forward(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        longest = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)  # [n, T]
        for line, row in zip(ids, rows, strict=True):
            line[: len(row)] = torch.tensor(row)
        device = self.spec.device
        cache = self.model.new_cache(slots=len(rows), length=longest)
        batch = Batch(cache, first_slot=0, starts=[0] * len(rows), tokens=longest, device=device)
        last, aux = self.model.forward(ids.to(device), batch, cache, self.spec.aux_layers)
        assert aux is not None
        return [
            RowStates(
                token_ids=ids[i, : len(row)].clone(),
                aux=_own(aux[i, : len(row)]),
                last_normed=_own(last[i, : len(row)]),
            )
            for i, row in enumerate(rows)
        ]


def _own(part: Tensor) -> Tensor:
    """On the CPU and without the batch it was cut from."""
    return part.detach().cpu().clone()
