"""`python -m harness import` and `export`: other tools' results in, the history's points out."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from harness.cli_history import Results, Texts, opened, option, query_of
from harness.errors import UsageError

FORMATS = "csv|parquet|json|llm-d|openmetrics"


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
    metric: Annotated[Texts, option("metric", "NAME", "Only this, such as ttft_s.p50.")] = None,
    engine: Annotated[Texts, option("engine", "NAME", "Only this engine.")] = None,
    variant: Annotated[Texts, option("variant", "NAME", "baseline, speculative, ratio.")] = None,
    profile: Annotated[Texts, option("profile", "NAME", "Only this profile.")] = None,
    drafter: Annotated[Texts, option("drafter", "NAME|DIGEST", "Only this drafter.")] = None,
    target: Annotated[Texts, option("target", "NAME|DIGEST", "Only this target model.")] = None,
    load: Annotated[Texts, option("load", "LOAD", "Only this load, such as c8.")] = None,
    workload: Annotated[Texts, option("workload", "NAME", "Only this workload.")] = None,
    suite: Annotated[Texts, option("suite", "NAME", "Only runs of this nightly suite.")] = None,
    source: Annotated[Texts, option("source", "NAME", "run, or import:TOOL.")] = None,
    commit: Annotated[str | None, option("commit", "SHA", "Only of this commit.")] = None,
    since: Annotated[str | None, option("since", "DATE|AGO", "2026-11-30, or 7d.")] = None,
    until: Annotated[str | None, option("until", "DATE|AGO", "Only what is older.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="So many runs, the newest.")
    ] = None,
    timestamps: Annotated[
        bool,
        typer.Option(
            "--timestamps", help="OpenMetrics: every point with its time, not the newest alone."
        ),
    ] = False,
) -> None:
    """Write runs, or a selection of the history, for other tools."""
    from harness.exchange import exporting
    from harness.history.query import Query

    if form not in exporting.FORMATS:
        raise UsageError(f"--format {form}: give {', '.join(exporting.FORMATS)}")
    if timestamps and form != "openmetrics":
        raise UsageError("--timestamps goes with --format openmetrics")
    query = query_of(
        metric=metric,
        engine=engine,
        variant=variant,
        profile=profile,
        drafter=drafter,
        target=target,
        load=load,
        workload=workload,
        suite=suite,
        source=source,
        commit=commit,
        since=since,
        until=until,
    )
    if runs and (query != Query() or limit is not None):
        raise UsageError("filters choose from the history; give them or folders of runs, not both")
    if runs:
        chosen = exporting.of_folders(runs)
    else:
        chosen = exporting.of_history(opened(results), query, limit)
    for problem in chosen.problems:
        print(f"left out: {problem}", file=sys.stderr)
    exporting.write(chosen, form, out, timestamps=timestamps)
