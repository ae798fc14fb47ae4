"""httpx's transport seam over connections of our own that stamp what is sent and what arrives.

As any transport it answers httpx's clients. The load's own requests go through `exchange`: httpx
builds and authenticates one of them, whose head then serves for all; the answers go piece by piece
to a sink, stamped when they arrived and not when a coroutine got round to it.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter_ns

import httpx

from harness.load.streaming.connection import BodySink, Connection, ExchangeError, Intake
from harness.load.streaming.pool import ConnectFailed, Pool, proxy_for, tls_context
from harness.plan.schema import ClientSection

CONNECT_TIMEOUT_S = 10.0


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

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The status line and headers have arrived."""
        self.status, self.headers = status, list(headers.items())

    def piece(self, arrived_ns: int, data: bytes) -> None:
        """A piece of the body arrived."""
        self.body.append(data)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A request but for its body: its head's bytes, and where it goes."""

    head: bytes
    pool: Pool
    request: httpx.Request
    connect_timeout_s: float


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
        gathered = Gathered()
        timeouts = request.extensions.get("timeout", {})
        template = self.template(request, timeouts.get("connect") or CONNECT_TIMEOUT_S)
        await self.exchange(template, await request.aread(), Exchange(sink=gathered))
        return httpx.Response(
            gathered.status,
            headers=gathered.headers,
            stream=httpx.ByteStream(b"".join(gathered.body)),
        )

    def template(self, request: httpx.Request, connect_timeout_s: float) -> Template:
        """What all requests that differ from `request` in their body alone have in common."""
        pool = self._pool(request.url)
        target = request.url.raw_path
        lines = [
            b"%s: %s\r\n" % (name, value)
            for name, value in request.headers.raw
            if name.lower() not in (b"content-length", b"transfer-encoding")
        ]
        if pool.proxy is not None and request.url.scheme == "http":
            target = str(request.url).encode("ascii")  # the proxy must know where to
            if pool.proxy.authorization:
                lines.append(f"Proxy-Authorization: {pool.proxy.authorization}\r\n".encode())
        first = b"%s %s HTTP/1.1\r\n" % (request.method.encode("ascii"), target)
        return Template(
            head=b"".join([first, *lines]),
            pool=pool,
            request=request,
            connect_timeout_s=connect_timeout_s,
        )

    async def exchange(self, template: Template, body: bytes, exchange: Exchange) -> None:
        """Send a request with `body`; returns when its answer is whole.

        Raises `httpx.TransportError`; what has arrived until then is in the exchange and its sink.
        """
        message = b"%sContent-Length: %d\r\n\r\n%s" % (template.head, len(body), body)
        try:
            await self._send(template, message, exchange)
        except ConnectFailed as error:
            raise httpx.ConnectError(str(error), request=template.request) from None
        except ExchangeError as error:
            raise httpx.ReadError(str(error), request=template.request) from None

    async def _send(self, template: Template, message: bytes, exchange: Exchange) -> None:
        """Send over a kept connection, once more over a new one if the server had closed it."""
        pool = template.pool
        begun_ns = perf_counter_ns()

        def sent(at_ns: int) -> None:
            exchange.sent_ns = begun_ns if self._fresh else at_ns

        while True:
            connection, used = await pool.take(
                fresh=self._fresh, timeout_s=template.connect_timeout_s
            )
            exchange.connect_ns = None if used else connection.connect_ns
            try:
                exchange.end_ns = await connection.exchange(message, exchange.sink, sent)
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

    async def aclose(self) -> None:
        """Close the connections kept alive."""
        for pool in self._pools.values():
            pool.close()
