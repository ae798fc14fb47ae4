"""Hidden states by sample, wherever they come from: stored shards, or an engine as it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


class SampleStates(msgspec.Struct, frozen=True, kw_only=True):
    """What the target computed for one sample of T tokens.

    `token_ids` int64 [T]; loss is on tokens `loss_from` … T - 1. `aux` [T, n * H]: the aux hidden
    states side by side; `last_normed` [T, H]: the last state AFTER the target's final norm. Both
    are float32 or bfloat16, whatever they were stored as.
    """

    sample_id: str
    category: str | None
    token_ids: Tensor
    loss_from: int
    aux: Tensor
    last_normed: Tensor


class StateSource(Protocol):
    """Samples with their states, by number; the order never changes between runs."""

    aux_layers: tuple[int, ...]
    """Transformers' hidden-state indices of the target, in the order of the concatenation."""
    lengths: Sequence[int]
    """Tokens of each sample."""
    sample_ids: Sequence[str]

    def read(self, index: int) -> SampleStates:
        """The states of sample `index`. Raises `TrainingError` where its shard is damaged."""

    def stream(self, order: Sequence[int]) -> Iterator[SampleStates]:
        """The states of the samples in `order`, read ahead."""
