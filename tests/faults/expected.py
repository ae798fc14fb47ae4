"""What a case should be accepted: the trainer's own walk over the target's answers."""

from __future__ import annotations

from faults.records import Planted
from harness.records import DraftCounts


def expected(planted: Planted) -> DraftCounts:
    """Pooled over the prompts, with the drafter as its checkpoint says."""
    from training.evaluation.offline import walk_offline
    from training.evaluation.records import HeldOut

    held = [
        HeldOut(
            prompt_id=str(number),
            category=None,
            token_ids=tuple(prompt),
            max_tokens=planted.max_tokens,
        )
        for number, prompt in enumerate(planted.prompts)
    ]
    longest = max(len(prompt) for prompt in planted.prompts) + planted.max_tokens + planted.k
    walked = walk_offline(
        planted.target,
        planted.drafter,
        held,
        k=planted.k,
        dtype="float32",
        context=longest + 8,
    )
    return walked.counts
