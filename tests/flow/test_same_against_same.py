"""The embedded engine against itself: what is the same is seldom called better or worse."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.findings import Summary
from harness.prepare import Request, prepare
from harness.progress import PlainProgress
from harness.run import begin, measure

RUNS = 20
MOST_CALLED = 3
"""Of 20 runs at 5% or less, more are called once in 60."""


def same_against_same(out: Path, seed: int) -> Summary:
    """One whole run, both of whose variants are started without a drafter."""
    request = Request(
        out=out,
        sets=(
            f"seed={seed}",
            "load.concurrency=1",
            "load.num_requests=8",
            "load.warmup_requests=2",
            "workload.output_tokens=32",
            "compare.launches=3",
        ),
    )
    prepared = msgspec.structs.replace(prepare(request, "reference"), drafter=None)
    folder = begin(request, [prepared])
    return measure([prepared], folder, PlainProgress()).summary


def called(summary: Summary) -> bool:
    """Whether the run answers its question with a difference."""
    (speed,) = [c for c in summary.comparisons if c.metric == "output_tokens_per_s"]
    return speed.verdict in ("better", "worse")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_twenty_runs_of_the_same_are_seldom_called(demo_pair: Path, tmp_path: Path) -> None:
    summaries = [same_against_same(tmp_path, seed) for seed in range(RUNS)]
    assert all(s.void is None and not s.failures for s in summaries)
    assert all(c.pairs == 3 and c.ci_low is not None for s in summaries for c in s.comparisons)
    found = [s.run_id for s in summaries if called(s)]
    assert len(found) <= MOST_CALLED, found
