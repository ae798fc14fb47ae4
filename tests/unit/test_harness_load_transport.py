"""The transport below httpx: TLS, proxies, addresses, connections, retries."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from harness_scripted import Script, Seen, serve, stream, token, whole

from harness.errors import UsageError
from harness.load.prompts.datasets import Prompt
from harness.load.streaming.client import Asking, Client
from harness.load.streaming.plain import plain_client
from harness.load.streaming.pool import Proxy, check_client, proxy_for, tls_context
from harness.load.streaming.transport import StampingTransport
from harness.plan.schema import ClientSection, SamplingSection
from harness.records import RequestRecord

PROMPT = Prompt(id="p", text="1+1")
GOOD = [token([1, 2], "so"), token([3], "", choice={"finish_reason": "stop"})]


def good(number: int, body: dict[str, Any]) -> Any:
    return stream(GOOD)


def asking(url: str, **more: Any) -> Asking:
    fields: dict[str, Any] = {
        "url": url, "model": "m", "endpoint": "chat", "max_tokens": 8,
        "sampling": SamplingSection(), "timeout_s": 60.0,
    }  # fmt: skip
    return Asking(**{**fields, **more})


async def ask(url: str, times: int = 1, **more: Any) -> list[RequestRecord]:
    client = Client(asking(url, **more), "cell")
    try:
        return [await client.ask(i, PROMPT, None) for i in range(times)]
    finally:
        await client.aclose()


def against(
    script: Script, do: Callable[[str], Coroutine[Any, Any, list[RequestRecord]]], **more: Any
) -> tuple[list[RequestRecord], Seen]:
    async def go() -> tuple[list[RequestRecord], Seen]:
        async with serve(script, **more) as (url, seen):
            return await do(url), seen

    return asyncio.run(go())


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_side(authority: trustme.CA, name: str = "127.0.0.1") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


def test_a_certificate_nobody_vouches_for_is_a_failed_request(authority: trustme.CA) -> None:
    (record,), _ = against(good, ask, tls=server_side(authority))
    assert record.status == "failed"
    assert record.error is not None
    assert "certificate is not trusted" in record.error
    assert "client.ca_file" in record.error
    assert record.sent_ns is None


def test_tls_with_the_right_authority(authority: trustme.CA, ca_file: str) -> None:
    client = ClientSection(ca_file=ca_file)
    records, seen = against(
        good, lambda url: ask(url, 3, client=client), tls=server_side(authority)
    )
    assert [r.status for r in records] == ["ok"] * 3
    assert records[0].token_ids == (1, 2, 3)
    assert seen.connections == 1


def test_a_certificate_of_another_name_is_refused(authority: trustme.CA, ca_file: str) -> None:
    client = ClientSection(ca_file=ca_file)
    tls = server_side(authority, "elsewhere.example")
    (record,), _ = against(good, lambda url: ask(url, client=client), tls=tls)
    assert record.status == "failed"


def test_tls_unverified_where_the_plan_says_so(authority: trustme.CA) -> None:
    client = ClientSection(verify_tls=False)
    (record,), _ = against(good, lambda url: ask(url, client=client), tls=server_side(authority))
    assert record.status == "ok"


def test_plain_text_to_a_tls_port(authority: trustme.CA) -> None:
    tls = server_side(authority)
    (record,), _ = against(good, lambda url: ask(url.replace("https", "http")), tls=tls)
    assert record.status == "failed"


def test_tls_to_a_plain_port() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def go() -> list[RequestRecord]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            return await ask(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    (record,) = asyncio.run(go())
    assert record.error is not None
    assert "TLS failed" in record.error


def test_an_authority_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("not a certificate")
    for name in (path, tmp_path / "missing.pem"):
        with pytest.raises(UsageError, match=r"client\.ca_file"):
            tls_context(True, str(name))


def test_plain_http_goes_through_a_proxy_with_the_whole_url() -> None:
    async def through(url: str) -> list[RequestRecord]:
        proxy = url.replace("http://", "http://me:s%40crt@")
        return await ask("http://model.example:81/v1", client=ClientSection(proxy=proxy))

    (record,), seen = against(good, through)
    assert record.status == "ok"
    first = seen.headers[0].split("\r\n")[0]
    assert first == "POST http://model.example:81/v1/chat/completions HTTP/1.1"
    assert "Proxy-Authorization: Basic bWU6c0BjcnQ=" in seen.headers[0]


@asynccontextmanager
async def tunnelling_proxy(answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> AsyncIterator[Any]:
    """A proxy that lets CONNECT through; yields its URL and the requests it was asked."""
    asked: list[str] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(answer)
        if b" 200 " not in answer:
            writer.close()
            return
        host, port = asked[-1].split()[1].split(":")
        onward = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, onward[1]), copy(onward[0], writer))

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


def test_tls_through_a_proxy_is_tunnelled(authority: trustme.CA, ca_file: str) -> None:
    asked: list[str] = []

    async def through(url: str) -> list[RequestRecord]:
        async with tunnelling_proxy() as (proxy, requests):
            records = await ask(url, 2, client=ClientSection(proxy=proxy, ca_file=ca_file))
            asked.extend(requests)
            return records

    records, seen = against(good, through, tls=server_side(authority))
    assert [r.status for r in records] == ["ok", "ok"]
    assert len(asked) == 1
    assert asked[0].startswith("CONNECT 127.0.0.1:")
    assert seen.headers[0].startswith("POST /v1/chat/completions HTTP/1.1")


def test_a_proxy_that_refuses_is_named_in_the_record(authority: trustme.CA) -> None:
    async def through(url: str) -> list[RequestRecord]:
        async with tunnelling_proxy(b"HTTP/1.1 407 Who are you\r\n\r\n") as (proxy, _):
            return await ask(url, client=ClientSection(proxy=proxy))

    (record,), _ = against(good, through, tls=server_side(authority))
    assert record.error is not None
    assert "the proxy says: HTTP/1.1 407 Who are you" in record.error


def test_the_environments_proxy_is_for_others_than_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert proxy_for("http", "127.0.0.1", None) is None
    assert proxy_for("http", "localhost", None) is None
    assert proxy_for("http", "inside.example", None) is None
    assert proxy_for("http", "far.example", None) == Proxy(host="proxy.example", port=3128)
    assert proxy_for("https", "far.example", None) is None
    wanted = proxy_for("http", "127.0.0.1", "http://other.example")
    assert wanted == Proxy(host="other.example", port=80)
    with pytest.raises(UsageError, match=r"client\.proxy"):
        proxy_for("http", "far.example", "socks5://proxy.example:1080")


def test_an_address_that_refuses_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def two(url: str) -> list[RequestRecord]:
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo
        port = int(url.rpartition(":")[2])

        async def found(host: Any, given: Any, **more: Any) -> Any:
            if host != "model.example":
                return await real(host, given, **more)
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, (address, port)) for address in ("127.0.0.9", "127.0.0.1")]

        monkeypatch.setattr(loop, "getaddrinfo", found)
        return await ask(f"http://model.example:{port}", 2, new_connections=True)

    records, _ = against(good, two)
    assert [r.status for r in records] == ["ok", "ok"]


def test_setting_a_connection_up_is_measured_apart() -> None:
    (first, second), seen = against(good, lambda url: ask(url, 2))
    assert first.connect_ns is not None
    assert first.connect_ns > 0
    assert second.connect_ns is None
    assert seen.connections == 1


def test_new_connections_count_their_set_up() -> None:
    records, seen = against(good, lambda url: ask(url, 2, new_connections=True))
    assert seen.connections == 2
    for record in records:
        assert record.connect_ns is not None
        assert record.sent_ns is not None
        assert record.chunk_ns[0] - record.sent_ns >= record.connect_ns


def busy_once(number: int, body: dict[str, Any]) -> Any:
    if number == 0:
        return [whole("429 Too Many", '{"error": {"message": "slow"}}', more="retry-after: 0\r\n")]
    return stream(GOOD)


def test_too_many_requests_is_recorded_with_what_the_server_asked() -> None:
    (record,), seen = against(busy_once, ask)
    assert record.status == "failed"
    assert record.http_status == 429
    assert record.error == "HTTP 429: slow (Retry-After: 0 s)"
    assert (record.tries, len(seen.bodies)) == (1, 1)


def test_too_many_requests_is_asked_again_where_the_plan_allows() -> None:
    (record,), seen = against(busy_once, lambda url: ask(url, retries=2))
    assert (record.status, record.tries, len(seen.bodies)) == ("ok", 2, 2)


@pytest.mark.parametrize("wait", ["3600", "1e9"])
def test_a_wait_beyond_the_timeout_is_not_waited(wait: str) -> None:
    busy = whole("429 Too Many", "slow", more=f"retry-after: {wait}\r\n")
    (record,), seen = against(lambda n, _: [busy], lambda url: ask(url, retries=2))
    assert (record.status, record.tries, len(seen.bodies)) == ("failed", 1, 1)
    assert record.error == f"HTTP 429: slow (Retry-After: {float(wait):g} s)"


def test_without_a_sink_it_is_a_transport_like_any_other() -> None:
    async def get(url: str) -> list[RequestRecord]:
        async with httpx.AsyncClient(transport=StampingTransport()) as client:
            answer = await client.get(url + "/v1/models")
        assert answer.status_code == 200
        assert answer.json() == {"data": []}
        return []

    against(lambda n, b: [whole("200 OK", '{"data": []}')], get)


def test_headers_of_the_plan_are_sent() -> None:
    client = ClientSection(headers={"X-Tenant": "bench"})
    _, seen = against(good, lambda url: ask(url, client=client))
    assert "X-Tenant: bench" in seen.headers[0]
    assert "Accept-Encoding: identity" in seen.headers[0]


def test_models_and_counters_are_fetched_the_way_the_load_goes(
    authority: trustme.CA, ca_file: str
) -> None:
    def fetch(url: str, client: ClientSection) -> tuple[int, bytes]:
        with plain_client(url, client, "k") as http:
            answer = http.get(url + "/metrics")
            return answer.status_code, answer.content

    async def trusted(url: str) -> list[RequestRecord]:
        client = ClientSection(ca_file=ca_file, headers={"X-Tenant": "bench"})
        assert await asyncio.to_thread(fetch, url, client) == (200, b"up")
        return []

    async def through(url: str) -> list[RequestRecord]:
        client = ClientSection(proxy=url.replace("http://", "http://me:x@"))
        assert await asyncio.to_thread(fetch, "http://far.example", client) == (200, b"up")
        return []

    up = [whole("200 OK", "up")]
    _, seen = against(lambda n, b: up, trusted, tls=server_side(authority))
    assert "authorization: bearer k" in seen.headers[0].lower()
    assert "x-tenant: bench" in seen.headers[0].lower()
    _, seen = against(lambda n, b: up, through)
    assert seen.headers[0].startswith("GET http://far.example/metrics HTTP/1.1")
    assert "proxy-authorization: basic bwu6ea==" in seen.headers[0].lower()


@pytest.mark.parametrize(
    ("client", "needle"),
    [
        (ClientSection(headers={"X-A": "ü"}), r"client\.headers\.X-A"),
        (ClientSection(headers={"X-A": "a\r\nX-B: c"}), r"client\.headers\.X-A"),
        (ClientSection(headers={"X A": "a"}), r"client\.headers\.X A"),
        (ClientSection(proxy="socks5://h:1"), r"client\.proxy"),
        (ClientSection(ca_file="/no/such"), r"client\.ca_file"),
    ],
)
def test_what_no_request_could_be_sent_with_is_told(client: ClientSection, needle: str) -> None:
    with pytest.raises(UsageError, match=needle):
        check_client(client)
    check_client(ClientSection(headers={"X-A_1": "fine"}, proxy="http://h:1"))


def test_a_file_of_authorities_that_is_none_is_told_with_what_to_do(tmp_path: Path) -> None:
    empty = tmp_path / "ca.pem"
    for said in ("no such file or directory; give the path", "holds no certificate; a file of"):
        with pytest.raises(UsageError, match=said):
            tls_context(True, str(empty))
        empty.write_text("nothing\n")
