"""What the doctor is doing now, told on standard error by whoever calls it."""

from __future__ import annotations

import time
from collections.abc import Callable

Tell = Callable[[str], None]
QUIET_S = 5.0
"""Reading tells of itself so often."""


def throttled(tell: Tell) -> Tell:
    """`tell`, but not more often than every `QUIET_S` seconds."""
    last = time.monotonic()

    def told(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET_S:
            last = time.monotonic()
            tell(line)

    return told
