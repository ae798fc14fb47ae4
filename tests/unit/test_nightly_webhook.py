"""The webhook against a real server: what is posted, how often, and that nothing leaks."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from harness.nightly.suite import Webhook
from harness.nightly.webhook import SIGNATURE, send

FINDINGS = {"suite": "s", "exit_code": 1}


class Listener:
    """A server that answers with the given codes, the last one again and again."""

    def __init__(self, codes: list[int]) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.got.append((dict(self.headers), body))
                code = codes[min(len(listener.got), len(codes)) - 1]
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/T0K3N"


@pytest.fixture
def listen() -> Iterator[Any]:
    made: list[Listener] = []

    def make(*codes: int) -> Listener:
        made.append(Listener(list(codes)))
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def post(hook: Webhook, environment: dict[str, str]) -> tuple[str, list[float]]:
    waits: list[float] = []
    said = send(hook, FINDINGS, "all is well", environment=environment, sleep=waits.append)
    return said, waits


def test_the_findings_are_posted_and_signed(listen: Any) -> None:
    server = listen(200)
    hook = Webhook(url_env="HOOK", secret_env="SECRET")
    said, waits = post(hook, {"HOOK": server.url, "SECRET": "s3cret"})
    ((headers, body),) = server.got
    assert said == "webhook: sent" and waits == []
    assert json.loads(body) == FINDINGS
    assert headers["Content-Type"] == "application/json"
    wanted = hmac.new(b"s3cret", body, hashlib.sha256).hexdigest()
    assert headers[SIGNATURE] == f"sha256={wanted}"


def test_slack_gets_a_text(listen: Any) -> None:
    server = listen(200)
    post(Webhook(url_env="HOOK", format="slack"), {"HOOK": server.url})
    assert json.loads(server.got[0][1]) == {"text": "all is well"}


def test_a_busy_server_is_asked_again_with_longer_waits(listen: Any) -> None:
    server = listen(503, 429, 200)
    said, waits = post(Webhook(url_env="HOOK", retries=3), {"HOOK": server.url})
    assert said == "webhook: sent"
    assert len(server.got) == 3 and waits == [1.0, 2.0]


def test_tries_have_a_limit_and_no_address_is_told(listen: Any) -> None:
    server = listen(500)
    said, waits = post(Webhook(url_env="HOOK", retries=2), {"HOOK": server.url})
    assert said == "webhook: not sent, tried 3 times: HTTP 500"
    assert len(server.got) == 3 and len(waits) == 2
    assert "T0K3N" not in said


def test_what_another_try_cannot_change_is_tried_once(listen: Any) -> None:
    server = listen(404)
    said, waits = post(Webhook(url_env="HOOK"), {"HOOK": server.url})
    assert said == "webhook: not sent, tried once: HTTP 404" and waits == []


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "$HOOK is not set"),
        ({"HOOK": "http://127.0.0.1:1/x"}, "$SECRET is not set"),
        ({"HOOK": "http://127.0.0.1:1/T0K3N", "SECRET": "x"}, "ConnectError"),
        ({"HOOK": "no address T0K3N", "SECRET": "x"}, "not sent"),
        ({"HOOK": "ftp://x/T0K3N", "SECRET": "x"}, "not sent"),
        ({"HOOK": "http://\x00/T0K3N", "SECRET": "x"}, "not sent"),
        ({"HOOK": "http://[/T0K3N", "SECRET": "x"}, "not sent"),
    ],
)
def test_nothing_is_raised_whatever_the_environment_says(
    environment: dict[str, str], said: str
) -> None:
    told, _ = post(Webhook(url_env="HOOK", secret_env="SECRET", retries=1), environment)
    assert said in told and "T0K3N" not in told and "\n" not in told


def test_an_address_that_is_none_is_tried_once() -> None:
    said, waits = post(Webhook(url_env="HOOK"), {"HOOK": "chat.example/T0K3N"})
    assert said.startswith("webhook: not sent, tried once: UnsupportedProtocol: is it a whole")
    assert waits == [] and "T0K3N" not in said


def test_a_redirect_is_not_followed(listen: Any) -> None:
    server = listen(302)
    said, _ = post(Webhook(url_env="HOOK"), {"HOOK": server.url})
    assert said == "webhook: not sent, tried once: HTTP 302" and len(server.got) == 1


def test_an_answer_without_an_end_is_not_waited_for() -> None:
    """The server takes it, and then sends its body a byte at a time for ever."""
    closed = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            try:
                while not closed.wait(0.05):
                    self.wfile.write(b".")
            except OSError:
                pass
            finally:
                closed.set()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        assert post(Webhook(url_env="HOOK"), {"HOOK": url})[0] == "webhook: sent"
        assert closed.wait(300)
    finally:
        server.shutdown()
        server.server_close()


def test_a_wrong_proxy_or_secret_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:1")
    hook = Webhook(url_env="HOOK", secret_env="SECRET", retries=0)
    said, _ = post(hook, {"HOOK": "http://example.invalid/T0K3N", "SECRET": "\udcff"})
    assert said.startswith("webhook: not sent, tried once: ") and "T0K3N" not in said
