"""Cautions about what was ended by a limit: an answer by its tokens, a trace by its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.analyse.data import CellData, RunData
from harness.findings import Caution
from harness.measure.columns import Ints
from harness.measure.table import RequestTable

CUT_SHARE = 0.2


def answers_cut(run: RunData, engine: str) -> Caution | None:
    """Many answers ended at a limit; says which limit it was."""
    ok = RequestTable.join([c.ok for c in run.select(engine)])
    at_limit = ok.names("finish_reason").where("length")
    cut = ok.ints("output_tokens").take(at_limit.nonzero()[0])
    if not ok or len(cut.known) <= CUT_SHARE * len(ok):
        return None
    workload = run.plan(engine)["workload"]
    if workload["ignore_eos"]:
        advice = (
            "workload.ignore_eos makes each as long as its limit: good for a load, but no drafter "
            "can be judged by what comes after an answer's end."
        )
    else:
        advice = "Loops end so too, and loops inflate acceptance: look at the outputs."
    return Caution(
        code="answers_cut",
        text=f"{engine}: {len(cut.known)} of {len(ok)} answers ended at {_limit(cut, workload)}",
        advice=advice,
    )


def _limit(cut: Ints, workload: Mapping[str, Any]) -> str:
    """Which limit it was, as far as the answers' lengths in tokens tell."""
    wanted = workload["output_tokens"]
    if not isinstance(wanted, int):
        return "the limit drawn for each from workload.output_tokens, or given by its own row"
    theirs = f"the limit of workload.output_tokens ({wanted})"
    other = int((cut.known & (cut.values != wanted)).sum())
    own = "limits of their own (a row's max_tokens, a trace's output length, the context's end)"
    if not other:
        return theirs
    return own if other == len(cut.known) else f"{theirs} or, {other} of them, at {own}"


def trace_cut(data: CellData) -> Caution | None:
    """A number of requests that may have ended a trace before its own end."""
    load = data.cell.load
    if load.arrival != "trace" or load.num_requests is None:
        return None
    if len(data.records) < load.num_requests:
        return None
    return Caution(
        code="trace_cut",
        text=f"the trace was ended after {load.num_requests} requests by load.num_requests",
        advice="If it holds more, give --set load.num_requests=none to replay all of it.",
    )
