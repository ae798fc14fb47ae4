"""Server-sent events, parsed incrementally. No I/O and no clock.

After https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream:
lines end in LF, CR or CRLF, a blank line dispatches, `:` begins a comment. Two liberties, for
servers as they are: an event without data lines is dropped, and `finish` hands out an event whose
closing blank line never came.
"""

from __future__ import annotations

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: its data lines joined by LF, and its type (empty: `message`)."""

    data: bytes
    kind: bytes = b""


class SseParser:
    """Feed it reads of any size; it returns the events they complete.

    Bytes stay bytes, so that a read that ends within a UTF-8 sequence does no harm.
    """

    __slots__ = ("_begun", "_data", "_held", "_kind", "_skip_lf", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._skip_lf = False
        self._begun = False
        self._data: list[bytes] = []
        self._held = 0
        self._kind = b""

    def feed(self, read: bytes) -> list[Event]:
        """The events completed by `read`, in order."""
        # Nearly every read of a stream of tokens is one whole event of one line.
        if read[:6] == b"data: " and read[-2:] == b"\n\n" and not self._midway():
            data = read[6:-2]
            if data and b"\n" not in data and b"\r" not in data:
                self._begun = True
                return [Event(data)]
        return self._feed_lines(read)

    def _midway(self) -> bool:
        return bool(self._tail or self._data or self._kind or self._skip_lf)

    def _feed_lines(self, read: bytes) -> list[Event]:
        if not read:
            return []
        if self._skip_lf and read[0] == 0x0A:
            read = read[1:]
        self._skip_lf = False
        lines = (self._tail + read).splitlines(keepends=True)
        self._tail = b""
        events: list[Event] = []
        for line in lines:
            if line.endswith(b"\n"):
                self._line(line[:-2] if line.endswith(b"\r\n") else line[:-1], events)
            elif line.endswith(b"\r"):
                # Only the last line of a read can end so with its LF still to come.
                self._skip_lf = True
                self._line(line[:-1], events)
            else:
                self._tail = line
        if self._skip_lf and not lines[-1].endswith(b"\r"):
            self._skip_lf = False
        return events

    @property
    def pending(self) -> int:
        """About how many bytes the event that is not complete yet takes up."""
        return len(self._tail) + self._held

    def finish(self) -> list[Event]:
        """The event left open when the stream ended, if it had data."""
        events: list[Event] = []
        if self._tail:
            self._line(self._tail, events)
            self._tail = b""
        self._line(b"", events)
        return events

    def _line(self, line: bytes, events: list[Event]) -> None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                events.append(Event(b"\n".join(self._data), self._kind))
            self._data = []
            self._held = 0
            self._kind = b""
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._held += len(value) + 40  # what a line costs, at least
        elif name == b"event":
            self._kind = value
