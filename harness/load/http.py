"""HTTP/1.1 over asyncio with honest clock readings.

The clock is read in `data_received`, before any coroutine or parser runs, and when the request's
last byte has been handed to the socket. What was read is parsed one turn of the event loop later,
so that the parsing of one stream does not delay the stamps of the others that are ready with it.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools

from harness.errors import UsageError

MAX_HEAD_BYTES = 256_000
MAX_ANSWER_BYTES = 256_000_000
"""Of the headers and of a whole answer: bounds on what a server gone mad can cost."""


class BodySink(Protocol):
    """Receives one answer as it arrives; called from the event loop, must not block or raise."""

    def head(self, status: int, content_type: str) -> None:
        """The status line and headers have arrived."""

    def piece(self, arrived_ns: int, data: bytes) -> None:
        """A piece of the body arrived at `arrived_ns`."""


class ExchangeError(Exception):
    """The exchange failed below HTTP; `retry` where the server cannot have seen the request."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a server is: `prefix` is the path before `/v1` and the like."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read a server's root, with or without `/v1`. Raises `UsageError`."""
        wrong = UsageError(f"--url {url}: not a URL such as http://127.0.0.1:8000")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            (parts.hostname or "").encode("idna")
        except ValueError:  # UnicodeError too
            raise wrong from None
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            raise UsageError(f"--url {url}: the port is not a number from 1 to 65535")
        host = parts.hostname
        if parts.scheme not in ("http", "https") or not host or not url.isprintable():
            raise wrong
        if " " in host or parts.username is not None or parts.query or parts.fragment:
            raise UsageError(
                f"--url {url}: give the server's root alone, such as http://127.0.0.1:8000"
            )
        return cls(
            scheme=parts.scheme,
            host=host,
            port=port or (443 if parts.scheme == "https" else 80),
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
        )

    @property
    def authority(self) -> str:
        """Host and port as a URL and the `Host` header write them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def root(self) -> str:
        """The server's root as a URL without a slash at its end."""
        return f"{self.scheme}://{self.authority}{self.prefix}"


class Connection(asyncio.Protocol):
    """One keep-alive connection, one exchange at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._fd: int | None = None
        self._inbox: list[tuple[int, bytes]] = []
        self._scheduled = False
        self._lost: str | None = None
        self._drained: asyncio.Future[None] | None = None
        self._clear(None)

    def _clear(self, sink: BodySink | None) -> None:
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[int] | None = None
        self._now = 0
        self._answered = False
        self._read_bytes = 0
        self._in_head = True
        self._headers: dict[bytes, bytes] = {}
        self.reusable = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=0)  # type: ignore[union-attr]
        if transport.get_extra_info("ssl_object") is None:
            self._fd = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        if self._done is None:  # nobody asked: it would be taken for the next answer
            self.close()
            return
        self._inbox.append((perf_counter_ns(), data))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._read_inbox)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = describe(error) if error else "the server closed the connection"
        self._fd = None
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._read_inbox)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # What httptools calls, during `feed_data`.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        kind = self._headers.get(b"content-type", b"").decode("latin-1")
        status = self._parser.get_status_code()
        self._in_head = _interim(status)
        if self._sink is not None and not self._in_head:
            self._sink.head(status, kind)

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.piece(self._now, body)

    def on_message_complete(self) -> None:
        if _interim(self._parser.get_status_code()):
            self._headers = {}  # such as 100 Continue: the answer is still to come
            return
        self.reusable = self._parser.should_keep_alive() and self._lost is None
        self._end(None)

    # Our own.

    def _read_inbox(self) -> None:
        self._scheduled = False
        inbox, self._inbox = self._inbox, []
        for self._now, data in inbox:
            self._answered = True
            self._read_bytes += len(data)
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                self._end(ExchangeError(f"not an HTTP answer: {error}"))
                self.close()
                break
            most = MAX_HEAD_BYTES if self._in_head else MAX_ANSWER_BYTES
            if self._read_bytes > most and self._done is not None and not self._done.done():
                part = "headers" if self._in_head else "an answer"
                self._end(ExchangeError(f"the server sent {part} of more than {most:,} bytes"))
                self.close()
                break
        if self._lost is not None:
            self._end_by_close()

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
        self._done = done = self._loop.create_future()
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


class Pool:
    """Keep-alive connections to one server; as many as are asked for at once."""

    def __init__(self, origin: Origin, *, connect_timeout_s: float = 10.0) -> None:
        self.origin = origin
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if origin.scheme == "https" else None

    async def take(self) -> tuple[Connection, bool]:
        """A connection, and whether it has been used before. Raises `ExchangeError`."""
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection, True
        loop = asyncio.get_running_loop()
        at = self.origin.authority
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    Connection, self.origin.host, self.origin.port, ssl=self._tls
                )
        except TimeoutError:
            raise ExchangeError(f"no connection to {at}: timed out") from None
        except OSError as error:
            raise ExchangeError(f"no connection to {at}: {describe(error)}") from None
        return connection, False

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next exchange, or close it if it cannot be used again."""
        if connection.reusable and connection.open:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close every idle connection."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def post(origin: Origin, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """The bytes of a POST request with a JSON body."""
    lines: dict[str, Any] = {
        "Host": origin.authority,
        "Content-Type": "application/json",
        "Content-Length": len(body),
        "Accept": "text/event-stream, application/json",
        **headers,
    }
    head = f"POST {origin.prefix}{path} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("latin-1") + b"\r\n" + body
