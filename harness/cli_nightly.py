"""`python -m harness nightly`: a night, what is accepted, and the search for a cause."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.errors import UsageError

nightly_app = typer.Typer(
    help="Measure a suite, compare with its history, cry only what fresh blocks confirm.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

SuiteFile = Annotated[
    Path | None, typer.Option("--suite", metavar="FILE", help="The suite, a TOML file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")]


def _wanted(suite: Path | None) -> Path:
    if suite is None:
        raise UsageError("nightly: give --suite FILE (see docs/nightly.md)")
    return suite


@nightly_app.callback()
def nightly(
    ctx: typer.Context,
    suite: SuiteFile = None,
    anew: Annotated[
        bool, typer.Option("--new", help="Begin a night although one was interrupted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a night of the suite, or the rest of one that was interrupted.

    Exit 1: a regression is confirmed, or a gate is not kept.
    """
    if ctx.invoked_subcommand is not None:
        if suite is not None:
            ctx.obj = suite
        return
    from harness.nightly.story import nightly as do_nightly
    from harness.nightly.suite import read_suite
    from harness.progress import make_progress

    loaded = read_suite(_wanted(suite))
    with make_progress() as progress:
        told = do_nightly(loaded, progress, anew=anew)
    if told.view is not None:
        text = (told.folder / "findings.json").read_text("utf-8") if as_json else told.view.text
        print(text.rstrip("\n"))
        print(f"page: {told.folder / 'index.html'}", file=sys.stderr)
    print(told.folder, file=sys.stderr if as_json else sys.stdout, flush=True)
    raise typer.Exit(told.exit_code)


@nightly_app.command("accept")
def nightly_accept(
    ctx: typer.Context,
    series: Annotated[
        str,
        typer.Argument(metavar="SERIES", help="A series, several with *, or an entry's name."),
    ],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; it is recorded.")],
    suite: SuiteFile = None,
    known_bad: Annotated[
        bool, typer.Option("--known-bad", help="It stays bad; tell it, and fail nothing for it.")
    ] = False,
    since: Annotated[
        str | None, typer.Option(metavar="NIGHT", help="The night it began, such as 2026-11-30.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="With --known-bad: the day it ends.")
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin", help="Pin the last night's run as the baseline, too.")
    ] = False,
) -> None:
    """Accept a change of a series from a night on, with the reason; the series begins anew."""
    from harness.nightly.accept import Wish, accept
    from harness.nightly.suite import read_suite

    wish = Wish(
        series=series, reason=reason, known_bad=known_bad, since=since, until=until, pin=pin
    )
    for line in accept(read_suite(_wanted(suite or ctx.obj)), wish):
        print(line)


@nightly_app.command("bisect")
def nightly_bisect(
    ctx: typer.Context,
    series: Annotated[
        str, typer.Argument(metavar="SERIES", help="The series that lost, as the page names it.")
    ],
    suite: SuiteFile = None,
    versions: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Versions of the engine: the good one first, bad last."),
    ] = None,
    commits: Annotated[
        str | None,
        typer.Option(metavar="GOOD..BAD", help="Commits, or several with commas between them."),
    ] = None,
    repo: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Whose commits; this harness's otherwise."),
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The engine environment to install them into."),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME==VERSION", help="A requirement in place of the recipe's own."),
    ] = None,
    anew: Annotated[bool, typer.Option("--new", help="Forget what was measured before.")] = False,
) -> None:
    """Find the engine version, or the commit, that a series was lost with. It can be resumed."""
    from harness.nightly import candidates
    from harness.nightly.bisect import bisect
    from harness.nightly.suite import read_suite
    from harness.progress import make_progress

    loaded = read_suite(_wanted(suite or ctx.obj))
    entry = loaded.entry(series.partition("/")[0])
    if (versions is None) == (commits is None):
        raise UsageError("bisect: give --versions or --commits, one of the two")
    if versions is not None:
        place = environment or candidates.environment_for(loaded, entry)
        choice = candidates.versions(versions, place, pin or ())
    else:
        assert commits is not None
        ours = repo is None or (repo / "harness" / "__main__.py").is_file()
        if environment is None and not ours:
            environment = candidates.environment_for(loaded, entry)
        choice = candidates.commits(commits, repo or candidates.ROOT, environment)
    with make_progress() as progress:
        ended = bisect(loaded, series, choice, progress, anew=anew)
    print(ended.text)
    print(ended.folder, flush=True)
    raise typer.Exit(ended.exit_code)
