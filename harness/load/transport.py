"""httpx's transport seam over connections of our own that stamp what is sent and what arrives.

httpx builds the requests, knows authentication and headers; below it a request's answer goes piece
by piece to the sink named in the request's extensions, stamped when it arrived and not when a
coroutine got round to it. Without a sink the answer is gathered, as any transport does.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter_ns

import httpx

from harness.load.connection import BodySink, Connection, ExchangeError, Intake
from harness.load.pool import ConnectFailed, Pool, proxy_for, tls_context
from harness.plan.schema import ClientSection

EXCHANGE = "exchange"
"""The request extension that holds an `Exchange`."""


@dataclass(kw_only=True)
class Exchange:
    """One request's sink, and the stamps (`perf_counter_ns`) that its transport leaves here.

    `connect_ns`: how long the set-up of its connection took, None where there was one already.
    """

    sink: BodySink
    sent_ns: int | None = None
    end_ns: int | None = None
    connect_ns: int | None = None


class Gathered:
    """A sink that keeps an answer whole."""

    def __init__(self, inner: BodySink | None = None) -> None:
        self._inner = inner
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The status line and headers have arrived."""
        self.status, self.headers = status, list(headers.items())
        if self._inner is not None:
            self._inner.head(status, headers)
            self.piece = self._inner.piece  # type: ignore[method-assign]

    def piece(self, arrived_ns: int, data: bytes) -> None:
        """A piece of the body arrived."""
        self.body.append(data)


class StampingTransport(httpx.AsyncBaseTransport):
    """As many connections as there are requests under way, to any number of servers.

    `fresh`: every request has a new connection, and counts as sent when that one's set-up begins.
    """

    def __init__(self, client: ClientSection | None = None, *, fresh: bool = False) -> None:
        self._client = client or ClientSection()
        self._fresh = fresh
        self._intake = Intake()
        self._tls: ssl.SSLContext | None = None
        self._pools: dict[tuple[str, str, int], Pool] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request`; returns when its answer is whole. Raises `httpx.TransportError`."""
        wanted = request.extensions.get(EXCHANGE)
        gathered = Gathered(wanted.sink if wanted is not None else None)
        exchange = wanted or Exchange(sink=gathered)
        try:
            await self._exchange(request, gathered, exchange)
        except ConnectFailed as error:
            raise httpx.ConnectError(str(error), request=request) from None
        except ExchangeError as error:
            raise httpx.ReadError(str(error), request=request) from None
        return httpx.Response(
            gathered.status,
            headers=gathered.headers,
            stream=httpx.ByteStream(b"".join(gathered.body)),
        )

    async def _exchange(self, request: httpx.Request, sink: BodySink, exchange: Exchange) -> None:
        """Send over a kept connection, once more over a new one if the server had closed it."""
        pool = self._pool(request.url)
        message = self._message(request, pool, await request.aread())
        timeout_s = request.extensions.get("timeout", {}).get("connect") or 10.0
        begun_ns = perf_counter_ns()

        def sent(at_ns: int) -> None:
            exchange.sent_ns = begun_ns if self._fresh else at_ns

        while True:
            connection, used = await pool.take(fresh=self._fresh, timeout_s=timeout_s)
            exchange.connect_ns = None if used else connection.connect_ns
            try:
                exchange.end_ns = await connection.exchange(message, sink, sent)
                return
            except ExchangeError as error:
                if not (used and error.retry):
                    raise
            finally:
                self._release(pool, connection)

    def _release(self, pool: Pool, connection: Connection) -> None:
        if self._fresh:
            connection.close()
        else:
            pool.give_back(connection)

    def _pool(self, url: httpx.URL) -> Pool:
        port = url.port or (443 if url.scheme == "https" else 80)
        key = (url.scheme, url.host, port)
        pool = self._pools.get(key)
        if pool is None:
            if url.scheme == "https" and self._tls is None:
                self._tls = tls_context(self._client.verify_tls, self._client.ca_file)
            pool = self._pools[key] = Pool(
                url.host,
                port,
                intake=self._intake,
                tls=self._tls if url.scheme == "https" else None,
                proxy=proxy_for(url.scheme, url.host, self._client.proxy),
            )
        return pool

    @staticmethod
    def _message(request: httpx.Request, pool: Pool, body: bytes) -> bytes:
        """The request as bytes. A proxy that forwards plain HTTP is told the whole URL."""
        target = request.url.raw_path
        lines = [b"%s: %s\r\n" % (name, value) for name, value in request.headers.raw]
        if pool.proxy is not None and request.url.scheme == "http":
            target = str(request.url).encode("ascii")
            if pool.proxy.authorization:
                lines.append(f"Proxy-Authorization: {pool.proxy.authorization}\r\n".encode())
        head = b"%s %s HTTP/1.1\r\n" % (request.method.encode("ascii"), target)
        return b"".join([head, *lines, b"\r\n", body])

    async def aclose(self) -> None:
        """Close the connections kept alive."""
        for pool in self._pools.values():
            pool.close()
