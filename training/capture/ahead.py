"""Work done ahead in a thread: a bounded buffer between who makes and who takes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
_POLL_S = 0.1


class Ahead(Generic[Item]):
    """Iterate what `make()` yields, made in a thread up to `size` items ahead.

    `waited_s`: how long the taker stood waiting, the first item left out (nothing can be ahead of
    it); `waits`: how often. An error in the thread is raised where its item would have come. Leave
    the loop early and the thread ends with its current item.
    """

    def __init__(self, make: Callable[[], Iterator[Item]], size: int) -> None:
        self._make = make
        self._buffer: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(size)
        self._stop = threading.Event()
        self.waited_s = 0.0
        self.waits = 0

    def __iter__(self) -> Iterator[Item]:
        thread = threading.Thread(target=self._fill, name="states-ahead", daemon=True)
        thread.start()
        first = True
        try:
            while True:
                item, error = self._take(first)
                if error is not None:
                    if isinstance(error, StopIteration):
                        return
                    raise error
                first = False
                yield item  # type: ignore[misc]  # None comes with an error alone
        finally:
            self._stop.set()
            thread.join()

    def _take(self, first: bool) -> tuple[Item | None, BaseException | None]:
        if first or not self._buffer.empty():
            return self._buffer.get()
        began = time.monotonic()
        found = self._buffer.get()
        if not isinstance(found[1], StopIteration):
            self.waited_s += time.monotonic() - began
            self.waits += 1
        return found

    def _fill(self) -> None:
        try:
            for item in self._make():
                if not self._put(item, None):
                    return
            self._put(None, StopIteration())
        except BaseException as error:
            self._put(None, error)

    def _put(self, item: Item | None, error: BaseException | None) -> bool:
        """False once nobody takes any more."""
        while not self._stop.is_set():
            try:
                self._buffer.put((item, error), timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
