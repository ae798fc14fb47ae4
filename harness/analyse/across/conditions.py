"""What the machine was doing while two runs were measured, where it was not alike."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from harness.analyse.across.readings import ended
from harness.analyse.across.records import Area, Difference, Stored
from harness.findings import GpuFigures
from harness.measure.hardware import SM_CLOCK, number_of

AFFECTS: tuple[Area, ...] = ("speed", "start-up")
BUSY_SHARE = 0.25
"""Of the usable cores: so much more waited for one at the beginning of a run."""
CLOCK_SHARE = 0.02
THROTTLED_SHARE = 0.05
"""Of the samples: so much more often something held the clocks back."""


def conditions(a: Stored, b: Stored) -> Iterator[Difference]:
    """Load of the machine as a run began, and the GPUs' clocks over its measured windows."""
    loads = [_load(s) for s in (a, b)]
    cores = number_of(a.run.manifest.environment.get("cores_usable")) or 1
    if None not in loads and abs((loads[0] or 0) - (loads[1] or 0)) > BUSY_SHARE * cores:
        yield _difference("load average at the beginning", [f"{load:.1f}" for load in loads])
    clocks = [_clock(s) for s in (a, b)]
    known = [clock for clock in clocks if clock is not None]
    if len(known) == 2 and abs(known[0] - known[1]) > CLOCK_SHARE * max(known):
        yield _difference("GPU clock, mean", [f"{clock:.0f} MHz" for clock in known])
    held = [_throttled(s) for s in (a, b)]
    for reason in dict.fromkeys((*held[0], *held[1])):
        shares = [own.get(reason, 0.0) for own in held]
        if abs(shares[0] - shares[1]) > THROTTLED_SHARE:
            yield _difference(f"clocks held back by {reason}", [f"{s:.0%}" for s in shares])


def _load(stored: Stored) -> float | None:
    told = stored.run.manifest.environment.get("load_average")
    return number_of(told[0]) if isinstance(told, list | tuple) and told else None


def _gpus(stored: Stored) -> list[GpuFigures]:
    """The engine's GPUs, of every block."""
    told = [c.telemetry.gpus for c in ended(stored) if c.telemetry is not None]
    return [gpu for gpus in told for gpu in gpus if gpu.engine is not False]


def _clock(stored: Stored) -> float | None:
    clocks = [gpu.gauges[SM_CLOCK].mean for gpu in _gpus(stored) if SM_CLOCK in gpu.gauges]
    return fmean(clocks) if clocks else None


def _throttled(stored: Stored) -> dict[str, float]:
    """By reason the mean share of samples; nothing where no GPU told it."""
    told = [gpu.throttled for gpu in _gpus(stored) if gpu.throttled is not None]
    reasons = dict.fromkeys(reason for own in told for reason in own)
    return {reason: fmean(own.get(reason, 0.0) for own in told) for reason in reasons}


def _difference(key: str, ends: list[str]) -> Difference:
    return Difference(key=key, reference=ends[0], candidate=ends[1], affects=AFFECTS)
