"""The command `diagnose`: parses, calls, prints."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from harness import parameters
from harness.ending import FULL, Command, complain, tell_engine_failure
from harness.errors import UsageError, one_line
from harness.options import parse_urls

if TYPE_CHECKING:
    from harness.diagnose.mend import Mended
    from harness.diagnose.planted import Wanted
    from harness.diagnose.story import Outcome


SUBJECTS = (
    ("stored", "RUN: what it served, with --set for what is to be otherwise."),
    (
        "named",
        "--profile NAME, or --set target.path=DIR --set drafter.path=DIR. The engine is started "
        "here; with --url it runs already.",
    ),
)
"""The two ways to say what is diagnosed."""
OF_SELF_TEST = ("seeds", "first_seed", "limit_minutes", "write")
BOTH = ("engine", "only", "out")
"""Options of a diagnosis that the self-test has too."""
MAKE_ROOM = "make room, then give the same command again: what was found is kept"


class DiagnoseCommand(Command):
    """Its help lists the experiments too; they are loaded for it alone."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """After the options."""
        from harness.diagnose.catalogue import listed

        for title, rows in (("What is diagnosed", SUBJECTS), ("Experiments", listed())):
            with formatter.section(title):
                formatter.write_dl(rows)
        super().format_epilog(ctx, formatter)


def register(app: typer.Typer) -> None:
    """Put the command on the command line."""
    app.command(cls=DiagnoseCommand)(diagnose)


Names = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="EXPERIMENT", help="Make these alone; repeat it."),
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="EXPERIMENT", help="Leave this one out; repeat it."),
]


def diagnose(
    ctx: typer.Context,
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A stored run: what it served is diagnosed."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="reference, vllm, sglang or openai; a --url says it itself."
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A profile's name, or a TOML file.")
    ] = None,
    set_: parameters.Sets = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running server's root; it writes no trace."),
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=2, max=1000, metavar="N", help="How many prompts are asked.")
    ] = 12,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder is made in DIR/diagnose.")
    ] = Path("results"),
    fix: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write the corrected checkpoint or plan there, and prove it."
        ),
    ] = None,
    trained_target: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The target that the drafter was trained for."),
    ] = None,
    trained_on: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The drafter's training samples: tells overfitting."),
    ] = None,
    only: Names = None,
    skip: Skip = None,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough", help="Make every experiment, though the verdict be certain before."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the diagnosis as JSON, not as text.")
    ] = False,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Diagnose planted faults, and tell what was called what; --only is then a "
            "pattern of cases.",
        ),
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=1, max=20, metavar="N", help="Of the self-test: prompts per fault.")
    ] = 3,
    first_seed: Annotated[
        int,
        typer.Option(
            min=0, max=10_000, metavar="S", help="Of the self-test: the first of these seeds."
        ),
    ] = 0,
    limit_minutes: Annotated[
        float | None,
        typer.Option(metavar="M", help="Of the self-test: begin no case after so long."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Of the self-test: keep the matrix in docs/.")
    ] = False,
) -> None:
    """Say why a drafter is accepted less than it should be. Exit 1 if it is.

    With no options: the demo. Exit 0: nothing is wrong; 4: too little was seen to say.
    """
    check_together(ctx, self_test, limit_minutes)
    if self_test:
        from harness.diagnose.planted import Wanted
        from harness.run import check_out

        check_out(out)
        asked_for = Wanted(
            engine=engine or "reference",
            only=tuple(only or ()) or ("*",),
            seeds=seeds,
            first_seed=first_seed,
            out=out / "self-test" / (engine or "reference"),
            limit_minutes=limit_minutes,
            write=write,
        )
        test_itself(asked_for)
    if run is not None and profile is not None:
        raise UsageError("--profile: a stored run has its own plan; change it with --set")
    from harness.diagnose.mend import begun, check_apart, check_new, discard, try_to_mend
    from harness.diagnose.story import check_names, telling_what_is_kept, with_mending
    from harness.diagnose.story import run as do_diagnose
    from harness.diagnose.subjects import Asked, case_of, folder_for
    from harness.prepare import Request
    from harness.progress import make_progress
    from harness.run import check_out

    check_names(only or (), "--only")
    check_names(skip or (), "--skip")
    check_out(out)
    mending: Path | None = None
    if fix is not None:
        check_new(fix)
        check_out(fix, "--fix")
        mending = begun(fix)
    urls = parse_urls([url] if url else [])
    default = () if run is not None or urls else ("reference",)
    request = Request(
        engines=(engine,) if engine else default,
        profile=profile,
        urls={"speculative": next(iter(urls.values()))} if urls else {},
        sets=tuple(set_ or ()),
        variants=("speculative",),
        out=out,
        command=("python", "-m", "harness", *sys.argv[1:]),
    )
    asked = Asked(
        run=run,
        request=request,
        prompts=prompts,
        trained_target=trained_target,
        trained_on=trained_on,
        only=tuple(only or ()),
        skip=tuple(skip or ()),
        thorough=thorough,
    )
    with make_progress() as progress:
        case = case_of(asked)
        if fix is not None:
            check_apart(fix, case.subject)
        for line in case.said:
            progress.say(line)
        folder = folder_for(case, progress, mending)
        progress.say(f"writing to {folder}")
        with telling_how_to_go_on(), telling_what_is_kept(progress):
            ended = do_diagnose(
                case.subject, case.prompts, folder, progress=progress, options=case.options
            )
            mended: Mended | str | None = None
            if fix is not None and ended.found:
                mended = try_to_mend(
                    ended, case.prompts, fix, progress=progress, options=case.options
                )
                ended = with_mending(ended, lines_of(mended), progress)
            elif fix is not None and ended.exit_code == 0:
                discard(fix)
    finish(ended, as_json, mended)


def lines_of(mended: Mended | str) -> list[str]:
    """What was mended, for the diagnosis's own page, or why nothing was."""
    from harness.diagnose.mend import told

    if isinstance(mended, str):
        return [f"not mended: {mended.removeprefix('--fix: ')}"]
    return told(mended).splitlines()


