"""A run's summary as points: one scalar each, for the history.

The figures with an estimate in `summary.json` are taken from there, the others from its cells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

import msgspec

from harness.errors import UsageError, one_line
from harness.findings import (
    CellSummary,
    Comparison,
    EngineIntegrity,
    Speed,
    Summary,
    VariantEstimate,
)
from harness.history.figures import (
    LATENCIES,
    Figure,
    cell_figures,
    defined,
    finite,
    start_figures,
)
from harness.history.records import NO_LOAD, Labels, Point, PointVariant
from harness.plan.points import load_label
from harness.records import VARIANTS, LoadPoint, Manifest, Variant

MOVES_NOTHING = (
    *("load.", "compare.", "seed", "telemetry.", "target.path", "drafter.path", "engine.port"),
    *("name", "description", "target.parity", "expect."),
)
"""Keys of the plan that a point tells otherwise (load, digests), or that move no figure's level."""
MOVES = ("load.new_connections",)
"""Those that do all the same."""


def points_of(summary: Summary, manifest: Manifest, labels: Labels | None = None) -> list[Point]:
    """Every scalar of a run that is worth following from run to run.

    Raises `UsageError` where the manifest's `created` is no date.
    """
    created = utc_text(manifest.created)
    points: dict[tuple[str, str, str, str, str], Point] = {}
    for engine in dict.fromkeys(c.engine for c in summary.cells):
        known = _identity(summary, manifest, engine, labels or Labels())
        plain = {**known, "drafter": None, "drafter_name": None}
        for variant, workload, load, figure in _figures(summary, engine):
            point = Point(
                created=created,
                variant=variant,
                workload=workload,
                load=load,
                **(plain if variant == "baseline" else known),
                **msgspec.structs.asdict(figure),
            )
            points[engine, variant, workload, load, figure.metric] = point
    return list(points.values())


def utc_text(text: str) -> str:
    """An ISO moment in UTC, to the second; one without a zone is UTC. Raises `UsageError`."""
    try:
        moment = datetime.fromisoformat(text)
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return aware.astimezone(UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        raise UsageError(f"created: {one_line(text, 40)!r} is no date and time") from None


Placed = tuple[PointVariant, str, str, Figure]
"""A figure with its variant, workload and load."""


def _figures(summary: Summary, engine: str) -> Iterator[Placed]:
    """Of several figures of one name the last counts: estimates come behind what cells say."""
    cells = [c for c in summary.cells if c.engine == engine]
    for variant in VARIANTS:
        own = [c for c in cells if c.variant == variant]
        groups: dict[tuple[str, str], list[CellSummary]] = {}
        for cell in own:
            groups.setdefault((cell.workload, load_text(cell.load)), []).append(cell)
        for (workload, load), same in groups.items():
            for figure in cell_figures(same):
                yield variant, workload, load, figure
        for workload in dict.fromkeys(c.workload for c in own):
            for figure in start_figures(_starts(c for c in own if c.workload == workload)):
                yield variant, workload, NO_LOAD, figure
    workloads = {c.workload for c in cells}
    if len(workloads) == 1:  # what follows is told by engine and load alone
        yield from _pooled(summary, engine, cells[0].workload)


def _pooled(summary: Summary, engine: str, workload: str) -> Iterator[Placed]:
    """What the summary tells over all cells."""
    for estimate in summary.estimates:
        if estimate.engine == engine:
            yield estimate.variant, workload, load_text(estimate.load), _estimated(estimate)
    for comparison in summary.comparisons:
        if comparison.engine == engine:
            yield "ratio", workload, load_text(comparison.load), _compared(comparison)
    for speed in summary.speed:
        if speed.engine == engine:
            yield "ratio", workload, load_text(speed.load), _step_cost(speed)
    for variant, figure in _integrity(summary, engine):
        yield variant, workload, NO_LOAD, figure


def _step_cost(speed: Speed) -> Figure:
    cost = speed.relative_step_cost
    return Figure(
        metric="relative_step_cost",
        value=finite(cost.value),
        unit="baseline tokens",
        better="lower",
        ci_low=finite(cost.ci_low),
        ci_high=finite(cost.ci_high),
        n=speed.pairs,
    )


def _starts(cells: Iterable[CellSummary]) -> list[tuple[int, Any]]:
    """Every start's phases once: all its cells tell the same."""
    return list({c.repeat: c.startup for c in cells}.items())


def _metric(name: str) -> str:
    """Latencies are estimated and compared by their means."""
    return f"{name}.mean" if name in LATENCIES else name


def _estimated(told: VariantEstimate) -> Figure:
    return msgspec.structs.replace(
        defined(_metric(told.metric), told.value),
        ci_low=finite(told.ci_low),
        ci_high=finite(told.ci_high),
        n=told.units,
    )


def _compared(told: Comparison) -> Figure:
    return msgspec.structs.replace(
        defined(_metric(told.metric), told.ratio),
        unit="x",
        ci_low=finite(told.ci_low),
        ci_high=finite(told.ci_high),
        n=told.pairs,
    )


def _integrity(summary: Summary, engine: str) -> Iterator[tuple[Variant, Figure]]:
    told = next((i for i in summary.integrity if i.engine == engine), None)
    if told is None:  # before 1.2 the cells alone told it
        cells = [
            c.integrity for c in summary.cells if c.engine == engine and c.integrity is not None
        ]
        told = EngineIntegrity(
            engine=engine,
            compared=sum(i.compared for i in cells),
            diverged=sum(i.diverged for i in cells),
        )
    if told.compared:
        yield "speculative", _share("diverged_share", told.diverged, told.compared)
        if told.errors is not None:
            yield "speculative", _share("integrity_errors_share", told.errors, told.compared)
    if told.floor_compared:
        yield "baseline", _share("diverged_share", told.floor_diverged, told.floor_compared)
    for variant in VARIANTS:
        apart = [
            p.difference
            for p in summary.parity
            if (p.engine, p.variant) == (engine, variant) and p.difference is not None
        ]
        if apart:
            value = finite(max(apart))
            yield variant, Figure(metric="parity", value=value, unit="nats", better="lower")


def _share(metric: str, part: int, whole: int) -> Figure:
    return Figure(metric=metric, value=part / whole, unit="fraction", better="lower", n=whole)


def load_text(load: LoadPoint) -> str:
    """A load in a word that is its own from run to run: `c8`, `q2.5`, `q2.5-gamma0.5-max64`."""
    words = [load_label(load)]
    if load.arrival in ("schedule", "trace"):
        told = [load.schedule, load.trace and PurePath(load.trace).name, load.time_scale]
        words.append(hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:6])
    if load.think_time_s:
        about = "~" if load.think_time == "exponential" else ""
        words.append(f"think{about}{load.think_time_s:g}")
    if load.max_request_rate is not None:
        words.append(f"maxq{load.max_request_rate:g}")
    if load.max_concurrency is not None:
        words.append(f"max{load.max_concurrency}")
    return "-".join(words)


