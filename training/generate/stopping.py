"""SIGTERM and SIGHUP end a stage as Ctrl-C does: what is begun is put away first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise `KeyboardInterrupt` in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield  # others cannot take signals
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
