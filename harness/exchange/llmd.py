"""Points as Benchmark Reports of llm-d, version 0.2: one for each run, engine, variant and load.

What its schema has no place for is left out (`docs/exchange.md` names it).
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from harness.exchange.fields import PARTS
from harness.history.records import NO_LOAD, Point
from harness.records import Record

VERSION = "0.2"
UNKNOWN = "unknown"
LATENCIES = {
    "ttft_s": ("time_to_first_token", "s"),
    "tpot_s": ("time_per_output_token", "s/token"),
    "itl_s": ("inter_token_latency", "s/token"),
    "normalized_tpot_s": ("normalized_time_per_output_token", "s/token"),
    "e2el_s": ("request_latency", "s"),
}
RATES = {
    "output_tokens_per_s": ("output_token_rate", "tokens/s"),
    "prompt_tokens_per_s": ("input_token_rate", "tokens/s"),
    "total_tokens_per_s": ("total_token_rate", "tokens/s"),
    "requests_per_s": ("request_rate", "queries/s"),
}
Group = tuple[str, str, str, str, str]
"""run_id, engine, variant, workload, load."""


class Known(Record, frozen=True, kw_only=True):
    """What a run's folder tells beside its points: mean tokens of a request, its tool's version."""

    prompt: float | None = None
    output: float | None = None
    tool_version: str | None = None


def reports(
    points: Iterable[Point], known: Mapping[Group, Known] | None = None
) -> dict[Group, dict[str, Any]]:
    """Every report that there is something to say in."""
    groups: dict[Group, dict[str, Point]] = {}
    for point in points:
        if point.variant != "ratio" and point.load != NO_LOAD and not point.void:
            groups.setdefault(group_of(point), {})[point.metric] = point
    made: dict[Group, dict[str, Any]] = {}
    for group, own in groups.items():
        told = _completed((known or {}).get(group, Known()), own)
        aggregate = _aggregate(own, told)
        if aggregate:
            made[group] = _report(group, own, aggregate, told)
    return made


def group_of(point: Point) -> Group:
    """Whose report a point belongs to."""
    return point.run_id, point.engine, point.variant, point.workload, point.load


def file_name(group: Group) -> str:
    """A file's name for a report, its own among those of other groups."""
    run_id, engine, variant, _, load = group
    text = "-".join((run_id, engine, variant, load))
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', text)[:150]}-{_digest(group)[:6]}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()


def _report(
    group: Group, own: Mapping[str, Point], aggregate: Mapping[str, Any], known: Known
) -> dict[str, Any]:
    point = next(iter(own.values()))
    run_id, engine, variant, workload, load = group
    time: dict[str, Any] = {"start": point.created}
    if (seconds := _value(own, "duration_s")) is not None:
        time["duration"] = f"PT{seconds:f}S"
    scenario: dict[str, Any] = {"stack": [_component(point)]}
    told = _load(point, known)
    if told is not None:
        scenario["load"] = told
    return {
        "version": VERSION,
        "run": {
            "uid": str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(group))),
            "eid": run_id,
            "time": time,
            "description": f"{engine}, {variant}: {workload} at {load}",
            "keywords": [engine, variant, workload, load, point.source],
        },
        "scenario": scenario,
        "results": {"request_performance": {"aggregate": dict(aggregate)}},
    }


def _component(point: Point) -> dict[str, Any]:
    """The engine, as a generic component: the kind for engines demands an accelerator's name."""
    known = {
        "kind_of_component": "inference_engine",
        "variant": point.variant,
        "profile": point.profile,
        "settings": point.settings or None,
        "model": point.target_name,
        "model_digest": point.target,
        "drafter": point.drafter_name,
        "drafter_digest": point.drafter,
    }
    told = {name: value for name, value in known.items() if value is not None}
    return {
        "metadata": {"label": point.engine, "cfg_id": _digest([point.engine_version, told])},
        "standardized": {
            "kind": "generic",
            "tool": point.engine,
            "tool_version": point.engine_version or UNKNOWN,
            **told,
        },
        "native": {},
    }


def _load(point: Point, known: Known) -> dict[str, Any] | None:
    """The workload; None where its prompts' length, which the schema demands, is not known."""
    if known.prompt is None:
        return None
    standardized: dict[str, Any] = {
        "tool": "spec-harness" if point.source == "run" else point.source.removeprefix("import:"),
        "tool_version": known.tool_version or UNKNOWN,
        "source": "random" if point.workload == "random" else "unknown",
        "input_seq_len": {"distribution": "other", "value": known.prompt},
    }
    if closed := re.fullmatch(r"c(\d+)(-.*)?", point.load):
        standardized["concurrency"] = int(closed[1])
    elif opened := re.fullmatch(r"q([\d.e+-]+?)(-[a-z].*)?", point.load):
        standardized["rate_qps"] = float(opened[1])
    return {
        "metadata": {
            "cfg_id": _digest([point.workload, point.load]),
            "description": point.workload,
        },
        "standardized": standardized,
        "native": {"config": {"workload": point.workload, "load": point.load}},
    }


def _aggregate(own: Mapping[str, Point], known: Known) -> dict[str, Any]:
    latency = {
        name: statistics
        for metric, (name, unit) in LATENCIES.items()
        if (statistics := _statistics(own, metric, unit)) is not None
    }
    throughput = {
        name: {"units": unit, "mean": value}
        for metric, (name, unit) in RATES.items()
        if (value := _value(own, metric)) is not None
    }
    found = {"requests": _requests(own, known), "latency": latency, "throughput": throughput}
    return {name: told for name, told in found.items() if told}


def _statistics(own: Mapping[str, Point], metric: str, unit: str) -> dict[str, Any] | None:
    """Mean and percentiles; None without a mean, which the schema demands."""
    parts = {part: _value(own, f"{metric}.{part}") for part in PARTS}
    if parts["mean"] is None:
        return None
    return {"units": unit, **{part: v for part, v in parts.items() if v is not None}}


def _requests(own: Mapping[str, Point], known: Known) -> dict[str, Any]:
    """Counts; nothing without the total, which the schema demands."""
    share = own.get("requests_failed_share")
    if share is None or share.value is None or share.n is None:
        return {}
    told: dict[str, Any] = {"total": share.n, "failures": round(share.value * share.n)}
    for name, mean in (("input_length", known.prompt), ("output_length", known.output)):
        if mean is not None:
            told[name] = {"units": "count", "mean": mean}
    return told


def _completed(known: Known, own: Mapping[str, Point]) -> Known:
    """With mean lengths from the totals over the whole answers, where they are not told."""
    answered = _value(own, "requests_ok")

    def mean(told: float | None, metric: str) -> float | None:
        total = _value(own, metric)
        return total / answered if told is None and total is not None and answered else told

    return msgspec.structs.replace(
        known,
        prompt=mean(known.prompt, "prompt_tokens"),
        output=mean(known.output, "output_tokens"),
    )


def _value(own: Mapping[str, Point], metric: str) -> float | None:
    point = own.get(metric)
    return None if point is None else point.value


def to_llmd(made: Sequence[dict[str, Any]]) -> bytes:
    """Reports as JSON texts, one a line where there are several."""
    if len(made) == 1:
        return msgspec.json.format(msgspec.json.encode(made[0]), indent=2) + b"\n"
    return b"".join(msgspec.json.encode(one) + b"\n" for one in made)
