"""Binary search over a list whose first is good and whose last is bad, with some untestable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Label = Literal["good", "bad", "skip"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """What is known: `good` is the last good place, `bad` the first bad one behind it.

    `next`: which to measure now; None: the search is over. `skipped`: places between the two that
    could not be measured. `left`: measurements still needed, at most, if none is skipped.
    """

    good: int
    bad: int
    next: int | None
    skipped: tuple[int, ...]
    left: int


def span(names: Sequence[str], labels: Mapping[str, Label]) -> Span:
    """Where the search stands. The ends count as good and bad, whatever they are labelled."""
    good, bad = 0, len(names) - 1
    for place in range(1, len(names) - 1):
        label = labels.get(names[place])
        if label == "bad":
            bad = place
            break
        if label == "good":
            good = place
    between = range(good + 1, bad)
    skipped = tuple(i for i in between if labels.get(names[i]) == "skip")
    untried = [i for i in between if names[i] not in labels]
    middle = (good + bad) / 2
    chosen = min(untried, key=lambda i: abs(i - middle), default=None)
    left = len(untried).bit_length()
    return Span(good=good, bad=bad, next=chosen, skipped=skipped, left=left)