def check_together(ctx: typer.Context, self_test: bool, limit_minutes: float | None) -> None:
    """Raise `UsageError` for an option that would go unheard."""
    if limit_minutes is not None and not (math.isfinite(limit_minutes) and limit_minutes > 0):
        raise UsageError(f"--limit-minutes {limit_minutes:g}: give a number of minutes above 0")
    given = [p for p in ctx.command.params if _on_the_line(ctx, p.name)]
    for parameter in given:
        shown = parameter.opts[0] if parameter.opts[0].startswith("-") else "RUN"
        if self_test and parameter.name not in ("self_test", *OF_SELF_TEST, *BOTH):
            raise UsageError(
                f"{shown}: not with --self-test, which plants its own faults; leave one of them out"
            )
        if not self_test and parameter.name in OF_SELF_TEST:
            raise UsageError(f"{shown}: is of the self-test; add --self-test")


def _on_the_line(ctx: typer.Context, name: str | None) -> bool:
    source = ctx.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


@contextmanager
def telling_how_to_go_on() -> Iterator[None]:
    """A full disk loses nothing; it is said what to do then."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is None:
            raise
        raise UsageError(
            f"{error.filename}: cannot be written: {error.strerror}; {MAKE_ROOM}"
        ) from None
    except Exception as error:  # safetensors tells it with a type of its own, and names no file
        said = one_line(str(error))
        of_full = any(f"(os error {number})" in said for number in FULL)
        if type(error).__name__ != "SafetensorError" or not of_full:
            raise
        raise UsageError(f"a checkpoint cannot be written: {said}; {MAKE_ROOM}") from None


def test_itself(wanted: Wanted) -> NoReturn:
    """Diagnose what is planted, print the matrix; exit 1 where a called cause is not right."""
    from harness.diagnose.matrix import to_markdown
    from harness.diagnose.selftest import run as do_test
    from harness.progress import make_progress

    with make_progress() as progress:
        matrix = do_test(wanted, progress)
    sys.stdout.write(to_markdown(matrix))
    sys.stdout.flush()
    print(wanted.out, file=sys.stderr, flush=True)
    raise typer.Exit(0 if matrix.right else 1)


def finish(ended: Outcome, as_json: bool, mended: Mended | str | None) -> None:
    """Print the diagnosis, then leave with its exit code: of a proven correction 0.

    `mended`: what was corrected, or why nothing was.
    """
    from harness.diagnose.folders import PAGE
    from harness.diagnose.page.markdown import to_markdown
    from harness.diagnose.story import KEPT
    from harness.measure.store import to_json

    if as_json:
        sys.stdout.write(to_json(ended.diagnosis).decode())
    else:
        sys.stdout.write(to_markdown(ended.dossier, ended.diagnosis).rstrip("\n") + "\n")
    sys.stdout.flush()
    if ended.failure is not None:
        tell_engine_failure(ended.failure)
        complain(KEPT)
    if ended.exit_code == 4:
        complain(f"void, nothing can be said: {ended.void}")
    page = ended.folder / PAGE
    if page.exists():
        print(f"page: {page}", file=sys.stderr, flush=True)
    proven = False
    if isinstance(mended, str):
        complain(mended)
    elif mended is not None:
        from harness.diagnose.mend import told

        proven = mended.proven
        print(told(mended), file=sys.stderr if as_json else sys.stdout, flush=True)
    print(ended.folder, file=sys.stderr if as_json else sys.stdout, flush=True)
    raise typer.Exit(0 if proven else ended.exit_code)