def _identity(summary: Summary, manifest: Manifest, engine: str, labels: Labels) -> dict[str, Any]:
    """What all points of an engine's cells have in common. The plan is of any shape: foreign."""
    request = _inside(manifest.plan, "request")
    models = _inside(manifest.plan, "models", engine)
    digests = manifest.digests.get(engine, {})
    return {
        "run_id": summary.run_id,
        "engine": engine,
        "profile": _text(_inside(manifest.plan, "engines", engine).get("name"))
        or _stem(request.get("profile")),
        "settings": settings_of(request),
        "drafter": digests.get("drafter"),
        "drafter_name": _last(models.get("drafter")),
        "target": digests.get("target"),
        "target_name": _last(models.get("target")),
        "git_commit": manifest.git_commit,
        "engine_version": engine_version(manifest, engine),
        "suite": labels.suite,
        "void": summary.void is not None,
    }


def settings_of(request: Mapping[str, Any]) -> str:
    """What was set beside the profile and moves figures, in the order of the keys."""
    sets, urls = request.get("sets"), request.get("urls")
    items = [item for item in sets if isinstance(item, str)] if isinstance(sets, list) else []
    last = dict(item.partition("=")[::2] for item in items)
    kept = {
        key.strip(): value.strip()
        for key, value in last.items()
        if key.strip() in MOVES or not key.strip().startswith(MOVES_NOTHING)
    }
    if isinstance(urls, dict) and urls:
        kept["url"] = ",".join(dict.fromkeys(str(url) for url in urls.values()))
    return one_line(" ".join(f"{key}={kept[key]}" for key in sorted(kept)), 200)


def engine_version(manifest: Manifest, engine: str) -> str | None:
    """Of the engine's own package; the reference engine's is the harness's."""
    packages = manifest.engine_versions.get(engine, {})
    for name in (engine, f"{engine}-cpu"):
        if name in packages:
            return packages[name]
    return manifest.versions.get("spec-harness") if engine == "reference" else None


def _inside(plan: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        plan = plan.get(key) if isinstance(plan, dict) else None
    return plan if isinstance(plan, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _stem(value: Any) -> str | None:
    text = _text(value)
    return PurePath(text).stem if text else None


def _last(value: Any) -> str | None:
    """A checkpoint's own name: the last part of its path."""
    text = _text(value)
    return (PurePath(text).name or None) if text else None
