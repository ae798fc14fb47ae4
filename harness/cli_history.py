"""`python -m harness history` and `prune`: what was measured before, and what may go."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from harness.ending import complain
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.history.prune import Plan, Wish
    from harness.history.query import Query
    from harness.history.store import History

Results = Annotated[Path, typer.Option("--results", metavar="DIR", help="Where the runs lie.")]
Texts = list[str] | None


def option(name: str, metavar: str, text: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(f"--{name}", metavar=metavar, help=text)
    return found


def register(app: typer.Typer) -> None:
    """Put both commands on the command line."""
    app.command()(history)
    app.command()(prune)


def history(
    metric: Annotated[Texts, option("metric", "NAME", "Follow it from run to run.")] = None,
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
        int | None,
        typer.Option(
            min=1, metavar="N", help="So many runs, the newest. Default: 20; with --metric all."
        ),
    ] = None,
    results: Results = Path("results"),
    problems: Annotated[
        bool, typer.Option("--problems", help="Name every folder that could not be read.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, not a table.")] = False,
) -> None:
    """List the runs of a results folder, or follow a metric over them with --metric."""
    if as_json and as_csv:
        raise UsageError("--json --csv: give one of them")
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
    found = opened(results)
    form = "json" if as_json else "csv" if as_csv else "table"
    if metric:
        tell_series(found, query, limit, form)
    else:
        tell_runs(found, query, limit or 20, form)
    tell_problems(found, every=problems)


def query_of(
    *, variant: Texts, commit: str | None, since: str | None, until: str | None, **names: Texts
) -> Query:
    """What the options above ask for. Raises `UsageError`."""
    from harness.history.query import Query, moment

    now = datetime.now(UTC)
    query = Query(
        variant=variants_of(variant or []),
        commit=commit,
        since=None if since is None else moment("--since", since, now),
        until=None if until is None else moment("--until", until, now),
    )
    texts = {name: tuple(given or ()) for name, given in names.items()}
    return msgspec.structs.replace(query, **texts)


def variants_of(given: list[str]) -> tuple[str, ...]:
    """`--variant` as names. Raises `UsageError`."""
    from harness.history.records import POINT_VARIANTS

    for word in given:
        if word not in POINT_VARIANTS:
            raise UsageError(f"--variant {word}: give {', '.join(POINT_VARIANTS)}")
    return tuple(given)


def opened(results: Path) -> History:
    """The history, with a line where many folders have to be read first."""
    from harness.history.store import open_history
    from harness.progress import make_progress

    with make_progress() as progress:

        def told(done: int, of: int) -> None:
            if of >= 200 and (done == 1 or done % 1000 == 0 or done == of):
                progress.say(f"reading runs that are new or changed: {done:,d} of {of:,d}")

        return open_history(results, told)


def tell_runs(found: History, query: Query, limit: int, form: str) -> None:
    """The newest runs that the filters hold for."""
    from harness.history import show
    from harness.measure.store import to_json
    from harness.report.width import output_width

    rows = show.run_rows(found.runs(query, most=limit))
    if form == "json":
        sys.stdout.write(to_json({"runs": rows, "problems": problems_of(found)}).decode())
    elif form == "csv":
        sys.stdout.write(show.csv_of(rows))
    elif rows:
        sys.stdout.write(show.text_of([show.runs_table(rows)], output_width()))
        shown, known = len({row.folder for row in rows}), found.count(query)
        if known > shown:
            print(f"{shown} of {known:,d} runs; --limit shows more")
    else:
        complain("no run fits; without filters `python -m harness history` lists all")
    sys.stdout.flush()


def tell_series(found: History, query: Query, limit: int | None, form: str) -> None:
    """The series that the filters hold for; of a single one its points too."""
    from harness.history import show
    from harness.measure.store import to_json
    from harness.report.width import output_width

    series = found.series(query, most=limit)
    rows = show.series_rows(series)
    if form == "json":
        told = {"series": show.series_json(series), "problems": problems_of(found)}
        sys.stdout.write(to_json(told).decode())
    elif form == "csv":
        sys.stdout.write(show.csv_of([point for row in rows for point in series[row.key]]))
    elif rows:
        values = [[point.value for point in series[row.key]] for row in rows]
        tables = [show.series_table(rows, values)]
        if len(rows) == 1:
            tables.append(show.points_table(series[rows[0].key]))
        sys.stdout.write(show.text_of(tables, output_width()))
    else:
        complain(f"no run tells {', '.join(query.metric)} under these filters")
    sys.stdout.flush()


def problems_of(found: History) -> list[dict[str, str]]:
    """What was skipped, for a program."""
    return [{"path": str(path), "reason": reason} for path, reason in found.problems]


def tell_problems(found: History, *, every: bool) -> None:
    """What was skipped, on standard error."""
    from harness.history.show import problem_lines

    for line in problem_lines(found.root, found.problems, every=every):
        complain(line)


def prune(
    older_than: Annotated[
        str | None, option("older-than", "AGO|DATE", "Runs made before it, such as 30d.")
    ] = None,
    max_size: Annotated[
        str | None, option("max-size", "SIZE", "The oldest, until all runs are below it: 20GB.")
    ] = None,
    keep: Annotated[
        int, typer.Option(min=0, metavar="N", help="The newest N runs stay, whatever else.")
    ] = 10,
    results: Results = Path("results"),
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; otherwise only said.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say it: the default.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Remove old runs, or the oldest until a size is kept. Baselines and pinned runs stay."""
    if yes and dry_run:
        raise UsageError("--yes --dry-run: give one of them")
    from harness.history.prune import Wish, plan_of
    from harness.history.query import moment
    from harness.history.sizes import parse_size
    from harness.measure.store import to_json

    wish = Wish(
        older_than=None
        if older_than is None
        else moment("--older-than", older_than, datetime.now(UTC)),
        max_bytes=None if max_size is None else parse_size("--max-size", max_size),
        keep=keep,
    )
    plan = plan_of(results, wish)
    if as_json:
        sys.stdout.write(to_json(plan.told()).decode())
    else:
        tell_plan(plan.told(), wish)
    sys.stdout.flush()
    if yes:
        remove(results, plan)
    elif plan.going:
        complain("nothing was removed; the same with --yes removes them")


def tell_plan(plan: Plan, wish: Wish) -> None:
    """What goes, and what stays for another reason than that nobody asked for it."""
    from harness.history.prune import NEWEST, NOT_ASKED
    from harness.history.show import prune_table, text_of
    from harness.history.sizes import size_words
    from harness.report.width import output_width

    if plan.going:
        sys.stdout.write(text_of([prune_table(plan.going)], output_width()))
    before, after = size_words(plan.bytes_before), size_words(plan.bytes_after)
    count = len(plan.going)
    kept = sum(one.why == NEWEST for one in plan.staying)
    if kept:
        print(f"stay: the newest {kept}")
    print(f"{count} {'goes' if count == 1 else 'go'}; the folder holds {before}, then {after}")
    for one in plan.staying:
        if one.why not in (NOT_ASKED, NEWEST):
            print(f"stays: {one.place} ({one.why})")
    if wish.max_bytes is not None and plan.bytes_after > wish.max_bytes:
        complain(f"--max-size is not reached: what stays holds {after}")


def remove(results: Path, plan: Plan) -> None:
    """Do it, saying what is gone."""
    from harness.history.folders import shown
    from harness.history.prune import carry_out

    left = carry_out(results, plan.going, lambda one: complain(f"removed {shown(one.place)}"))
    for one in left:
        complain(f"not removed: {shown(one.place)}: {one.why}")
    if left:
        raise typer.Exit(1)
