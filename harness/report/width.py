"""How wide the tables on standard output are."""

from __future__ import annotations

import os
import shutil
import sys

WIDTH = 100
LEAST = 40
"""Fewer columns than this hold no table: so many are written."""


def output_width() -> int:
    """Columns of what goes to standard output.

    On a terminal at most `WIDTH`; elsewhere (a pipe, a file) what $COLUMNS asks for, else `WIDTH`.
    """
    if sys.stdout.isatty():
        return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    asked = os.environ.get("COLUMNS", "")
    usable = asked.isascii() and asked.isdecimal() and len(asked) <= 4 and int(asked) > 0
    return max(LEAST, int(asked)) if usable else WIDTH
