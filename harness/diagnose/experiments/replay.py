"""The drafter in float32 on the engine's own states and tokens, beside what the engine proposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engines.trace.base import TraceStep
from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.records import Replay


def replay(knowledge: Knowledge, trace: Mapping[str, Sequence[TraceStep]]) -> Replay:
    """Every reading of the drafter on the trace's states, the one that fits best first."""
    raise NotImplementedError
