"""What the drafter was trained for: its readings held against the target's own text."""

from __future__ import annotations

from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.records import Wanted


def want(knowledge: Knowledge) -> Wanted:
    """Every reading of the drafter over the knowledge's texts, the one accepted most first."""
    raise NotImplementedError
