"""Connections to one server: kept alive, over TLS, through a proxy, to several addresses."""

from __future__ import annotations

import asyncio
import base64
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from time import perf_counter_ns
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from harness.errors import UsageError
from harness.load.streaming.connection import Connection, ExchangeError, Intake, describe
from harness.plan.schema import ClientSection

MAX_PROXY_HEAD_BYTES = 64_000


class ConnectFailed(ExchangeError):
    """No connection could be made."""


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """An HTTP proxy, and what it wants to see before it lets anybody through."""

    host: str
    port: int
    authorization: str | None = None

    @classmethod
    def parse(cls, url: str, where: str) -> Proxy:
        """Raises `UsageError` naming `where` the URL was said."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if not host or parts.scheme != "http":
            raise UsageError(f"{where}: {url[:100]}: a proxy is given as http://HOST:PORT")
        authorization = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            authorization = "Basic " + base64.b64encode(pair.encode()).decode()
        return cls(host=host, port=port or 80, authorization=authorization)


def proxy_for(scheme: str, host: str, wanted: str | None) -> Proxy | None:
    """The proxy to go through: the one wanted, else what the environment says for this host.

    A server on this machine is never asked through a proxy that only the environment names.
    """
    if wanted:
        return Proxy.parse(wanted, "client.proxy")
    if is_loopback(host) or proxy_bypass(host):
        return None
    said = getproxies_environment()
    url = said.get(scheme) or said.get("all")
    return Proxy.parse(url, f"{scheme.upper()}_PROXY") if url else None


def check_client(client: ClientSection) -> None:
    """Raise `UsageError` for what no request could be sent with."""
    if client.proxy:
        Proxy.parse(client.proxy, "client.proxy")
    if client.ca_file is not None:
        tls_context(client.verify_tls, client.ca_file)
    for name, value in client.headers.items():
        good = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if not good or not (value.isascii() and value.isprintable()):
            raise UsageError(f"client.headers.{name[:80]}: not a header that HTTP can carry")


def is_loopback(host: str) -> bool:
    """Whether the name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class _Tunnel(asyncio.Protocol):
    """Asks a proxy for a way through, and waits for its answer."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self._head += data
        whole = b"\r\n\r\n" in self._head or len(self._head) > MAX_PROXY_HEAD_BYTES
        if whole and not self.answered.done():
            self.answered.set_result(self._head.partition(b"\r\n")[0])

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_result(b"")


class Pool:
    """Keep-alive connections to one server; as many as are asked for at once."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        intake: Intake,
        tls: ssl.SSLContext | None = None,
        proxy: Proxy | None = None,
    ) -> None:
        self._host, self._port = host, port
        self._intake = intake
        self._tls = tls
        self.proxy = proxy
        self._idle: list[Connection] = []
        self._addresses: list[str] = []
        self._turn = 0

    async def take(self, *, fresh: bool = False, timeout_s: float) -> tuple[Connection, bool]:
        """A connection, and whether it has been used before. Raises `ConnectFailed`."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.open:
                return connection, True
        at = f"{self._host}:{self._port}"
        begun_ns = perf_counter_ns()
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect()
        except TimeoutError:
            raise ConnectFailed(f"no connection to {at}: timed out") from None
        except ssl.SSLError as error:
            raise ConnectFailed(f"no connection to {at}: {tls_words(error)}") from None
        except OSError as error:
            raise ConnectFailed(f"no connection to {at}: {describe(error)}") from None
        connection.connect_ns = perf_counter_ns() - begun_ns
        return connection, False

    async def _connect(self) -> Connection:
        """Try the server's (or the proxy's) addresses, beginning with another one each time."""
        addresses = await self._resolved()
        self._turn += 1
        failed: OSError | None = None
        for i in range(len(addresses)):
            address = addresses[(self._turn + i) % len(addresses)]
            try:
                return await self._connect_to(address)
            except ssl.SSLError:
                raise
            except OSError as error:
                failed = error
                if len(self._addresses) > 1 and address in self._addresses:
                    self._addresses.remove(address)  # not tried again while others answer
        assert failed is not None
        self._addresses = []
        raise failed

    async def _resolved(self) -> list[str]:
        if not self._addresses:
            host, port = self._host, self._port
            if self.proxy is not None:
                host, port = self.proxy.host, self.proxy.port
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, port, type=1)  # SOCK_STREAM
            self._addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        return list(self._addresses)

    async def _connect_to(self, address: str) -> Connection:
        if self.proxy is not None and self._tls is not None:
            return await self._tunnel(address)
        port = self.proxy.port if self.proxy else self._port
        name = self._host if self._tls is not None else None
        _, connection = await asyncio.get_running_loop().create_connection(
            self._make, address, port, ssl=self._tls, server_hostname=name
        )
        return connection

    def _make(self) -> Connection:
        return Connection(self._intake)

    async def _tunnel(self, address: str) -> Connection:
        """TLS to the server through the proxy's CONNECT."""
        assert self.proxy is not None
        assert self._tls is not None
        loop = asyncio.get_running_loop()
        raw, tunnel = await loop.create_connection(_Tunnel, address, self.proxy.port)
        at = f"{self._host}:{self._port}"
        lines = [f"CONNECT {at} HTTP/1.1", f"Host: {at}"]
        if self.proxy.authorization:
            lines.append(f"Proxy-Authorization: {self.proxy.authorization}")
        raw.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        try:
            status = (await tunnel.answered).decode("latin-1")
            if not status.startswith("HTTP/1.") or status[9:10] != "2":
                raise ConnectionError(f"the proxy says: {status[:100] or 'nothing'}")
            connection = self._make()
            secure = await loop.start_tls(raw, connection, self._tls, server_hostname=self._host)
        except BaseException:
            raw.abort()
            raise
        assert secure is not None
        connection.connection_made(secure)
        return connection

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


def tls_words(error: ssl.SSLError) -> str:
    """What is wrong with a server's TLS, and what can be done about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted: {error.verify_message}; set client.ca_file, or "
            "client.verify_tls=false"
        )
    return f"TLS failed: {(error.reason or str(error)).lower().replace('_', ' ')}"


def tls_context(verify: bool, ca_file: str | None) -> ssl.SSLContext:
    """How servers prove who they are. Raises `UsageError`."""
    if ca_file is None:
        context = ssl.create_default_context()
    else:
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except ssl.SSLError:
            raise UsageError(
                f"client.ca_file: {ca_file}: holds no certificate; a file of certificates in PEM "
                "form (-----BEGIN CERTIFICATE-----) is wanted"
            ) from None
        except OSError as error:
            raise UsageError(
                f"client.ca_file: {ca_file}: {(error.strerror or 'cannot be read').lower()}; "
                "give the path of the authorities' certificates in PEM form"
            ) from None
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
