"""Hand-made runs for the tests of the report: records as the harness writes them, no engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from harness.findings import (
    Acceptance,
    CategoryFigures,
    Caution,
    CellSummary,
    Comparison,
    Distribution,
    Integrity,
    Metrics,
    Summary,
    VariantEstimate,
    Verdict,
)
from harness.measure.parquet import write_requests
from harness.records import (
    SCHEMA_VERSION,
    Cell,
    DraftCounts,
    EngineCounters,
    LoadPoint,
    Manifest,
    Phase,
    RequestRecord,
    Timeline,
    Variant,
)

C1 = LoadPoint(mode="closed", concurrency=1, num_requests=24)
C4 = LoadPoint(mode="closed", concurrency=4, num_requests=24)
NOTHING = Distribution(mean=None, p50=None, p90=None, p99=None, n=0)
STEP_S = {"baseline": 0.020, "speculative": 0.031}
POSITION_COUNTS = (780, 480, 380)


def spread(value: float | None, n: int = 24) -> Distribution:
    """A distribution round `value`; nothing where it is None."""
    if value is None:
        return NOTHING
    return Distribution(mean=value * 1.05, p50=value, p90=value * 1.4, p99=value * 2.1, n=n)


def metrics(
    speed: float | None = 50.0,
    *,
    ttft: float | None = 0.0503,
    tpot: float | None = 0.0201,
    failed: int = 0,
    accuracy: float | None = 0.875,
) -> Metrics:
    """One cell's figures, with nothing where the engine would say nothing."""
    return Metrics(
        ttft_s=spread(ttft),
        tpot_s=spread(tpot),
        icl_s=spread(tpot),
        itl_s=None,
        e2el_s=spread(None if ttft is None or tpot is None else ttft + 100 * tpot),
        send_lag_s=None,
        ttft_from_due_s=None,
        e2el_from_due_s=None,
        requests_ok=24 - failed,
        requests_failed=failed,
        prompt_tokens=2400,
        output_tokens=2400,
        output_tokens_per_s=speed,
        requests_per_s=0.5,
        request_rate_achieved=None,
        duration_s=48.0,
        task_accuracy=accuracy,
        task_n=0 if accuracy is None else 24,
    )


def acceptance(counts: tuple[int, ...] = POSITION_COUNTS, drafts: int = 1000) -> Acceptance:
    """Acceptance of one cell at k = len(counts), from counters."""
    accepted, k = sum(counts), len(counts)
    pooled = DraftCounts(drafts=drafts, drafted=drafts * k, accepted=accepted, per_position=counts)
    rates = tuple(c / drafts for c in counts)
    before = (1.0, *rates)
    return Acceptance(
        rate=accepted / (drafts * k),
        length=1 + accepted / drafts,
        drafts=drafts,
        drafted=drafts * k,
        accepted=accepted,
        per_position=rates,
        per_position_conditional=tuple(
            p / q if q else None for p, q in zip(rates, before, strict=False)
        ),
        source="counters",
        sources={"counters": pooled, "per_request": pooled, "client": None},
    )


STARTUP = (
    Phase(phase="import", start_s=0.0, end_s=4.2),
    Phase(phase="load target", start_s=4.2, end_s=9.9),
    Phase(phase="load drafter", start_s=9.9, end_s=11.0),
    Phase(phase="warm up", start_s=11.0, end_s=12.4),
)


def cell(
    variant: Variant,
    repeat: int = 0,
    *,
    engine: str = "reference",
    load: LoadPoint = C1,
    figures: Metrics | None = None,
    **changes: Any,
) -> CellSummary:
    """One cell of the summary; `changes` replace any of its fields."""
    speculative = variant == "speculative"
    fields: dict[str, Any] = {
        "cell_id": f"{engine}-{variant}-c{load.concurrency}-r{repeat}",
        "engine": engine,
        "variant": variant,
        "load": load,
        "workload": "demo",
        "repeat": repeat,
        "status": "ok",
        "metrics": figures or metrics(62.0 if speculative else 50.0 + repeat),
        "acceptance": acceptance() if speculative else None,
        "integrity": Integrity(compared=24, identical=24, near_tie=0, diverged=0)
        if speculative
        else None,
        "startup": STARTUP if speculative else (*STARTUP[:2], STARTUP[3]),
    }
    return CellSummary(**{**fields, **changes})


def category() -> CategoryFigures:
    """One category's figures of one cell."""
    return CategoryFigures(
        requests=12,
        ok=11,
        output_tokens=120,
        ttft_s=0.05,
        tpot_s=0.02,
        acceptance=DraftCounts(drafts=40, drafted=120, accepted=60),
        acceptance_length=2.5,
        task_accuracy=0.5,
        task_n=10,
    )


def comparison(
    metric: str = "output_tokens_per_s",
    ratio: float | None = 1.24,
    low: float | None = 1.15,
    high: float | None = 1.33,
    verdict: Verdict = "better",
    *,
    engine: str = "reference",
    load: LoadPoint = C1,
    baseline: float | None = 50.5,
) -> Comparison:
    """One paired comparison."""
    return Comparison(
        metric=metric,
        engine=engine,
        load=load,
        baseline=baseline,
        candidate=None if baseline is None or ratio is None else baseline * ratio,
        ratio=ratio,
        ci_low=low,
        ci_high=high,
        pairs=2,
        method="geometric mean of the ratio over 2 paired blocks, 95% t interval on the log scale",
        verdict=verdict,
    )


