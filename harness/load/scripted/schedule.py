"""When the scripted server writes, and the stamps of it."""

from __future__ import annotations

import array
import asyncio
import os
from collections import deque
from time import perf_counter_ns
from typing import Protocol

from harness.load.scripted.script import Script, Served

TICK_S = 0.001


class Link(Protocol):
    """The connection that an answer is written to. `fd` below 0: it is gone."""

    fd: int

    def behind(self) -> bool:
        """Whether bytes still wait that the socket did not take."""

    def write_later(self, data: bytes) -> None:
        """What the socket did not take; in order, before anything after it."""

    def answered(self) -> None:
        """The last chunk has been written."""


class Stream:
    """One answer under way."""

    __slots__ = ("due", "fd", "link", "next", "number", "read_ns", "stamps", "writes")

    def __init__(self, link: Link, number: int | None, read_ns: int, writes: list[bytes]) -> None:
        self.link = link
        self.fd = link.fd
        self.number = number
        self.read_ns = read_ns
        self.writes = writes
        self.next = 0
        self.due = 0
        self.stamps = array.array("q")


class Schedule:
    """Writes every chunk when it is due, to the tick of a millisecond.

    All answers have the same two delays, so that two queues, one for each, stay sorted by
    themselves: a chunk costs no timer and no heap.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._first_ns = int(script.first_ms * 1e6)
        self._gap_ns = int(script.gap_ms * 1e6)
        self._firsts: deque[Stream] = deque()
        self._gaps: deque[Stream] = deque()
        self._waiting: deque[Stream] = deque()
        self._ticking = False
        self._streams: list[Stream] = []
        self.running = 0
        self.finished = 0

    def add(self, stream: Stream) -> None:
        """A request has been read: start its answer, or let it wait for a slot."""
        self._streams.append(stream)
        if self._script.service_slots and self.running >= self._script.service_slots:
            self._waiting.append(stream)
        else:
            self._start(stream, stream.read_ns)

    def served(self) -> list[Served]:
        """What has been written so far."""
        return [
            Served(s.number, s.read_ns, s.stamps.tobytes(), s.next == len(s.writes))
            for s in self._streams
        ]

    def written(self) -> list[int]:
        """Chunks written of each answer; one for an answer that is not streamed."""
        return [s.next * (self._script.chunks // len(s.writes)) for s in self._streams]

    def _start(self, stream: Stream, now: int) -> None:
        self.running += 1
        loop = asyncio.get_running_loop()
        if len(stream.writes) < self._script.chunks:  # in one piece, when a stream would have ended
            loop.call_later(self._script.service_s, self._write_whole, stream)
            return
        stream.due = now + self._first_ns
        self._firsts.append(stream)
        if not self._ticking:
            self._ticking = True
            loop.call_later(TICK_S, self._tick)

    def _write_whole(self, stream: Stream) -> None:
        self._write_due(deque([stream]), perf_counter_ns())

    def _tick(self) -> None:
        now = perf_counter_ns()
        self._write_due(self._firsts, now)
        self._write_due(self._gaps, now)
        self._ticking = bool(self._firsts or self._gaps)
        if self._ticking:
            asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _write_due(self, queue: deque[Stream], now: int) -> None:
        gaps, gap_ns, clock, write = self._gaps, self._gap_ns, perf_counter_ns, os.write
        while queue and queue[0].due <= now:
            stream = queue.popleft()
            data = stream.writes[stream.next]
            # The stamp is taken before the write: the client can have the bytes before it returns.
            stream.stamps.append(clock())
            try:
                written = 0 if stream.link.behind() else write(stream.fd, data)
            except BlockingIOError:
                written = 0
            except OSError:
                stream.stamps.pop()
                self._end(stream)
                continue
            if written != len(data):
                stream.link.write_later(data[written:])
            stream.next += 1
            if stream.next == len(stream.writes):
                self.finished += 1
                stream.link.answered()
                self._end(stream)
            else:
                stream.due += gap_ns
                gaps.append(stream)

    def _end(self, stream: Stream) -> None:
        self.running -= 1
        while self._waiting:
            waiting = self._waiting.popleft()
            if waiting.fd >= 0:
                self._start(waiting, perf_counter_ns())
                return
