"""The command `compare`: parses, calls, prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.errors import UsageError
from harness.options import parse_tolerances


def register(app: typer.Typer) -> None:
    """Put the command on the command line."""
    app.command()(compare)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Folders of runs, or selections such as engine=vllm,last=5; the reference first.",
        ),
    ],
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[METRIC=]SHARE",
            help="What is not yet worse, such as 3% or ttft_s=5%; else the plan's minimum effect.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Compare this one alone; repeat it."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="The reference is these runs of the history; repeat it."
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of those the newest N.")
    ] = None,
    results: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the runs of the history lie.")
    ] = Path("results"),
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also with another target, workload or load.")
    ] = False,
    categories: Annotated[
        bool, typer.Option("--categories", help="Show every category, not the changed ones alone.")
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as Markdown as well.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the comparison as JSON, not as tables.")
    ] = False,
) -> None:
    """Hold runs against the first of them. Exit 1 if something is worse, 4 if a run is void."""
    tolerances = parse_tolerances(tolerance or [])
    if markdown is not None and markdown.is_dir():
        raise UsageError(f"--markdown {markdown}: is a folder; give the name of a file")
    if markdown is not None and not markdown.absolute().parent.is_dir():
        raise UsageError(f"--markdown {markdown}: no such folder; make it first")
    for item in where or ():
        if "=" not in item:
            raise UsageError(f"--where {item}: give KEY=VALUE, such as engine=vllm")
    from harness.analyse.across.rows import Wanted
    from harness.compare import compare as do_compare
    from harness.compare import exit_code
    from harness.measure.store import to_json, write_atomic
    from harness.report.across import print_across, render_markdown

    wanted = Wanted(tolerances=tolerances, metrics=tuple(metric or ()), anyway=anyway)
    chosen = ",".join([*(where or ()), *([f"last={last}"] if last is not None else [])])
    across = do_compare([*([chosen] if chosen else []), *runs], wanted, results)
    if markdown is not None:
        write_atomic(markdown, render_markdown(across).encode())
    if as_json:
        sys.stdout.write(to_json(across).decode())
    else:
        print_across(across, categories=categories)
    sys.stdout.flush()
    raise typer.Exit(exit_code(across))
