"""The command line: parses, calls, and maps every error to its exit code and one line.

Nothing heavy is imported before a subcommand needs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from harness import parameters
from harness.cli_compare import register as register_compare
from harness.cli_diagnose import register as register_diagnose
from harness.cli_engines import engines_app
from harness.cli_exchange import register as register_exchange
from harness.cli_history import register as register_history
from harness.cli_nightly import nightly_app
from harness.ending import (
    DEBUG,
    Command,
    Commands,
    complain,
    run_commands,
    tell_engine_failure,
)
from harness.errors import UsageError
from harness.options import (
    parse_counts,
    parse_precision,
    parse_urls,
    parse_variants,
)

if TYPE_CHECKING:
    from harness.prepare import Request
    from harness.run import Outcome


app = typer.Typer(
    name="harness",
    cls=Commands,
    help="Is this drafter worth shipping? Speculative decoding, measured from the serving side.",
    epilog=DEBUG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(engines_app, name="engines")
app.add_typer(nightly_app, name="nightly")

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="reference, vllm, sglang or openai; repeat it: side by side.",
    ),
]
Profile = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="A profile's name, or a TOML file.")
]
Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url", metavar="URL", help="A running server's root; or baseline=URL and speculative=URL."
    ),
]
Variants = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="baseline,speculative (the default) or one of them."),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Where the run's folder is made.")]
Slos = Annotated[
    list[str] | None,
    typer.Option("--slo", metavar="LEVELS", help="Service levels, such as ttft=0.2,tpot=50ms."),
]
Precision = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="Add starts until the ratio is known so well, say 3%."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, not as a table.")]


@app.command()
def run(
    engine: Engines = None,
    profile: Profile = None,
    url: Urls = None,
    set_: parameters.Sets = None,
    slo: Slos = None,
    precision: Precision = None,
    variants: Variants = None,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Measure an engine with and without a drafter. With no options: the demo, on this CPU."""
    from harness.progress import make_progress
    from harness.run import run as do_run

    sets = [*(set_ or ()), *levels(slo), *parse_precision(precision)]
    request = request_of(engine, profile, url, variants, out, sets)
    with make_progress() as progress:
        outcome = do_run(request, progress)
    finish(outcome, as_json)


@app.command()
def capacity(
    slo: parameters.Levels = None,
    engine: Engines = None,
    profile: Profile = None,
    url: Urls = None,
    set_: parameters.Sets = None,
    by: parameters.By = "rate",
    attain: parameters.Attain = 0.9,
    confidence: parameters.Confidence = 0.95,
    resolution: parameters.Resolution = 0.1,
    start: parameters.Start = None,
    most: parameters.Most = None,
    requests: parameters.Requests = None,
    seconds: parameters.Seconds = 10,
    variants: Variants = None,
    out: Out = Path("results"),
    as_json: parameters.AnswerJson = False,
) -> None:
    """Find the highest load that meets the service levels. With and without a drafter."""
    if by not in ("rate", "concurrency"):
        raise UsageError(f"--by {by}: give rate or concurrency")
    from harness.capacity import Wanted
    from harness.capacity import capacity as do_capacity
    from harness.progress import make_progress

    wanted = Wanted(
        by="rate" if by == "rate" else "concurrency",
        attain=attain,
        confidence=confidence,
        resolution=resolution,
        start=start,
        most=most,
        requests=requests,
        seconds=seconds,
    )
    request = request_of(engine, profile, url, variants, out, [*(set_ or ()), *levels(slo)])
    with make_progress() as progress:
        outcome = do_capacity(request, wanted, progress)
    finish(outcome, as_json)


@app.command()
def sweep(
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V…", help="A key of the plan and its values; repeat it."),
    ] = None,
    engine: Engines = None,
    profile: Profile = None,
    url: Urls = None,
    set_: parameters.Sets = None,
    slo: Slos = None,
    variants: Variants = None,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Measure every combination of values; name the best. Such as --over speculative.k=1,3."""
    from harness.progress import make_progress
    from harness.sweep import sweep as do_sweep

    request = request_of(engine, profile, url, variants, out, [*(set_ or ()), *levels(slo)])
    with make_progress() as progress:
        outcome = do_sweep(request, over or [], progress)
    finish(outcome, as_json)


def levels(slo: list[str] | None) -> list[str]:
    """`--slo` options as `--set` items. Raises `UsageError`."""
    from harness.plan.levels import slo_sets

    return slo_sets(slo or [])


def request_of(
    engine: list[str] | None,
    profile: str | None,
    url: list[str] | None,
    variants: str | None,
    out: Path,
    sets: list[str],
) -> Request:
    """What the options of `run` and of `capacity` ask for. Raises `UsageError`."""
    from harness.prepare import Request

    urls = parse_urls(url or [])
    names = tuple(engine or (["openai"] if urls else ["reference"]))
    if urls and len(names) > 1:
        raise UsageError("--url: give one --engine with it, not several")
    return Request(
        engines=names,
        profile=profile,
        urls=urls,
        sets=tuple(sets),
        variants=parse_variants(variants),
        out=out,
        command=("python", "-m", "harness", *sys.argv[1:]),
    )


@app.command()
def resume(
    run_folder: RunFolder,
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Also on a changed machine, or with changed code or models."),
    ] = False,
    as_json: parameters.AnyJson = False,
) -> None:
    """Measure the cells that a run lacks, and sum it up anew."""
    from harness.progress import make_progress

    with make_progress() as progress:
        outcome = story_of(run_folder.resolve()).resume(run_folder, progress, anyway=anyway)
    finish(outcome, as_json)


@app.command()
def analyse(run_folder: RunFolder, as_json: parameters.AnyJson = False) -> None:
    """Compute a run's summary anew from its stored records."""
    folder = run_folder.resolve()
    show(story_of(folder).analyse(folder), as_json)


