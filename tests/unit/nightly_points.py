"""Makers of nights, points and suites for the tests of the nightly guard: no engine, no run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import msgspec

from harness.history.records import Point
from harness.nightly.judge import Case
from harness.nightly.records import (
    NIGHT_SCHEMA,
    Attempt,
    Baseline,
    EntryPoints,
    EntryState,
    Finding,
    Night,
)
from harness.nightly.series import series_of
from harness.nightly.suite import Gate, Suite

FIRST = date(2026, 9, 1)
SPEED = "output_tokens_per_s"


def night_name(number: int) -> str:
    """The name of the night so many days after the first."""
    return (FIRST + timedelta(days=number)).isoformat()


def point(value: float | None, metric: str = SPEED, **fields: Any) -> Point:
    """A speculative throughput at c8, with an interval of 1% to each side."""
    values: dict[str, Any] = {
        "run_id": "r", "created": "2026-09-01T00:00:00+00:00", "engine": "vllm",
        "variant": "speculative", "workload": "demo", "load": "c8", "metric": metric,
        "value": value, "unit": "tokens/s", "better": "higher", "n": 4,
        "ci_low": None if value is None else value * 0.99,
        "ci_high": None if value is None else value * 1.01,
    }  # fmt: skip
    return Point(**{**values, **fields})


def kept(
    number: int, points: Sequence[Point], *, entry: str = "chat", digest: str = "d", **more: Any
) -> EntryPoints:
    """An entry's figures of one night."""
    name = night_name(number)
    return EntryPoints(
        entry=entry, digest=digest, night=name, run=f"run-{name}", points=tuple(points), **more
    )


def case(
    values: Sequence[float | None],
    *,
    gates: Sequence[Gate] = (),
    fresh: Sequence[float] = (),
    control: Sequence[float] = (),
    suite: Suite | None = None,
    metric: str = SPEED,
    better: str | None = "higher",
    pinned: int | None = 0,
    **fields: Any,
) -> Case:
    """An entry with one series; the last value is tonight's, `pinned` the baseline's night."""
    nights = [
        kept(i, [point(v, metric, better=better)]) for i, v in enumerate(values) if v is not None
    ]
    name = f"chat/vllm/speculative/c8/{metric}"
    last = msgspec.structs.replace(
        nights[-1],
        fresh={name: tuple(fresh)} if fresh else {},
        control={name: tuple(control)} if control else {},
    )
    nights[-1] = last
    baseline = None
    if pinned is not None:
        one = next(n for n in nights if n.night == night_name(pinned))
        baseline = Baseline(
            suite="s", entry="chat", digest="d", night=one.night, run=one.run,
            pinned="2026-09-01T00:00:00+00:00", reason="test", points=one.points,
        )  # fmt: skip
    values_: dict[str, Any] = {
        "entry": "chat", "night": last.night, "gates": tuple(gates),
        "series": series_of("chat", nights, "d"), "baseline": baseline, "accepted": (),
        "nights": (), "digest": "d", "suite": suite or Suite(name="s"),
    }  # fmt: skip
    return Case(**{**values_, **fields})


def night(number: int, **fields: Any) -> Night:
    """A night with one entry that was measured."""
    values: dict[str, Any] = {
        "schema_version": NIGHT_SCHEMA, "suite": "s", "night": night_name(number),
        "begun": "2026-09-01T00:00:00+00:00", "ended": "2026-09-01T01:00:00+00:00",
        "entries": (state(),), "exit_code": 0,
    }  # fmt: skip
    return Night(**{**values, **fields})


def state(name: str = "chat", **fields: Any) -> EntryState:
    """An entry that was measured in a minute."""
    values: dict[str, Any] = {
        "name": name, "digest": "d", "status": "done", "why": "never measured",
        "attempt": Attempt(
            begun="2026-09-01T00:00:00+00:00", run="run-1", exit_code=0, seconds=60.0
        ),
    }  # fmt: skip
    return EntryState(**{**values, **fields})


def finding(**fields: Any) -> Finding:
    """A confirmed loss of 5% of the series of `case`."""
    values: dict[str, Any] = {
        "series": f"chat/vllm/speculative/c8/{SPEED}", "entry": "chat", "source": "series",
        "kind": "step", "direction": "worse", "status": "confirmed", "before": 100.0,
        "after": 95.0, "ratio": 0.95, "low": 0.94, "high": 0.96, "p_value": 1e-6,
        "first_bad": night_name(1), "found": night_name(1), "last_good": night_name(0),
        "changed": ("vllm: 0.31.0 -> 0.32.0",), "text": "it fell by 5%",
    }  # fmt: skip
    return Finding(**{**values, **fields})


def write_suite(folder: Path, text: str) -> Path:
    """A suite file."""
    path = folder / "suite.toml"
    path.write_text(text, "utf-8")
    return path
