"""What the drafter was handed, beside the reference's states of the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engines.trace.base import TraceStep
from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.records import States


def compare_states(knowledge: Knowledge, trace: Mapping[str, Sequence[TraceStep]]) -> States:
    """Every aux slot's rows beside all layers' states of the reference engine."""
    raise NotImplementedError
