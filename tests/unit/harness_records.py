"""Makers of small records for tests of the measuring and the analysing."""

from __future__ import annotations

from typing import Any

from harness.analyse.data import CellData, RunData
from harness.measure.table import RequestTable
from harness.plan.schema import Plan, as_dict
from harness.records import (
    SCHEMA_VERSION,
    Cell,
    DraftCounts,
    EngineCounters,
    LaunchRecord,
    LoadPoint,
    Manifest,
    RequestRecord,
    Timeline,
    Variant,
)

MS = 1_000_000
C1 = LoadPoint(mode="closed", concurrency=1, num_requests=4)


def request(**fields: Any) -> RequestRecord:
    """Sent at 0, chunks of 1, 3 and 2 tokens at 100, 150 and 210 ms."""
    values: dict[str, Any] = {
        "cell_id": "c", "index": 0, "prompt_id": "p", "category": None, "due_ns": None,
        "sent_ns": 0, "chunk_ns": (100 * MS, 150 * MS, 210 * MS), "chunk_tokens": (1, 3, 2),
        "end_ns": 220 * MS, "status": "ok", "error": None, "http_status": 200, "prompt_tokens": 5,
        "output_tokens": 6, "token_source": "token_ids", "token_ids": (1, 2, 3, 4, 5, 6),
        "text": "six", "reasoning": None, "finish_reason": "stop", "acceptance": None,
        "correct": None,
    }  # fmt: skip
    return RequestRecord(**{**values, **fields})


def failed(**fields: Any) -> RequestRecord:
    """A request that got nothing."""
    return request(
        **{
            "status": "failed",
            "error": "reset",
            "chunk_ns": (),
            "chunk_tokens": None,
            "output_tokens": None,
            "token_ids": None,
            "text": None,
            **fields,
        }
    )


def counters(delta: DraftCounts | None = None, **fields: Any) -> EngineCounters:
    values: dict[str, Any] = {
        "before": None, "after": None, "delta": delta, "generation_tokens": None, "settled": True,
    }  # fmt: skip
    return EngineCounters(**{**values, **fields})


def timeline(**fields: Any) -> Timeline:
    values: dict[str, Any] = {
        "startup": (), "ready_s": 1.0, "window_start_ns": 0, "window_end_ns": 1,
        "client_cpu_share": 0.1,
    }  # fmt: skip
    return Timeline(**{**values, **fields})


def cell(
    variant: Variant,
    repeat: int,
    records: list[RequestRecord],
    *,
    load: LoadPoint = C1,
    block: int = 0,
    counted: EngineCounters | None = None,
    time: Timeline | None = None,
) -> CellData:
    return CellData(
        cell=Cell(
            cell_id=f"reference-{variant}-r{repeat}-b{block}",
            engine="reference",
            variant=variant,
            repeat=repeat,
            block=block,
            load=load,
            seed=repeat,
        ),
        records=RequestTable.of(records),
        counters=counted or counters(),
        timeline=time or timeline(),
    )


def run_of(
    cells: list[CellData], *, plan: Plan | None = None, launches: list[LaunchRecord] | None = None
) -> RunData:
    return RunData(
        manifest=Manifest(
            schema_version=SCHEMA_VERSION,
            run_id="r",
            created="2026-01-01T00:00:00+00:00",
            command=("run",),
            plan={
                "engines": {"reference": as_dict(plan or Plan())},
                "models": {"reference": {"target": "/m/target", "drafter": "/m/drafter-mla"}},
            },
            environment={},
            versions={},
            git_commit=None,
            git_dirty=None,
            clock_anchor={},
            cells=tuple(c.cell for c in cells),
        ),
        cells=cells,
        launches=launches or [],
    )


def scaled(factor: float, n: int = 10, **fields: Any) -> list[RequestRecord]:
    """`n` requests one after another, each `factor` times as long as `request()`."""
    whole = int(210 * MS * factor)
    return [
        request(
            index=i,
            prompt_id=f"p{i}",
            sent_ns=i * whole,
            chunk_ns=tuple(i * whole + int(t * MS * factor) for t in (100, 150, 210)),
            **fields,
        )
        for i in range(n)
    ]