def estimates() -> tuple[VariantEstimate, ...]:
    """The speeds of `summary` and its acceptance length, with intervals."""
    figures: tuple[tuple[str, Variant, float, float], ...] = (
        ("output_tokens_per_s", "baseline", 50.5, 1.05),
        ("output_tokens_per_s", "speculative", 50.5 * 1.24, 1.04),
        ("acceptance_length", "speculative", 2.64, 1.05),
    )
    return tuple(
        VariantEstimate(
            metric=metric,
            engine="reference",
            variant=variant,
            load=C1,
            value=value,
            ci_low=value / off,
            ci_high=value * off,
            units=2,
            method="geometric mean over 2 starts, 95.0% t interval on the log scale",
        )
        for metric, variant, value, off in figures
    )


def summary(**changes: Any) -> Summary:
    """Two paired blocks of one engine at concurrency 1, better by 1.24; `changes` on top."""
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run_id": "20260102-030405-demo",
        "title": "demo pair on reference",
        "cells": tuple(cell(v, r) for r in (0, 1) for v in ("baseline", "speculative")),
        "comparisons": (
            comparison(),
            comparison("ttft_s", 1.02, 0.96, 1.08, "undecided", baseline=0.0503),
            comparison("tpot_s", 0.80, 0.74, 0.86, "better", baseline=0.0201),
            comparison("e2el_s", 0.82, 0.76, 0.88, "better", baseline=2.06),
        ),
        "cautions": (
            Caution(
                code="few-blocks",
                text="2 paired blocks: the interval is wide",
                advice="Give more repeats, e.g. --set repeats=5.",
            ),
        ),
    }
    return Summary(**{**fields, **changes})


def requests(told: CellSummary, n: int = 24, tokens: int = 40) -> list[RequestRecord]:
    """Request records whose chunks carry one token (baseline) or one to four (speculative)."""
    rng = random.Random(told.cell_id)
    return [_request(told, index, tokens, rng) for index in range(n)]


def _request(told: CellSummary, index: int, tokens: int, rng: random.Random) -> RequestRecord:
    sent = 1_000_000_000 + index * 2_000_000_000
    at = sent + int(rng.gauss(50e6, 6e6))
    times, sizes, left = [at], [1], tokens - 1
    while left > 0:
        at += int(rng.lognormvariate(0, 0.15) * STEP_S[told.variant] * 1e9)
        size = 1 if told.variant == "baseline" else min(left, rng.choice((1, 1, 2, 3, 4)))
        times.append(at)
        sizes.append(size)
        left -= size
    failed = told.status == "partial" and index % 5 == 0
    return RequestRecord(
        cell_id=told.cell_id,
        index=index,
        prompt_id=f"p{index}",
        category="arithmetic",
        due_ns=None,
        sent_ns=sent,
        chunk_ns=tuple(times[:3] if failed else times),
        chunk_tokens=tuple(sizes[:3] if failed else sizes),
        end_ns=at,
        status="failed" if failed else "ok",
        error="connection closed" if failed else None,
        http_status=200,
        prompt_tokens=30,
        output_tokens=None if failed else tokens,
        token_source="token_ids",
        token_ids=None,
        text="7",
        reasoning=None,
        finish_reason="stop",
        acceptance=DraftCounts(drafts=10, drafted=30, accepted=12)
        if told.variant == "speculative"
        else None,
        correct=True,
    )


def manifest(told: Summary, **changes: Any) -> Manifest:
    """The manifest that goes with a summary."""
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run_id": told.run_id,
        "created": "2026-01-02T03:04:05Z",
        "command": ("python", "-m", "harness", "run", "--set", "load.concurrency=1"),
        "plan": {
            "target": {"path": "demo/target"},
            "speculative": {"k": 3},
            "load": {"concurrency": [1], "num_requests": 24},
            "sampling": {"temperature": 0.0},
        },
        "environment": {"cpu": {"model": "Example CPU", "cores": 2}, "gpu": None, "os": "Linux"},
        "versions": {"harness": "0.1.0", "torch": "2.13.0", "vllm": None},
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "git_dirty": False,
        "clock_anchor": {"perf_counter_ns": 1, "time_ns": 2},
        "cells": tuple(
            Cell(
                cell_id=c.cell_id,
                engine=c.engine,
                variant=c.variant,
                repeat=c.repeat,
                load=c.load,
                seed=c.repeat,
            )
            for c in told.cells
        ),
    }
    return Manifest(**{**fields, **changes})


def write_run(folder: Path, told: Summary, *, n: int = 24) -> Path:
    """A run's folder on disk, every file of the contract but the reports."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_bytes(msgspec.json.encode(told))
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest(told)))
    for one in told.cells:
        place = folder / "cells" / one.cell_id
        place.mkdir(parents=True)
        write_requests(place / "requests.parquet", requests(one, n))
        timeline = Timeline(
            startup=one.startup, ready_s=12.4, window_start_ns=1, window_end_ns=10**10
        )
        counters = EngineCounters(
            before=None, after=None, delta=None, generation_tokens=2400, settled=True
        )
        (place / "timeline.json").write_bytes(msgspec.json.encode(timeline))
        (place / "counters.json").write_bytes(msgspec.json.encode(counters))
    return folder
