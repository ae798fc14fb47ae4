"""What every source of hidden states answers, and how one is opened by name.

Layers are transformers' hidden-state indices: 0 the embeddings, i the input of layer i, and the
number of layers L the last state after the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engines.base import EngineUsageError

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("reference", "vllm", "sglang", "transformers")


@dataclass(frozen=True, kw_only=True)
class CaptureSpec:
    """Which states of which target, and how its engine is run.

    `aux_layers` in the order of the concatenation, `max_length` the longest sample in tokens,
    `batch` the most samples at once. `workdir` takes an engine's log and the files it hands over.
    `on_phase(phase, elapsed_s)` hears of an engine's start-up.
    """

    target: Path
    aux_layers: tuple[int, ...]
    max_length: int
    batch: int
    workdir: Path
    dtype: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    tensor_parallel: int = 1
    kv_cache_gib: float | None = None
    trust_remote_code: bool = False
    startup_deadline_s: float = 600.0
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    on_phase: Callable[[str, float], None] | None = None


@dataclass(frozen=True, kw_only=True)
class RowStates:
    """The states of one sample of T tokens.

    `token_ids` int64 [T] as the engine saw them, `aux` [T, n * H] side by side in the order of
    `CaptureSpec.aux_layers`, `last_normed` [T, H] after the target's final norm. `choice` int32
    [T], where somebody has taken it: the argmax of the target's logits after each token.
    """

    token_ids: Tensor
    aux: Tensor
    last_normed: Tensor
    choice: Tensor | None = None


class Capturer(Protocol):
    """A source of hidden states, ready to be asked."""

    name: str

    def capture(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """The states of each row of token ids, in order; at most `CaptureSpec.batch` rows.

        Raises `EngineUsageError` for a row the target cannot take, `EngineFailed`.
        """

    def close(self) -> None:
        """End the engine and free what it holds. May be called any number of times."""


def open_capturer(name: str, spec: CaptureSpec) -> Capturer:
    """The source `name`, started. Raises `EngineUsageError`, `EngineFailed`."""
    if not spec.aux_layers:
        raise EngineUsageError("aux_layers: name at least one layer")
    if name == "reference":
        from engines.capture.reference import ReferenceCapturer

        return ReferenceCapturer(spec)
    if name == "transformers":
        from engines.capture.transformers import TransformersCapturer

        return TransformersCapturer(spec)
    if name == "vllm":
        from engines.capture.vllm import VllmCapturer

        return VllmCapturer(spec)
    if name == "sglang":
        from engines.capture.sglang import SglangCapturer

        return SglangCapturer(spec)
    raise EngineUsageError(f"no source of hidden states {name!r}: known are {', '.join(NAMES)}")
