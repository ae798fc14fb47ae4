"""A request's own acceptance, as its engine told it in the answer."""

from __future__ import annotations

from typing import Any

import msgspec

from engines.base import Adapter
from harness.measure.metrics import from_histogram
from harness.records import DraftCounts

LARGEST = 2**31
"""No count of one request reaches this."""


def read_acceptance_of(adapter: Adapter, payloads: list[dict[str, Any]]) -> DraftCounts | None:
    """One request's own figures; None where the server sends none, or none of a known shape."""
    try:
        told = adapter.request_acceptance(payloads)
        if told is None:
            return None
        if told.histogram is not None:
            counts = from_histogram(told.drafts, told.drafted, told.histogram)
        else:
            counts = DraftCounts(drafts=told.drafts, drafted=told.drafted, accepted=told.accepted)
        # A list of steps that contradicts the counts is left out; the counts are the older field.
        agree = told.steps is not None and len(told.steps) == told.drafts
        steps = told.steps if agree and sum(told.steps or ()) == counts.accepted else None
        counts = msgspec.structs.replace(counts, steps=steps, past_end=told.past_end)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        return None  # figures in a shape nobody knows are figures that are missing
    return counts if believable(counts) else None


def believable(counts: DraftCounts) -> bool:
    """Whether a server's counts of one request are whole numbers that can be added up."""
    all_counts = [counts.drafts, counts.accepted, counts.drafted or 0, counts.past_end or 0]
    all_counts += [*(counts.per_position or ()), *(counts.steps or ())]
    return all(type(n) is int and 0 <= n < LARGEST for n in all_counts)
