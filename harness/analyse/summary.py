"""From a run's records to `summary.json`. The same records give the same summary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import PurePath
from typing import Literal

import msgspec

from harness.analyse.acceptance import cell_acceptance
from harness.analyse.cautions import cell_cautions, run_cautions
from harness.analyse.compare import compare
from harness.analyse.data import CellData, PairKey, RunData
from harness.analyse.estimates import estimates
from harness.analyse.fidelity import client_bound
from harness.analyse.output import Output, output_cautions, output_of, output_void
from harness.analyse.speed import forced_length, speeds
from harness.analyse.speed_cautions import speed_cautions
from harness.analyse.splits import split_acceptance
from harness.analyse.telemetry import telemetry_cautions, telemetry_of
from harness.findings import Acceptance, CellSummary, Metrics, Summary
from harness.measure.metrics import by_category, cell_metrics
from harness.measure.slo import meets, slo_of
from harness.measure.steady import LEVELS, Level
from harness.records import SCHEMA_VERSION, DraftCounts

MIN_OK_SHARE = 0.5


def summarise(run: RunData) -> Summary:
    """The run's answer: every cell's figures, the comparisons, the cautions."""
    metrics = cell_figures(run)
    output = output_of(run)
    comparisons = compare(run, metrics)
    cells = tuple(_cell_summary(run, c, metrics, output) for c in run.cells)
    void = void_reason(run)
    if void is None and not run.searching:  # a search asks what a server can bear
        void = output_void(run, output)
    speed = speeds(run, metrics)
    comparisons = [
        msgspec.structs.replace(c, verdict="undecided")
        if void is not None or forced_length(run.plan(c.engine)) is not None
        else c
        for c in comparisons
    ]
    return Summary(
        schema_version=SCHEMA_VERSION,
        run_id=run.manifest.run_id,
        title=_title(run),
        cells=cells,
        comparisons=tuple(comparisons),
        cautions=(
            *run_cautions(run, output.cells, comparisons, metrics),
            *output_cautions(run, output),
            *speed_cautions(run, speed),
        ),
        failures=failures(run),
        void=void,
        splits=split_acceptance(run),
        estimates=tuple(estimates(run, metrics, _drafts(cells))),
        speed=speed,
        integrity=output.engines,
        parity=output.parity,
    )


def _drafts(cells: Sequence[CellSummary]) -> dict[str, DraftCounts | None]:
    """The drafts of every speculative cell, as the source that it relies on counts them."""
    return {c.cell_id: c.acceptance.sources.get(c.acceptance.source) for c in cells if c.acceptance}


def cell_figures(run: RunData) -> dict[str, Metrics]:
    """Every cell's figures, by its id. Partners of a pair take the wider level of their windows.

    Else one variant's latencies would be of the steady window and the other's of the whole phase.
    """
    levels: dict[PairKey, Level] = {}
    for c in run.cells:
        window = c.window()
        found = [levels.get(c.pair_key, LEVELS[0]), window.level if window else LEVELS[0]]
        levels[c.pair_key] = max(found, key=LEVELS.index)
    metrics: dict[str, Metrics] = {}
    for c in run.cells:
        slo = slo_of(run.plan(c.cell.engine))
        metrics[c.cell.cell_id] = cell_metrics(
            c.records,
            c.window(levels[c.pair_key]),
            meets=partial(meets, slo=slo) if slo.said else None,
        )
    return metrics


def _cell_summary(
    run: RunData,
    data: CellData,
    metrics: dict[str, Metrics],
    output: Output,
) -> CellSummary:
    cell = data.cell
    acceptance: Acceptance | None = None
    if cell.variant == "speculative":
        acceptance = cell_acceptance(data)
    own = metrics[cell.cell_id]
    telemetry = telemetry_of(run, data, own)
    return CellSummary(
        cell_id=cell.cell_id,
        engine=cell.engine,
        variant=cell.variant,
        load=cell.load,
        workload=run.plan(cell.engine)["workload"]["dataset"],
        repeat=cell.repeat,
        block=cell.block,
        status=_status(data),
        metrics=own,
        acceptance=acceptance,
        integrity=output.cells.get(cell.cell_id),
        degenerate=output.degenerate.get(cell.cell_id),
        startup=data.timeline.startup,
        cautions=(*cell_cautions(data, own, acceptance), *telemetry_cautions(run, data, telemetry)),
        categories=by_category(data.records),
        telemetry=telemetry,
    )


def _status(data: CellData) -> Literal["ok", "partial", "failed"]:
    if not data.ok:
        return "failed"
    return "ok" if data.to_its_end and data.whole else "partial"


def void_reason(run: RunData) -> str | None:
    """Why nothing may be concluded from the run, or None. Failures of an engine are told apart."""
    cells = [c for c in run.cells if c.to_its_end]
    for data in cells:
        cell = data.cell.cell_id
        # In a search a load that is refused is an answer.
        if not run.searching and (len(data.ok) < MIN_OK_SHARE * data.asked or not data.ok):
            return f"too few requests succeeded: {len(data.ok)} of {data.asked} in {cell}"
        allowed = run.plan(data.cell.engine)["load"].get("allow_client_bound", False)
        bound = None if allowed else client_bound(data)
        if bound is not None:
            return (
                f"the load generator was the bottleneck: {bound} in {cell} "
                "(load.allow_client_bound=true takes the figures as they are)"
            )
        tokens = data.ok.ints("output_tokens")
        if data.ok and tokens.total() is not None and not tokens.values.any():
            return f"the server sent no token in {cell}"
    return None


def failures(run: RunData) -> tuple[str, ...]:
    """What went wrong with the engines, each once, in order."""
    told = [launch.failure for launch in run.launches]
    told += [c.timeline.interrupted for c in run.cells]
    return tuple(dict.fromkeys(t for t in told if t is not None))


def _title(run: RunData) -> str:
    models: Sequence[str] = [
        _model_words(run.manifest.plan.get("models", {}).get(engine, {}))
        for engine in run.engines()
    ]
    words = " / ".join(dict.fromkeys(models))
    return f"{words} on {', '.join(run.engines())}"


def _model_words(models: dict[str, str | None]) -> str:
    target, drafter = models.get("target"), models.get("drafter")
    said = _short(target) if target else "a served model"
    return f"{said} with {PurePath(drafter).name}" if drafter else said


def _short(path: str) -> str:
    """The model's name; a demo pair's target lies in a folder that names the pair."""
    pure = PurePath(path)
    return f"{pure.parent.name}/{pure.name}" if pure.name == "target" else pure.name
