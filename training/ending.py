"""How `python -m training` ends: as `python -m harness` does, and what else training runs into."""

from __future__ import annotations

import errno

from harness.ending import Stopped, complain, exit_code_of

DISK_FULL = 3
KEPT = "what was finished is kept; run the same command again to go on"


def training_exit_code(error: BaseException, program: str = "training") -> int:
    """Tell the error in one line and give its exit code (`harness.ending.exit_code_of`).

    A full disk is told as one, with code 3; an interruption says what is kept and how to go on
    (its notes, where it carries any).
    """
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" ({error.filename})" if error.filename else ""
        complain(f"the disk is full{where}; make room and run the same command again", program)
        return DISK_FULL
    code = exit_code_of(error, program)
    cause = error.args[0] if isinstance(error, Stopped) else error
    if isinstance(cause, KeyboardInterrupt):
        for note in getattr(cause, "__notes__", (KEPT,)):
            complain(note, program)
    return code
