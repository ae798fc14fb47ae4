"""One HTTP/1.1 connection over asyncio with honest clock readings.

The clock is read in `data_received`, before any coroutine or parser runs, and when the request's
last byte has been handed to the socket. What was read is parsed one turn of the event loop later,
so that the parsing of one stream does not delay the stamps of the others that are ready with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Protocol

import httptools

MAX_HEAD_BYTES = 256_000
MAX_ANSWER_BYTES = 256_000_000
"""Of the headers and of a whole answer: bounds on what a server gone mad can cost."""


class BodySink(Protocol):
    """Receives one answer as it arrives; called from the event loop, must not block or raise."""

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The status line and headers (names in small letters) have arrived."""

    def piece(self, arrived_ns: int, data: bytes) -> None:
        """A piece of the body arrived at `arrived_ns`."""


class ExchangeError(Exception):
    """The exchange failed below HTTP; `retry` where the server cannot have seen the request."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class Intake:
    """What all connections of a loop have read and not parsed yet, in the order of arrival."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: list[tuple[Connection, int, bytes | None]] = []
        self._scheduled = False

    def put(self, connection: Connection, data: bytes | None) -> None:
        """Stamp and keep a read; None: the connection is lost."""
        self._inbox.append((connection, perf_counter_ns(), data))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._parse)

    def _parse(self) -> None:
        self._scheduled = False
        inbox, self._inbox = self._inbox, []
        for connection, arrived_ns, data in inbox:
            connection.parse(arrived_ns, data)


class Connection(asyncio.Protocol):
    """One keep-alive connection, one exchange at a time."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._transport: asyncio.Transport | None = None
        self._fd: int | None = None
        self._lost: str | None = None
        self._drained: asyncio.Future[None] | None = None
        self.connect_ns: int | None = None
        """How long its set-up took."""
        self._clear(None)

    def _clear(self, sink: BodySink | None) -> None:
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[int] | None = None
        self._now = 0
        self._answered = False
        self._read_bytes = 0
        self._most_bytes = MAX_HEAD_BYTES
        self._headers: dict[bytes, bytes] = {}
        self.reusable = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=0)  # type: ignore[union-attr]
        if transport.get_extra_info("ssl_object") is None:
            self._fd = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            # Nobody asked: it would be taken for the next answer.
            self.close()
            return
        self._intake.put(self, data)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = describe(error) if error else "the server closed the connection"
        self._fd = None
        self._intake.put(self, None)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # What httptools calls, during `feed_data`.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if _interim(status):
            return
        self._most_bytes = MAX_ANSWER_BYTES
        if self._sink is not None:
            self._sink.head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.piece(self._now, body)

    def on_message_complete(self) -> None:
        if _interim(self._parser.get_status_code()):
            self._headers = {}  # such as 100 Continue: the answer is still to come
            return
        second = self._sink is None  # nobody asked for it
        self.reusable = not second and self._parser.should_keep_alive() and self._lost is None
        self._end(None)
        self._sink = None

    # Our own.

    def parse(self, arrived_ns: int, data: bytes | None) -> None:
        """Parse what arrived at `arrived_ns`; None: the connection is lost."""
        if data is None:
            self._end_by_close()
            return
        self._now = arrived_ns
        self._answered = True
        self._read_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(ExchangeError(f"not an HTTP answer: {error}"))
            self.close()
            return
        if self._read_bytes > self._most_bytes and self._done is not None:
            part = "headers" if self._most_bytes == MAX_HEAD_BYTES else "an answer"
            self._end(
                ExchangeError(f"the server sent {part} of more than {self._most_bytes:,} bytes")
            )
            self.close()

    def _end_by_close(self) -> None:
        framed = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        if self._headers and not framed:
            self._end(None)  # an answer without a length ends with the connection
            return
        when = "in the middle of the answer" if self._answered else "before it answered"
        self._end(ExchangeError(f"{self._lost} {when}", retry=not self._answered))

    def _end(self, error: ExchangeError | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(self._now or perf_counter_ns())
        else:
            self._done.set_exception(error)

    @property
    def open(self) -> bool:
        """Whether the connection can carry another exchange."""
        return self._lost is None and self._transport is not None

    async def exchange(self, request: bytes, sink: BodySink, on_sent: Callable[[int], None]) -> int:
        """Send `request` and feed its answer to `sink`; returns when its last byte arrived, in ns.

        `on_sent` gets the moment the last byte of the request was handed to the socket. Raises
        `ExchangeError`.
        """
        self._clear(sink)
        self._done = done = asyncio.get_running_loop().create_future()
        try:
            on_sent(await self._send(request))
            return await done
        finally:
            if done.done() and not done.cancelled():
                done.exception()  # seen, also where sending failed first
            self._sink = None
            self._done = None

    async def _send(self, request: bytes) -> int:
        # uvloop queues a transport's writes until the loop's next turn; writing to the socket
        # itself makes the stamp true. Nothing is queued before: one exchange at a time.
        rest = memoryview(request)
        if self._fd is not None:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                pass
            except OSError as error:
                raise ExchangeError(describe(error), retry=True) from None
        if not rest:
            return perf_counter_ns()
        if self._transport is None or self._lost is not None:
            raise ExchangeError(self._lost or "not connected", retry=True)
        self._transport.write(bytes(rest))
        if self._drained is not None and self._transport.get_write_buffer_size():
            await self._drained
        return perf_counter_ns()

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


def _interim(status: int) -> bool:
    return 100 <= status < 200 and status != 101


def describe(error: BaseException) -> str:
    """An operating system's error in words, without its number and address."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
