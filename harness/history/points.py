"""A run's summary as points: one scalar each, for the history."""

from __future__ import annotations

from harness.findings import Summary
from harness.history.records import Labels, Point
from harness.records import Manifest


def points_of(summary: Summary, manifest: Manifest, labels: Labels | None = None) -> list[Point]:
    """Every scalar of a run that is worth following from run to run."""
    raise NotImplementedError