def story_of(folder: Path) -> Any:
    """The story that a folder was made by: a sweep, a capacity search or a run.

    Raises `UsageError` where it is the folder of none.
    """
    from harness import capacity, sweep
    from harness import run as plain

    if sweep.is_sweep(folder):
        return sweep
    return capacity if capacity.is_capacity(folder) else plain


@app.command()
def report(run_folders: parameters.RunFolders, out: parameters.PageOut = None) -> None:
    """Write a run's report.html, report.md and plots anew; several runs: one page, into --out."""
    from harness.report.side import write_page

    print(write_page([folder.resolve() for folder in run_folders], out))


@app.command()
def calibrate(
    streams: parameters.Streams = "50,200,400",
    requests_per_stream: parameters.RequestsPerStream = 6,
    rounds: parameters.Rounds = 2,
    chunks: parameters.Chunks = 100,
    first_ms: parameters.FirstMs = 50.0,
    gap_ms: parameters.GapMs = 10.0,
    tokens: parameters.Tokens = "1",
    workers: parameters.Workers = None,
    out: parameters.CalibrationOut = None,
    as_json: parameters.CalibrationJson = False,
) -> None:
    """Measure this client's own error and cost. Against a server whose writes are timed."""
    loads, carried = parse_counts("--streams", streams), parse_counts("--tokens", tokens)
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: no such folder; make it first")
    from harness.calibrate import Calibration, print_report
    from harness.calibrate import calibrate as do_calibrate
    from harness.load.scripted.script import Script
    from harness.measure.store import to_json

    script = Script(first_ms=first_ms, gap_ms=gap_ms, chunks=chunks, tokens=carried)
    asked = Calibration(
        streams=loads,
        requests_per_stream=requests_per_stream,
        rounds=rounds,
        workers=workers,
        script=script,
    )
    result = do_calibrate(asked, lambda line: print(line, file=sys.stderr, flush=True))
    if out is not None:
        out.write_bytes(to_json(result))
    if as_json:
        sys.stdout.write(to_json(result).decode())
    else:
        print_report(result)
    sys.stdout.flush()
    for line in result.failures:
        complain(f"the client is off: {line}")
    raise typer.Exit(4 if result.failures else 0)


@app.command()
def doctor(
    profile: Profile = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="reference, vllm or sglang.")
    ] = "reference",
    set_: parameters.Sets = None,
    kernels: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Only this: a wheel, a folder or a shared object."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(metavar="CC", help="With --kernels: a compute capability, such as 12.0."),
    ] = None,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Verify every known checksum; reads every byte.")
    ] = False,
    out: Out = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what would fail on this machine, before anything is started. Exit 1 if something would.

    With no options: the machine, and the demo.
    """
    from harness.measure.store import to_json

    if kernels is None and arch is not None:
        raise UsageError("--arch goes with --kernels PATH")
    if kernels is not None:
        from harness.doctoring.kernels import kernels as look
        from harness.doctoring.kernels import text_of

        if arch is None:
            raise UsageError("--kernels: give --arch as well, such as --arch 12.0")
        coverage = look(kernels, arch, complain)
        text, fails = to_json(coverage).decode() if as_json else text_of(coverage), coverage.fails
    else:
        from harness.doctor import doctor as do_doctor

        sets = list(set_ or ())
        report = do_doctor(
            request_of([engine], profile, None, None, out, sets), complain, checksums=checksums
        )
        text, fails = to_json(report).decode() if as_json else report.text(), report.fails
    sys.stdout.write(text)
    sys.stdout.flush()
    raise typer.Exit(1 if fails else 0)


register_compare(app)
register_diagnose(app)
register_history(app)
register_exchange(app)
for _group in (app, engines_app, nightly_app):
    for _command in _group.registered_commands:
        if not issubclass(_command.cls or object, Command):
            _command.cls = Command


def finish(outcome: Outcome[Any], as_json: bool) -> None:
    """Print a run's result, then leave with its exit code."""
    show(told_by(outcome), as_json)
    stream = sys.stderr if as_json else sys.stdout
    for error in outcome.errors:
        tell_engine_failure(error)
    if outcome.interrupted:
        complain(f"interrupted; go on with `python -m harness resume {outcome.folder}`")
    elif not outcome.errors and outcome.summary.void is not None:
        complain(f"void, no verdict is drawn: {outcome.summary.void}")
    page = outcome.folder / "report.html"
    if page.exists():
        print(f"report: {page}", file=sys.stderr, flush=True)
    print(outcome.folder, file=stream, flush=True)
    raise typer.Exit(outcome.exit_code)


def told_by(outcome: Outcome[Any]) -> Any:
    """A run's summary; of a capacity search its answer."""
    if (outcome.folder / "capacity.json").exists():
        from harness.capacity import read_capacity

        return read_capacity(outcome.folder)
    return outcome.summary


def show(summary: Any, as_json: bool) -> None:
    """The summary, or the answer of a sweep or a capacity search, on standard output."""
    from harness.report.width import output_width

    if as_json:
        from harness.measure.store import to_json

        sys.stdout.write(to_json(summary).decode())
    elif hasattr(summary, "axes"):
        from harness.report.sweep import render_text as sweep_text

        sys.stdout.write(sweep_text(summary, output_width()))
    elif hasattr(summary, "slo"):
        from harness.report.frontier import render_text

        sys.stdout.write(render_text(summary, output_width()))
    else:
        from harness.report.tables import print_summary

        print_summary(summary)
    sys.stdout.flush()


def main() -> NoReturn:
    """Run the command line and leave with an exit code; no traceback but with --debug."""
    run_commands(app, "harness")
