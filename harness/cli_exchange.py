"""`python -m harness import` and `export`: other tools' results in, the history's points out."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.errors import UsageError

FORMATS = "csv|parquet|json|llm-d|openmetrics"
Results = Annotated[
    Path, typer.Option("--results", metavar="DIR", help="The folder that holds the runs.")
]
Words = list[str] | None


def filter_option(what: str) -> Any:
    """An option that names what is wanted; repeated, any of it."""
    return typer.Option(metavar="NAME", help=f"Only this {what}; repeat it.")


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command("import")(import_)
    app.command("export")(export)


def import_(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIR", help="Files, or folders of files.")
    ],
    results: Results = Path("results"),
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="The engine that served, where not told.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="baseline or speculative, likewise.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the workload is called.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its profile. Default: the model's name.")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="The engine's version.")
    ] = None,
    date: Annotated[
        str | None, typer.Option(metavar="DATE", help="When it was measured, such as 2026-11-30.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Take other tools' results into the history: told by content, units converted.

    vLLM bench serve, SGLang bench_serving, GuideLLM, AIPerf, pytest-benchmark, and what `export`
    wrote. A file that was imported before is left alone.
    """
    if variant not in (None, "baseline", "speculative"):
        raise UsageError(f"--variant {variant}: give baseline or speculative")
    from harness.exchange.importing import import_paths, tell
    from harness.exchange.records import Given
    from harness.history.query import moment

    given = Given(
        engine=engine,
        variant=variant,  # type: ignore[arg-type]
        workload=workload,
        profile=profile,
        engine_version=engine_version,
        created=None if date is None else moment("--date", date, datetime.now(UTC)),
    )
    outcome = import_paths(paths, results, given)
    tell(outcome, as_json=as_json)


def export(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Folders of runs. Default: the history."),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar=FORMATS, help="What is written.")
    ] = "csv",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE|DIR", help="Where to. Default: standard output.")
    ] = None,
    results: Results = Path("results"),
    engine: Annotated[Words, filter_option("engine")] = None,
    variant: Annotated[Words, filter_option("variant (baseline, speculative, ratio)")] = None,
    profile: Annotated[Words, filter_option("profile")] = None,
    drafter: Annotated[Words, filter_option("drafter, or its digest")] = None,
    target: Annotated[Words, filter_option("target, or its digest")] = None,
    metric: Annotated[Words, filter_option("metric, such as ttft_s or ttft_s.p50")] = None,
    workload: Annotated[Words, filter_option("workload")] = None,
    load: Annotated[Words, filter_option("load, such as c8")] = None,
    suite: Annotated[Words, filter_option("suite")] = None,
    source: Annotated[Words, filter_option("source, such as run")] = None,
    commit: Annotated[
        str | None, typer.Option(metavar="HASH", help="Only runs of this commit.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DATE", help="Not before: 2026-11-30, or 7d ago.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="DATE", help="Before.")] = None,
    last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the newest N runs.")
    ] = None,
    timestamps: Annotated[
        bool,
        typer.Option(
            "--timestamps", help="OpenMetrics: every point with its time, not the newest alone."
        ),
    ] = False,
) -> None:
    """Write runs, or a selection of the history, for other tools."""
    from harness.exchange.exporting import FORMATS as KNOWN
    from harness.exchange.exporting import choose, write
    from harness.history.query import Query, moment

    if form not in KNOWN:
        raise UsageError(f"--format {form}: give {', '.join(KNOWN)}")
    if timestamps and form != "openmetrics":
        raise UsageError("--timestamps goes with --format openmetrics")
    now = datetime.now(UTC)
    query = Query(
        engine=tuple(engine or ()),
        variant=tuple(variant or ()),
        profile=tuple(profile or ()),
        drafter=tuple(drafter or ()),
        target=tuple(target or ()),
        metric=tuple(metric or ()),
        workload=tuple(workload or ()),
        load=tuple(load or ()),
        suite=tuple(suite or ()),
        source=tuple(source or ()),
        commit=commit,
        since=None if since is None else moment("--since", since, now),
        until=None if until is None else moment("--until", until, now),
    )
    chosen = choose(runs or [], results, query, last)
    for problem in chosen.problems:
        print(f"left out: {problem}", file=sys.stderr)
    write(chosen, form, out, timestamps=timestamps)
