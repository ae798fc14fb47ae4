"""`speculation_profile.json`: a drafter's acceptance in the layout of NVIDIA's specdec_bench, 1.0.

Others' tools read it to simulate the drafter: `conditional_accept_rates[i]` is the acceptance of
draft token i given that those before it were accepted, `marginal_accept_rates[i]` that of all up to
i. Every key of that layout is written, None where it does not apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from harness.analyse.acceptance import estimates, pooled_acceptance
from harness.analyse.data import CellData, RunData
from harness.analyse.requests import Columns, columns, drafted_a_step
from harness.analyse.speed import forced_length
from harness.findings import Acceptance
from harness.measure.metrics import categories
from harness.measure.table import RequestTable
from harness.records import DraftCounts

VERSION = "1.0"
TOLERANCE = 0.02
DIGITS = 6


def profiles(run: RunData) -> dict[str, dict[str, Any]]:
    """By engine, each pooled over its speculative cells.

    None where positions are not known, or acceptance was forced.
    """
    found = {}
    for engine in run.engines():
        if forced_length(run.plan(engine)) is not None:
            continue  # what is forced is no drafter's
        cells = [c for c in run.select(engine, "speculative") if c.ok]
        profile = _profile(run, engine, cells) if cells else None
        if profile is not None:
            found[engine] = profile
    return found


def _profile(run: RunData, engine: str, cells: list[CellData]) -> dict[str, Any] | None:
    pooled = pooled_acceptance(cells)
    counts = None if pooled is None else _with_positions(pooled)
    if pooled is None or counts is None or not counts.drafts:
        return None
    plan = run.plan(engine)
    k = drafted_a_step(counts) or (0 if run.attached else plan["speculative"]["k"])
    k = k or len(counts.per_position or ())
    models = run.manifest.plan.get("models", {}).get(engine, {})
    histogram = _histogram(counts)
    mean = 1 + sum(j * n for j, n in enumerate(histogram)) / counts.drafts
    reached = (counts.drafts, *(counts.per_position or ()), *(0,) * k)
    marginal = [n / counts.drafts for n in reached[1 : k + 1]]
    own = estimates(RequestTable.join([c.ok for c in cells]))
    per_request = own.length_request_mean.value if own else None
    length = round(mean, DIGITS)
    return {
        "schema_version": VERSION,
        "measured": True,
        "method": None if run.attached else "eagle3",
        "draft_checkpoint": _checkpoint(models.get("drafter")),
        "target_model": _checkpoint(models.get("target")),
        "num_speculative_tokens": k,
        "block_size": None,
        "max_supported_k": k,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [
            round(n / b, DIGITS) if b else 0.0 for b, n in pairwise(reached[: k + 1])
        ],
        "marginal_accept_rates": [round(p, DIGITS) for p in marginal],
        "mean_accept_length": length,
        "mean_accept_length_per_request": round(mean if per_request is None else per_request, 6),
        "accept_length_model": "measured_per_k" if run.attached else "chain_analytic",
        "accept_length_by_k": {str(k): length},
        "acceptance_length_histogram": {str(j + 1): n for j, n in enumerate(histogram) if n},
        "per_category": _categories(cells),
        "measurement_conditions": _conditions(run, engine, cells, pooled),
        "validation": _validation(mean, marginal),
    }


def _with_positions(pooled: Acceptance) -> DraftCounts | None:
    """The believed source's counts if it tells positions, else the next one's that does."""
    order = (pooled.source, "per_request", "counters", "client")
    told = (pooled.sources.get(name) for name in order)
    return next((c for c in told if c is not None and c.per_position is not None), None)


def _histogram(counts: DraftCounts) -> list[int]:
    """Element j: verify steps that accepted exactly j draft tokens."""
    reached = (counts.drafts, *(counts.per_position or ()))
    return [n - after for n, after in zip(reached, (*reached[1:], 0), strict=True)]


def _checkpoint(path: str | None) -> dict[str, str] | None:
    """The last two parts of a path, as model hubs name models: no machine's layout goes out."""
    return {"id": "/".join(PurePath(path).parts[-2:]).lstrip("/")} if path else None


def _categories(cells: Sequence[CellData]) -> dict[str, dict[str, float]] | None:
    records = RequestTable.join([c.ok for c in cells])
    found = {}
    for name, rows in categories(records):
        own = columns(records.take(rows))
        if own is not None and own.drafts.sum():
            found[name] = _category(own)
    return found or None


def _category(own: Columns) -> dict[str, float]:
    has = own.drafts > 0
    each = 1 + own.accepted[has] / own.drafts[has]
    return {
        "mean_accept_length": round(float(1 + own.accepted.sum() / own.drafts.sum()), DIGITS),
        "mean_accept_length_per_request": round(float(each.mean()), DIGITS),
        "requests": int(has.sum()),
    }


def _conditions(
    run: RunData, engine: str, cells: Sequence[CellData], pooled: Acceptance
) -> dict[str, Any]:
    plan = run.plan(engine)
    loads = [c.cell.load for c in cells]
    return {
        "tool": "spec-harness",
        "run_id": run.manifest.run_id,
        "engine": engine,
        "dataset": PurePath(plan["workload"]["dataset"]).name,
        "temperature": plan["sampling"]["temperature"],
        "concurrency": sorted({n.concurrency for n in loads if n.concurrency is not None}),
        "request_rate": sorted({n.request_rate for n in loads if n.request_rate is not None}),
        "requests": sum(len(c.ok) for c in cells),
        "dtype": plan["engine"]["dtype"],
        "tensor_parallel": plan["engine"].get("tensor_parallel"),
        "source": pooled.source,
    }


def _validation(mean: float, marginal: Sequence[float]) -> dict[str, Any]:
    """Whether the published vectors give the published mean, and fall as they must."""
    implied = 1 + sum(marginal)
    rising = [
        {"position": i, "value": marginal[i], "previous": marginal[i - 1]}
        for i in range(1, len(marginal))
        if marginal[i] > marginal[i - 1] + 1e-9
    ]
    return {
        "mean_consistency": {
            "implied_mean_accept_length": round(implied, DIGITS),
            "reported_mean_accept_length": round(mean, DIGITS),
            "abs_delta": round(abs(implied - mean), DIGITS),
            "tolerance": TOLERANCE,
            "passed": abs(implied - mean) <= TOLERANCE,
        },
        "marginal_monotonicity": {"passed": not rising, "violations": rising},
    }
