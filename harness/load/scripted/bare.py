"""The yardstick: a bare asyncio protocol that notes arrivals and reads nothing else.

Closed loop. No JSON, no HTTP parser, no records: the least a Python client can do and still know
when each chunk of a scripted answer came. Good for the scripted server alone, whose answers it
recognises by their bytes.
"""

from __future__ import annotations

import asyncio
import time
from time import perf_counter_ns

import msgspec

from harness.load.scripted.script import CHUNK_MARK, END

BODY = (
    b'{"model":"scripted","messages":[{"role":"user","content":"#%d"}],"stream":true,'
    b'"stream_options":{"include_usage":true,"continuous_usage_stats":true},'
    b'"return_token_ids":true,"max_tokens":%d,"temperature":0.0}'
)


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a client: its number, when it was sent, when each of its chunks came."""

    number: int
    sent_ns: int
    chunk_ns: tuple[int, ...]


class BareRun(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose answers came whole, and the process's CPU time for all of them."""

    requests: list[Noted]
    cpu_s: float
    wall_s: float


class _Loop:
    """Hands out the requests' numbers, and ends when every stream has nothing left to do."""

    def __init__(self, streams: int, requests: int, max_tokens: int) -> None:
        self._next = 0
        self._requests = requests
        self._max_tokens = max_tokens
        self._left = streams
        self.noted: list[Noted] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self) -> tuple[int, bytes] | None:
        """The next request's number and bytes."""
        if self._next >= self._requests:
            return None
        number = self._next
        self._next += 1
        body = BODY % (number, self._max_tokens)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: scripted\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return number, head + body

    def ended(self) -> None:
        """One stream has ended."""
        self._left -= 1
        if self._left == 0 and not self.done.done():
            self.done.set_result(None)


class _Stream(asyncio.Protocol):
    """One connection: asks again as soon as an answer is whole."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._number = 0
        self._sent_ns = 0
        self._arrived: list[int] = []
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._ask()

    def data_received(self, data: bytes) -> None:
        now = perf_counter_ns()
        # A read holds one chunk, or several where this process was late, or the head alone.
        for _ in range(data.count(CHUNK_MARK)):
            self._arrived.append(now)
        if data.endswith(END):
            self._loop.noted.append(
                Noted(number=self._number, sent_ns=self._sent_ns, chunk_ns=tuple(self._arrived))
            )
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _ask(self) -> None:
        assert self._transport is not None
        request = self._loop.take()
        if request is None:
            self._end()
            self._transport.close()
            return
        self._arrived = []
        self._number, data = request
        self._sent_ns = perf_counter_ns()  # before: the server may have read it by the next line
        self._transport.write(data)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._loop.ended()


def run_bare(
    host: str, port: int, *, streams: int, requests: int, max_tokens: int, timeout_s: float
) -> BareRun:
    """Ask a scripted server `requests` requests over `streams` connections at once.

    Ends early after `timeout_s`, with the answers that are whole by then.
    """
    import uvloop

    begun, cpu = time.perf_counter(), time.process_time()
    noted = uvloop.run(_run(host, port, streams, requests, max_tokens, timeout_s))
    return BareRun(
        requests=noted,
        cpu_s=time.process_time() - cpu,
        wall_s=time.perf_counter() - begun,
    )


async def _run(
    host: str, port: int, streams: int, requests: int, max_tokens: int, timeout_s: float
) -> list[Noted]:
    running = asyncio.get_running_loop()
    loop = _Loop(streams, requests, max_tokens)
    made = [running.create_connection(lambda: _Stream(loop), host, port) for _ in range(streams)]
    opened = await asyncio.gather(*made, return_exceptions=True)
    for result in opened:
        if isinstance(result, BaseException):
            loop.ended()
    await asyncio.wait([loop.done], timeout=timeout_s)
    for result in opened:
        if not isinstance(result, BaseException):
            result[0].abort()
    return loop.noted
