"""How the command line ends: every error becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Any

from harness.errors import HarnessError, printable

TAIL_SHOWN = 8


class Stopped(Exception):
    """A Ctrl-C or a signal to end, carried past the parser; holds the interruption itself."""


def complain(text: str) -> None:
    """One line on standard error."""
    print(f"harness: {printable(text)}", file=sys.stderr, flush=True)


def tell_engine_failure(error: Any) -> None:
    """An engine's failure: its one line, then the last lines of its log."""
    complain(str(error))
    for line in getattr(error, "tail", ())[-TAIL_SHOWN:]:
        shown = "".join(c if c.isprintable() else " " for c in line.rstrip())
        print(f"  | {shown[:200]}", file=sys.stderr)
    sys.stderr.flush()


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: the same tidy end as a Ctrl-C, another exit code."""


def exit_code_of(error: BaseException) -> int:
    """Tell the error in one line and give its exit code."""
    if isinstance(error, Stopped):
        error = error.args[0]
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, Terminated):
        complain("terminated")
        return 128 + int(error.args[0])
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        complain("interrupted")
        return 130
    if isinstance(error, HarnessError):
        complain(str(error))
        return error.exit_code
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # the parser's own
        complain(f"{error.format_message()} (see --help)")
        return int(error.exit_code)
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return _code_of_others(error)


def _code_of_others(error: BaseException) -> int:
    """Errors of the packages that know nothing of the harness, and those nobody foresaw."""
    from drafters.spec import DrafterError
    from engines.base import EngineFailed, EngineUsageError

    if isinstance(error, EngineUsageError | DrafterError):
        complain(str(error))
        return 2
    if isinstance(error, EngineFailed):
        tell_engine_failure(error)
        return 3
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        complain(f"{error.filename}: {(error.strerror or 'cannot be used').lower()}")
        return 2
    complain(f"internal error: {type(error).__name__}: {error} (--debug shows where)")
    return 70
