"""How a command line begins and ends: every error becomes one line and an exit code.

`python -m harness` and `python -m training` end alike; `program` is the word before each line.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer
import typer.core

from harness.errors import HarnessError, printable
from harness.options import check_text

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TAIL_SHOWN = 8
DEBUG = "With --debug anywhere on the line an error shows its traceback."


class Stopped(Exception):
    """A Ctrl-C or a signal to end, carried past the parser; holds the interruption itself."""


class Commands(typer.core.TyperGroup):
    """The parser would turn a Ctrl-C into a code of its own, without a word."""

    def make_context(self, *given: Any, **named: Any) -> Any:
        """Parse; an interruption leaves as `Stopped`."""
        try:
            return super().make_context(*given, **named)
        except KeyboardInterrupt as error:
            raise Stopped(error) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; an interruption leaves as `Stopped`."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Stopped(error) from None


class Command(typer.core.TyperCommand):
    """A subcommand whose help names its arguments as the documentation does, and --debug."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **{**named, "epilog": named.get("epilog") or DEBUG})

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The parser would put a required argument in braces, a repeated one before three dots."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^\{(.+)\}", r"\1", piece).replace("...", "…") for piece in pieces]


def complain(text: str, program: str = "harness") -> None:
    """One line on standard error."""
    print(f"{program}: {printable(text)}", file=sys.stderr, flush=True)


def tell_engine_failure(error: Any, program: str = "harness") -> None:
    """An engine's failure: its one line, then the last lines of its log."""
    complain(str(error), program)
    for line in getattr(error, "tail", ())[-TAIL_SHOWN:]:
        shown = "".join(c if c.isprintable() else " " for c in line.rstrip())
        print(f"  | {shown[:200]}", file=sys.stderr)
    sys.stderr.flush()


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: the same tidy end as a Ctrl-C, another exit code."""


def exit_code_of(error: BaseException, program: str = "harness") -> int:
    """Tell the error in one line and give its exit code."""
    if isinstance(error, Stopped):
        error = error.args[0]
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, Terminated):
        complain("terminated", program)
        return 128 + int(error.args[0])
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        complain("interrupted", program)
        return 130
    if isinstance(error, HarnessError):
        complain(str(error), program)
        return error.exit_code
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # the parser's own
        complain(f"{error.format_message()} (see --help)", program)
        return int(error.exit_code)
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return _code_of_others(error, program)


def _code_of_others(error: BaseException, program: str) -> int:
    """Errors of the packages that know nothing of the harness, and those nobody foresaw."""
    from drafters.spec import DrafterError
    from engines.base import EngineFailed, EngineUsageError

    if isinstance(error, EngineUsageError | DrafterError):
        complain(str(error), program)
        return 2
    if isinstance(error, EngineFailed):
        tell_engine_failure(error, program)
        return 3
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        complain(f"{error.filename}: {(error.strerror or 'cannot be used').lower()}", program)
        return 2
    if isinstance(error, OSError) and error.errno in FULL:
        # What was written to had a name once; standard output has none.
        complain(f"cannot be written: {(error.strerror or 'the disk is full').lower()}", program)
        return 2
    complain(f"internal error: {type(error).__name__}: {error} (--debug shows where)", program)
    return 70


def _on_signal(number: int, frame: object) -> NoReturn:
    raise Terminated(number)


def run_commands(
    app: typer.Typer, program: str, code_of: Callable[[BaseException, str], int] = exit_code_of
) -> NoReturn:
    """Run `python -m program` and leave with an exit code; no traceback but with --debug.

    `code_of` tells an error and gives its code.
    """
    arguments = sys.argv[1:]
    debug = "--debug" in arguments or os.environ.get("SPEC_HARNESS_DEBUG") == "1"
    arguments = [a for a in arguments if a != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a narrow terminal loses a dash, not a run
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    command: Callable[..., Any] = typer.main.get_command(app)
    try:
        check_text(arguments)
        code = command(args=arguments, prog_name=f"python -m {program}", standalone_mode=False)
    except BaseException as error:
        if debug and not isinstance(error, SystemExit):
            raise
        sys.exit(code_of(error, program))
    sys.exit(code if isinstance(code, int) else 0)
