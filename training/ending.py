"""How a stage ends: every error one line on stderr, and its exit code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from drafters.spec import DrafterError
from engines.base import EngineFailed, EngineUsageError
from harness.errors import HarnessError, one_line

STOPPED = 130


@contextmanager
def ending() -> Iterator[None]:
    """Turn what a stage raises into one line and an exit code (see `harness.errors`)."""
    try:
        yield
    except HarnessError as error:
        _end(str(error), error.exit_code)
    except (DrafterError, EngineUsageError) as error:
        _end(str(error), 2)
    except EngineFailed as error:
        _end(str(error), 3)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = f" ({error.filename})" if error.filename else ""
        _end(f"the disk is full{where}; make room and run the same command again", 3)
    except KeyboardInterrupt:
        _end("stopped; run the same command again to go on", STOPPED)


def _end(message: str, code: int) -> None:
    print(f"error: {one_line(message, 2000)}", file=sys.stderr)
    raise typer.Exit(code) from None
