"""Acceptance pooled from counts, with its interval over prompts; and shares with theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from harness.analyse.statistics import wilson
from harness.diagnose.experiments.figures import length, proportion
from harness.diagnose.records import Length, Proportion
from harness.measure.metrics import acceptance_length, pool
from harness.records import DraftCounts

Z = 1.96


def length_of(
    by_prompt: Mapping[str, Sequence[DraftCounts]], *, k: int, counts: DraftCounts | None = None
) -> Length:
    """The acceptance of these requests, the prompts being the sample.

    `counts`: what is told as the pooled counts, where it isn't the requests' own sum.
    """
    each = [whole for parts in by_prompt.values() if (whole := pool(list(parts))) is not None]
    found = length(each, k)
    if counts is None:
        return found
    return msgspec.structs.replace(found, counts=counts, length=acceptance_length(counts))


def counts_of_steps(steps: Sequence[int], k: int) -> DraftCounts:
    """Of verify steps that accepted so many of k drafts each."""
    reached = tuple(sum(n > i for n in steps) for i in range(k))
    return DraftCounts(
        drafts=len(steps), drafted=k * len(steps), accepted=sum(steps), per_position=reached
    )


def share_of(trials: Iterable[tuple[str, bool]]) -> Proportion | None:
    """Trials by prompt, each right or wrong -> their share; None of none."""
    hits: dict[str, int] = defaultdict(int)
    of: dict[str, int] = defaultdict(int)
    for prompt, right in trials:
        hits[prompt] += right
        of[prompt] += 1
    if not of:
        return None
    found = proportion([hits[name] for name in of], list(of.values()))
    if found.low is None or found.high is None:
        low, high = wilson(found.hits, found.of, Z)
        return msgspec.structs.replace(found, low=low, high=high)
    return found


def parts_of(trials: Sequence[tuple[float, str, bool]], parts: int) -> tuple[Proportion, ...]:
    """Trials (place, prompt, right) in order of their place, in equal parts."""
    ordered = sorted(trials, key=lambda trial: trial[0])
    size = len(ordered) / parts
    found = [
        share_of(
            (prompt, right) for _, prompt, right in ordered[round(i * size) : round((i + 1) * size)]
        )
        for i in range(parts)
    ]
    return tuple(p for p in found if p is not None)
