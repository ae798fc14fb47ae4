"""Which prompts are kept from training, for validation and evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def held_out_prompts(prompt_ids: Iterable[str], share: float, seed: int) -> frozenset[str]:
    """The held-out share of the distinct prompt ids: at least one, never all where there are two.

    By prompt and not by sample: a prompt that was asked twice is held out with all its answers.
    Whether a prompt is among them depends on the ids and `seed` alone, not on their order.
    """

    def place(prompt_id: str) -> bytes:
        return hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()

    ordered = sorted(set(prompt_ids), key=place)
    wanted = max(1, round(share * len(ordered)))
    return frozenset(ordered[: min(wanted, max(1, len(ordered) - 1))])
