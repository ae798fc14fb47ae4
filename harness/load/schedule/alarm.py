"""A clock to wake by that is finer than the event loop's timers.

Event loops round their timers to a millisecond, which is as much as the send lag that is allowed.
On Linux the kernel's timerfd wakes the loop within some tens of microseconds, without spinning.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from time import perf_counter_ns

CLOCK_MONOTONIC = 1  # what perf_counter_ns reads on Linux
ABSOLUTE = 1
SPIN_NS = 1_500_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Wakes one waiter at an absolute time; to be made within a running loop, and closed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._libc, self._fd = _open_timer()
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._ring)

    def close(self) -> None:
        """Give the timer back."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    async def until(self, due_ns: int) -> None:
        """Sleep until `perf_counter_ns` reaches `due_ns`; a time gone by yields once."""
        if due_ns <= perf_counter_ns():
            await asyncio.sleep(0)
            return
        while (left_ns := due_ns - perf_counter_ns()) > 0:
            if self._set(due_ns):
                self._waiter = self._loop.create_future()
                await self._waiter
            else:  # a loop's timer may be late by a millisecond: the rest is spun through
                await asyncio.sleep(max(0, left_ns - SPIN_NS) / 1e9)

    def _set(self, due_ns: int) -> bool:
        """Set the kernel's timer; False where there is none."""
        if self._libc is None:
            return False
        seconds, nanoseconds = divmod(due_ns, 1_000_000_000)
        timer = _Timer(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
        done: int = self._libc.timerfd_settime(self._fd, ABSOLUTE, ctypes.byref(timer), None)
        return done == 0

    def _ring(self) -> None:
        assert self._fd is not None
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _open_timer() -> tuple[ctypes.CDLL | None, int | None]:
    """The C library and a timer's descriptor; None where the system has no such timer."""
    if not sys.platform.startswith("linux"):
        return None, None
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "timerfd_create"):
        return None, None
    fd: int = libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return (libc, fd) if fd >= 0 else (None, None)
