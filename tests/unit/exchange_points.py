"""Points for tests of the export: by hand, and by hypothesis."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from harness.history.records import POINT_VARIANTS, Point

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=9)
AWKWARD = TEXTS | st.sampled_from(['a,b;"c"', "a\r\nb", "\\n", "\r", "=1+1", " x ", "ß\x00é"])
OPTIONAL = st.none() | AWKWARD
MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1)).map(
    lambda at: at.replace(tzinfo=UTC).isoformat(timespec="seconds")
)
POINTS = st.builds(
    Point,
    run_id=AWKWARD,
    created=MOMENTS,
    engine=AWKWARD,
    variant=st.sampled_from(POINT_VARIANTS),
    workload=AWKWARD,
    load=AWKWARD,
    metric=AWKWARD,
    value=st.none() | NUMBERS,
    unit=AWKWARD,
    better=st.sampled_from([None, "higher", "lower"]),
    ci_low=st.none() | NUMBERS,
    ci_high=st.none() | NUMBERS,
    n=st.none() | st.integers(0, 2**62),
    profile=OPTIONAL,
    drafter=OPTIONAL,
    target=OPTIONAL,
    git_commit=OPTIONAL,
    engine_version=OPTIONAL,
    source=AWKWARD,
    suite=OPTIONAL,
    settings=st.just("") | AWKWARD,
    drafter_name=OPTIONAL,
    target_name=OPTIONAL,
    folder=OPTIONAL,
    void=st.booleans(),
)


def point(metric: str = "ttft_s.p50", value: float | None = 0.05, **changes: Any) -> Point:
    """One of a run of the reference engine."""
    fields: dict[str, Any] = {
        "run_id": "20261101-100000-reference-ab12", "created": "2026-11-01T10:00:00+00:00",
        "engine": "reference", "variant": "speculative", "workload": "demo", "load": "c4",
        "unit": "s", "better": "lower", "profile": "demo", **changes,
    }  # fmt: skip
    return Point(metric=metric, value=value, **fields)
