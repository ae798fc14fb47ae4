"""From the plan's `load` table to load points, and what of it would make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.plan.schema import LoadSection
from harness.records import LoadPoint

DEFAULT_REQUESTS = 16
MOST_REQUESTS = 1_000_000
LIMITS = ("num_requests", "duration_s", "num_output_tokens")


def load_points(load: LoadSection) -> list[LoadPoint]:
    """The loads of the plan in order: closed loop, request rates, a burst, a schedule, a trace.

    What the plan leaves at its default is None in the point; `arrival` None is a closed loop or a
    Poisson process at `request_rate`. Without a limit a cell has `DEFAULT_REQUESTS` requests; a
    schedule and a trace end by themselves. Raises `UsageError` for keys that do not go together.
    """
    _check_limits(load)
    limits: dict[str, Any] = {name: getattr(load, name) for name in LIMITS}
    unlimited = all(limit is None for limit in limits.values())
    counted = {**limits, "num_requests": DEFAULT_REQUESTS} if unlimited else limits
    think: dict[str, Any] = {}
    if load.think_time_s > 0:
        think["think_time_s"] = load.think_time_s
        if load.think_time != "constant":
            think["think_time"] = load.think_time
    closed = [
        LoadPoint(
            mode="closed",
            concurrency=concurrency,
            max_request_rate=load.max_request_rate,
            **counted,
            **think,
        )
        for concurrency in _concurrencies(load)
    ]
    opened = [
        LoadPoint(
            mode="open",
            max_concurrency=load.max_concurrency,
            **arrivals,
            **(limits if arrivals.get("arrival") in ("schedule", "trace") else counted),
            **think,
        )
        for arrivals in _arrivals(load)
    ]
    _check_keys(load, closed=bool(closed), opened=bool(opened))
    if not closed and not opened:
        raise UsageError(
            "load: no load point; give load.concurrency, load.request_rate, load.schedule or "
            "load.trace"
        )
    _check_points(closed + opened)
    return closed + opened


def _concurrencies(load: LoadSection) -> tuple[int, ...]:
    if load.concurrency is not None:
        return load.concurrency
    opened = load.request_rate or load.schedule is not None or load.trace is not None
    return () if opened or load.arrival == "burst" else (1,)


def _arrivals(load: LoadSection) -> list[dict[str, Any]]:
    """What tells the open-loop points apart."""
    drawn: dict[str, Any] = {}
    if load.arrival in ("constant", "gamma"):
        drawn["arrival"] = load.arrival
    if load.arrival == "gamma":
        drawn["burstiness"] = load.burstiness
    points: list[dict[str, Any]] = [{"request_rate": r, **drawn} for r in load.request_rate or ()]
    if load.arrival == "burst":
        points.append({"arrival": "burst"})
    if load.schedule is not None:
        segments = tuple(
            (s.seconds, s.rate, s.rate if s.to is None else s.to) for s in load.schedule
        )
        points.append({"arrival": "schedule", "schedule": segments})
    if load.trace is not None:
        scale = load.time_scale if load.time_scale != 1.0 else None
        points.append({"arrival": "trace", "trace": load.trace, "time_scale": scale})
    return points


def _check_limits(load: LoadSection) -> None:
    given = [name for name in LIMITS if getattr(load, name) is not None]
    if len(given) > 1:
        raise UsageError(
            f"load: give {given[0]} or {given[1]}, not both; "
            f"--set load.{given[0]}=none takes a profile's away"
        )
    if load.arrival == "burst" and given and given != ["num_requests"]:
        raise UsageError(
            f"load.arrival=burst with load.{given[0]}: a burst is a number of requests at once; "
            "give load.num_requests"
        )


def _check_keys(load: LoadSection, *, closed: bool, opened: bool) -> None:
    """Raise `UsageError` for the first key that would have no effect."""
    rated = bool(load.request_rate)
    beside = [
        name for name in ("request_rate", "schedule", "trace") if getattr(load, name) is not None
    ]
    complaints = (
        (
            load.arrival == "burst" and bool(beside),
            f"load.arrival=burst with load.{(*beside, '')[0]}: a burst has no rate and no times; "
            "leave one of the two out",
        ),
        (
            load.arrival in ("constant", "gamma") and not rated,
            f"load.arrival={load.arrival}: only with load.request_rate; a closed loop has no "
            "arrivals, a schedule's are Poisson, a trace has its own",
        ),
        (
            load.burstiness != 1.0 and load.arrival != "gamma",
            f"load.burstiness={load.burstiness:g}: only with load.arrival=gamma",
        ),
        (
            load.time_scale != 1.0 and load.trace is None,
            f"load.time_scale={load.time_scale:g}: only with load.trace",
        ),
        (
            load.think_time == "exponential" and load.think_time_s == 0,
            "load.think_time=exponential: give its mean, load.think_time_s",
        ),
        (
            load.max_request_rate is not None and not closed,
            "load.max_request_rate: caps a closed loop; an open loop is sent at its request rate",
        ),
        (
            load.max_concurrency is not None and not opened,
            "load.max_concurrency: drops arrivals of an open loop; a closed loop's limit is "
            "load.concurrency",
        ),
    )
    for wrong, complaint in complaints:
        if wrong:
            raise UsageError(complaint)


def _check_points(points: list[LoadPoint]) -> None:
    """Raise `UsageError` where two points would be one cell, or one is beyond any machine."""
    labels = [load_label(point) for point in points]
    for point, label in zip(points, labels, strict=True):
        if labels.count(label) > 1:
            key = "concurrency" if point.mode == "closed" else "request_rate"
            value = getattr(point, key)
            raise UsageError(f"load.{key}: {value:g} is given twice; give each load point once")
        due = (point.request_rate or 0.0) * (point.duration_s or 0.0)
        if due > MOST_REQUESTS:
            raise UsageError(
                f"load.request_rate: {point.request_rate:g} a second for {point.duration_s:g} s "
                f"are {due:.0f} requests; a cell holds at most {MOST_REQUESTS}"
            )
        if point.schedule is not None:
            _check_schedule(point.schedule)
        if point.trace is not None:
            _check_trace(point.trace)


def _check_schedule(segments: tuple[tuple[float, float, float], ...]) -> None:
    due = sum(seconds * (first + last) / 2 for seconds, first, last in segments)
    if due <= 0:
        raise UsageError("load.schedule: no request is ever due; give a rate above 0")
    if due > MOST_REQUESTS:
        raise UsageError(
            f"load.schedule: about {due:.0f} requests; a cell holds at most {MOST_REQUESTS}"
        )


def _check_trace(name: str) -> None:
    try:
        found = Path(name).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        found = False
    if not found:
        raise UsageError(f"load.trace={name[:200]}: no such file; a JSONL file is wanted")


def load_label(load: LoadPoint) -> str:
    """A part of a folder's name, its own within a plan.

    `c4`: a concurrency of 4. `q2.5`, `q2.5-constant`, `q2.5-gamma0.5`: 2.5 requests per second.
    `burst16`, `schedule`, `trace`.
    """
    if load.mode == "closed":
        return f"c{load.concurrency}"
    if load.arrival == "burst":
        return f"burst{load.num_requests}"
    if load.arrival in ("schedule", "trace"):
        return load.arrival
    tail = "" if load.arrival in (None, "poisson") else f"-{load.arrival}"
    shape = f"{load.burstiness:g}" if load.arrival == "gamma" else ""
    return f"q{load.request_rate:g}{tail}{shape}"
