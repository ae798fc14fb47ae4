"""Acceptance pooled from counts, with its interval over prompts; and shares with theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from harness.analyse.ratio import ratio, share
from harness.analyse.statistics import wilson
from harness.diagnose.records import Length, Proportion
from harness.measure.metrics import pool
from harness.records import DraftCounts

Z = 1.96


def length_of(
    by_prompt: Mapping[str, Sequence[DraftCounts]], *, k: int, counts: DraftCounts | None = None
) -> Length:
    """The acceptance of these requests, the prompts being the sample.

    `counts`: what is told as the pooled counts, where it isn't the requests' own sum.
    """
    import numpy as np

    each = [whole for parts in by_prompt.values() if (whole := pool(list(parts))) is not None]
    drafts = np.array([c.drafts for c in each], dtype=float)
    accepted = np.array([c.accepted for c in each], dtype=float)
    pooled = counts or pool(each) or DraftCounts(drafts=0, accepted=0)
    found = ratio(accepted, drafts, offset=1, most=k + 1)
    value = found.value if counts is None else _length(pooled)
    return Length(counts=pooled, prompts=len(each), length=value, low=found.low, high=found.high)


def _length(counts: DraftCounts) -> float | None:
    return 1 + counts.accepted / counts.drafts if counts.drafts else None


def share_of(trials: Iterable[tuple[str, bool]]) -> Proportion | None:
    """Trials by prompt, each right or wrong -> their share; None of none."""
    import numpy as np

    hits: dict[str, int] = defaultdict(int)
    of: dict[str, int] = defaultdict(int)
    for prompt, right in trials:
        hits[prompt] += right
        of[prompt] += 1
    total = sum(of.values())
    if not total:
        return None
    names = list(of)
    found = share(
        np.array([hits[n] for n in names], dtype=float), np.array([of[n] for n in names], float)
    )
    low, high = found.low, found.high
    if low is None or high is None:
        low, high = wilson(sum(hits.values()), total, Z)
    return Proportion(hits=sum(hits.values()), of=total, low=low, high=high)


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
