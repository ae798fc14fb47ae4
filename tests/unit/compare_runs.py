"""Runs without requests for the tests of comparisons: a summary and a manifest that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from report_run import C1, acceptance, cell, metrics, summary

from harness.analyse.across.records import Group, Stored
from harness.analyse.data import RunData
from harness.findings import CellSummary, Metrics
from harness.plan.schema import Plan, as_dict
from harness.records import SCHEMA_VERSION, Cell, LoadPoint, Manifest, Variant

Values = Mapping[Variant, Sequence[float]]
"""Output tokens per second of each start."""
SPEEDS: Values = {"baseline": (50.0, 51.0, 52.0), "speculative": (60.0, 62.0, 64.0)}


def figures(speed: float) -> Metrics:
    """One start's figures: latencies are as much lower as it is faster."""
    return metrics(speed, ttft=2.5 / speed, tpot=1.0 / speed)


def cells_of(
    speeds: Values, *, engine: str = "reference", load: LoadPoint = C1, **changes: Any
) -> list[CellSummary]:
    """A cell for each start, with different accepted counts in each."""
    found = []
    for variant, values in speeds.items():
        for repeat, speed in enumerate(values):
            told = {"acceptance": acceptance((780 - repeat, 480, 380))} if variant[0] == "s" else {}
            found.append(
                cell(
                    variant,
                    repeat,
                    engine=engine,
                    load=load,
                    figures=figures(speed),
                    **{**told, **changes},
                )
            )
    return found


def stored(
    label: str = "a",
    cells: Sequence[CellSummary] | None = None,
    *,
    plan: Plan | None = None,
    seed: int = 0,
    void: str | None = None,
    manifest: Mapping[str, Any] | None = None,
    argv: Mapping[str, tuple[str, ...]] | None = None,
) -> Stored:
    """A run of the cells; `manifest` replaces fields of it."""
    cells = cells_of(SPEEDS) if cells is None else cells
    engines = list(dict.fromkeys(c.engine for c in cells)) or ["reference"]
    plans = {engine: as_dict(plan or Plan()) for engine in engines}
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run_id": f"id-{label}",
        "created": "2026-01-01T00:00:00+00:00",
        "command": ("run",),
        "plan": {
            "engines": plans,
            "models": {e: {"target": "/m/target", "drafter": "/m/drafter"} for e in engines},
        },
        "environment": {"cpu": "Example CPU", "cores_usable": 2, "gpus": [], "python": "3.11.7"},
        "versions": {"torch": "2.13.0"},
        "git_commit": "0123456789abcdef",
        "git_dirty": False,
        "clock_anchor": {},
        "cells": tuple(
            Cell(
                cell_id=c.cell_id,
                engine=c.engine,
                variant=c.variant,
                repeat=c.repeat,
                block=c.block,
                load=c.load,
                seed=seed + c.repeat,
            )
            for c in cells
        ),
        "digests": {e: {"target": "t1", "drafter": "d1"} for e in engines},
    }
    run = RunData(
        manifest=Manifest(**{**fields, **(manifest or {})}), cells=[], launches=[]
    )  # fmt: skip
    told = summary(run_id=f"id-{label}", cells=tuple(cells), comparisons=(), void=void)
    return Stored(label=label, summary=told, run=run, plans=plans, argv=dict(argv or {}))


def group(*runs: Stored, label: str | None = None) -> Group:
    """One side of a comparison."""
    return Group(label=label or runs[0].label, runs=runs)
