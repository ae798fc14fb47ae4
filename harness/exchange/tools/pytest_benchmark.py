"""pytest-benchmark's JSON (`--benchmark-json`, or one that it saved): seconds of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.exchange.fields import from_iso, inside, latency, listed, scaled, text, whole
from harness.exchange.reading import Document
from harness.exchange.records import Foreign
from harness.history.figures import Figure
from harness.history.records import NO_LOAD

NAME = "pytest-benchmark"
SHOWN = "pytest-benchmark"


def recognise(document: Document) -> bool:
    """Whether it is one."""
    return {"machine_info", "commit_info", "benchmarks"} <= document.keys()


def convert(found: Sequence[Document]) -> list[Foreign]:
    """Each benchmark; those of one file were measured in the same run."""
    return [
        _one(session, benchmark, run)
        for run, session in enumerate(found)
        for benchmark in listed(session, "benchmarks")
        if isinstance(benchmark, dict)
    ]


def _one(session: Document, benchmark: Mapping[str, Any], run: int) -> Foreign:
    commit = text(inside(session, "commit_info", "id"))
    return Foreign(
        engine=NAME,
        workload=text(benchmark.get("fullname")) or text(benchmark.get("name")) or "?",
        load=NO_LOAD,
        figures=tuple(_figures(benchmark.get("stats"))),
        created=from_iso(session.get("datetime")),
        variant="baseline",
        git_commit=None if commit in ("unversioned", "unknown") else commit,
        tool_version=text(session.get("version")),
        run=run,
    )


def _figures(stats: Any) -> list[Figure]:
    keys = {"mean": "mean", "p50": "median"}
    parts = {p: scaled(inside(stats, k), 1.0) for p, k in keys.items()}
    return latency("round_s", parts, whole(inside(stats, "rounds")))
