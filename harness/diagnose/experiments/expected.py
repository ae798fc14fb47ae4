"""The paper check: what the drafter would be accepted on the target's own text."""

from __future__ import annotations

from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.records import Expected


def expect(knowledge: Knowledge, *, step_cost: float | None = None) -> Expected:
    """The drafter as its checkpoint says, walked over the knowledge's texts.

    `step_cost`: a verify step in plain decode steps, where it was measured.
    """
    raise NotImplementedError
