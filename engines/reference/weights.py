"""Read a checkpoint's tensors by name: one safetensors file or index shards, cast on reading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engines.base import EngineUsageError
from engines.checkpoint import read_json

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Weights:
    """The tensors of one checkpoint folder, opened lazily.

    `take(name)` returns a tensor of `dtype` (None: as it is stored) on `device` and remembers that
    it was used; `unused()` lists the names nobody asked for, so that nothing is ignored in silence.
    """

    def __init__(
        self, folder: Path, *, prefix: str, dtype: torch.dtype | None, device: str
    ) -> None:
        self.folder, self.prefix, self.dtype, self.device = folder, prefix, dtype, device
        self._files = _locate(folder)
        self._open: dict[Path, safe_open] = {}
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self._files

    def take(self, name: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor `name`, cast to `dtype` (default: the model's).

        Raises `EngineUsageError` where it is missing, or holds what is no number.
        """
        full = self.prefix + name
        path = self._files.get(full)
        if path is None:
            raise EngineUsageError(f"{self.folder}: the checkpoint has no tensor {full}")
        self._taken.add(full)
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            tensor = self._open[path].get_tensor(full)
        except (SafetensorError, OSError) as error:
            raise EngineUsageError(f"{path}: cannot be read: {error}") from error
        if tensor.dtype in DTYPES.values() and not bool(tensor.isfinite().all()):
            # Every answer would be the same token, and every draft of it accepted.
            raise EngineUsageError(
                f"{path}: tensor {full} holds NaN or infinite numbers: the checkpoint is damaged; "
                "copy it again, or take an earlier one"
            )
        return tensor.to(self.device, dtype or self.dtype)

    def take_linear(self, *names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of linear layers that read the same input, as one. Bias: all or none."""
        weight = self.take_joined([f"{name}.weight" for name in names])
        if f"{names[-1]}.bias" not in self:
            return weight, None
        # DeepSeek's attention_bias leaves out the full q_proj
        rows = [self.take(f"{n}.weight").shape[0] for n in names]
        parts = [
            self.take(f"{n}.bias") if f"{n}.bias" in self else weight.new_zeros(r)
            for n, r in zip(names, rows, strict=True)
        ]
        return weight, torch.cat(parts)

    def take_joined(self, names: list[str]) -> torch.Tensor:
        """Several matrices stacked along the output dimension: one multiplication, not several."""
        return torch.cat([self.take(name) for name in names])

    def take_experts(self, base: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [E, 2I, H] and down [E, H, I], from fused or from per-expert tensors."""
        if f"{base}.gate_up_proj" in self:
            return self.take(f"{base}.gate_up_proj"), self.take(f"{base}.down_proj")
        each: list[Callable[[int], torch.Tensor]] = [
            lambda e: self.take_joined(
                [f"{base}.{e}.gate_proj.weight", f"{base}.{e}.up_proj.weight"]
            ),
            lambda e: self.take(f"{base}.{e}.down_proj.weight"),
        ]
        gate_up, down = (torch.stack([read(e) for e in range(count)]) for read in each)
        return gate_up, down

    def unused(self) -> list[str]:
        """Names of tensors that were never taken."""
        return sorted(set(self._files) - self._taken)


def _locate(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {n: folder / f for n, f in read_json(index).get("weight_map", {}).items()}
        missing = sorted({str(path) for path in files.values() if not path.exists()})
        if missing:
            raise EngineUsageError(f"{missing[0]}: named by {index.name} but missing")
        return files
    single = folder / "model.safetensors"
    if not single.exists():
        raise EngineUsageError(f"{single}: no such file; the checkpoint has no safetensors weights")
    try:
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), single)
    except (SafetensorError, OSError) as error:
        raise EngineUsageError(f"{single}: cannot be read: {error}") from error
