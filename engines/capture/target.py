"""What capture needs to know of a target, whatever serves it: sizes, and single tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.formats import text_config, wrong_number
from engines.base import EngineUsageError
from engines.checkpoint import read_as, read_config

if TYPE_CHECKING:
    from torch import Tensor

_PREFIXES = ("", "language_model.", "model.language_model.")
"""Where the text model's tensors lie in a checkpoint: plain, or inside a multimodal wrapper."""


@dataclass(frozen=True, kw_only=True)
class CaptureTarget:
    """A target's sizes; `architecture` is the outermost one, by which engines choose their code."""

    folder: Path
    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool

    def norm(self) -> Tensor:
        """The final norm's weight, float32 [H]."""
        return self._take(("model.norm.weight",)).float()

    def head(self) -> Tensor:
        """The output head as it is stored, [V, H]; of a target with tied embeddings, those."""
        names = ("model.embed_tokens.weight",) if self.tied else ("lm_head.weight",)
        return self._take((*names, "model.embed_tokens.weight"))

    def embedding(self) -> Tensor:
        """The embedding as it is stored, [V, H]."""
        return self._take(("model.embed_tokens.weight",))

    def _take(self, names: tuple[str, ...]) -> Tensor:
        """The first of the tensors that exists, read alone. Raises `EngineUsageError`."""
        from engines.reference.weights import Weights

        weights = Weights(self.folder, prefix="", dtype=None, device="cpu")
        for name in names:
            for prefix in _PREFIXES:
                if prefix + name in weights:
                    return weights.take(prefix + name)
        raise EngineUsageError(f"{self.folder}: the checkpoint has no tensor {names[0]}")


def capture_target(folder: Path) -> CaptureTarget:
    """Read the target's config. Raises `EngineUsageError` for one that lacks a size."""
    config = read_config(folder, "target")
    text: dict[str, Any] = text_config(config)
    with read_as(folder / "config.json", "a language model"):
        if (wrong := wrong_number(text)) is not None:
            raise ValueError(wrong)
        return CaptureTarget(
            folder=folder,
            architecture=str((config.get("architectures") or [""])[0]),
            layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
            max_positions=int(text.get("max_position_embeddings") or 2048),
            norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        )


def check_layers(aux_layers: tuple[int, ...], facts: CaptureTarget) -> None:
    """Raise `EngineUsageError` where the target has no such layer."""
    wrong = [layer for layer in aux_layers if not 0 <= layer <= facts.layers]
    if wrong:
        raise EngineUsageError(
            f"aux layer {wrong[0]}: {facts.folder} has {facts.layers} layers, so hidden states "
            f"0 (the embeddings) to {facts.layers}"
        )


def final_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32."""
    from torch.nn import functional as F

    return F.rms_norm(states.float(), weight.shape, weight.float(), eps)


def inner_layers(aux_layers: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The layers that an engine must be asked for: ascending, once each, as engines return them.

    The embeddings (0) can be looked up and the last (L) is captured anyway; engines that capture
    at a layer's input cannot give either. Never empty where there is a layer between: engines must
    be asked for one at least.
    """
    wanted = {layer for layer in aux_layers if 0 < layer < layers}
    return tuple(sorted(wanted or range(layers - 1, 0, -1)[:1]))


def side_by_side(
    aux_layers: tuple[int, ...],
    captured: dict[int, Tensor],
    *,
    embeddings: Tensor | None,
    last_normed: Tensor,
) -> Tensor:
    """States by layer, each [T, H], laid side by side in the order of `aux_layers`: [T, n * H].

    `embeddings` [T, H] is hidden state 0, `last_normed` the one behind the last layer.
    """
    import torch

    parts = []
    for layer in aux_layers:
        if layer in captured:
            parts.append(captured[layer])
        else:
            parts.append(embeddings if layer == 0 and embeddings is not None else last_normed)
    return torch.cat([part.to(last_normed.dtype) for part in parts], dim=-1)
