"""Samples to train on and samples held out, by the hash of their prompts' ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from training.held_out import held_out_prompts


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the samples to train on and of those held out, each in the source's order."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]
    train_prompts: frozenset[str]
    held_out_prompts: frozenset[str]

    @property
    def shared_prompts(self) -> int:
        """Prompts that lie in both parts: 0, or the held-out figures prove nothing."""
        return len(self.train_prompts & self.held_out_prompts)


def split(sample_ids: Sequence[str], prompts: Mapping[str, str], share: float, seed: int) -> Split:
    """Split the samples that have states; `prompts` names the prompt of every sample by its id.

    The held-out prompts are chosen among all of `prompts`, as evaluation chooses them.
    """
    kept = held_out_prompts(prompts.values(), share, seed)
    asked = [prompts[sample] for sample in sample_ids]
    train = [i for i, prompt in enumerate(asked) if prompt not in kept]
    held_out = [i for i, prompt in enumerate(asked) if prompt in kept]
    return Split(
        train=tuple(train),
        held_out=tuple(held_out),
        train_prompts=frozenset(asked[i] for i in train),
        held_out_prompts=frozenset(asked[i] for i in held_out),
    )
