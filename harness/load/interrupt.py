"""An event loop that a signal ends without getting lost.

A handler that raises may do so within a protocol's callback, where the event loop logs the
exception and goes on: the signal is then lost. So handlers only note the signal while the loop
runs; its work is cancelled, and the handler that was there before is called behind it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_of(stop: KeyboardInterrupt) -> int:
    """The signal that ended the work: Ctrl-C where none is told."""
    return int(stop.args[0]) if stop.args else signal.SIGINT


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """`uvloop.run(main)`; a signal cancels `main`, then goes to the handler it was meant for."""
    import uvloop

    caught: list[int] = []
    cancel: list[Callable[[], object]] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        for call in cancel:
            call()

    async def watched() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        if caught:  # before there was a task
            task.cancel()
        try:
            return await main
        finally:
            cancel.clear()

    here = threading.current_thread() is threading.main_thread()  # others cannot take signals
    handlers = {n: signal.getsignal(n) for n in ENDING if here}
    meant = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in meant:
        signal.signal(number, note)
    try:
        done: T = uvloop.run(watched())
        return done
    finally:
        for number, handler in meant.items():
            signal.signal(number, handler)
        if caught:
            meant[signal.Signals(caught[0])](caught[0], None)


@contextmanager
def held() -> Iterator[None]:
    """What must not be cut in two: a signal to end is taken up when the block has ended."""
    caught: list[int] = []
    here = threading.current_thread() is threading.main_thread()  # others cannot take signals
    handlers = {n: signal.getsignal(n) for n in ENDING if here}
    meant = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in meant:
        signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        for number, handler in meant.items():
            signal.signal(number, handler)
    if caught:
        meant[signal.Signals(caught[0])](caught[0], None)
