"""A server that writes exactly what a script says, and notes when it wrote it."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
RESET = "reset"
CLOSE = "close"
Step = bytes | float | str
Script = Callable[[int, dict[str, Any]], Sequence[Step]]


def chunked(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


END = b"0\r\n\r\n"


def event(payload: Any, newline: str = "\n") -> bytes:
    """One server-sent event with a JSON body."""
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return f"data: {text}{newline}{newline}".encode()


def token(ids: list[int] | None, text: str, **more: Any) -> dict[str, Any]:
    """A chat chunk; `ids` None: a server that sends no token ids."""
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    if ids is not None:
        choice["token_ids"] = ids
    choice.update(more.pop("choice", {}))
    return {"choices": [choice], **more}


def stream(payloads: Sequence[Any], *, gap_s: float = 0.0, first_s: float = 0.0) -> list[Step]:
    """A whole good answer: the payloads, `[DONE]`, and the end of the body."""
    steps: list[Step] = [SSE_HEAD]
    for i, payload in enumerate(payloads):
        steps += [first_s if i == 0 else gap_s, chunked(event(payload))]
    return [*steps, chunked(event("[DONE]")), END]


def whole(status: str, body: str, kind: str = "application/json", more: str = "") -> bytes:
    """A length-delimited answer."""
    raw = body.encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(raw)}\r\n{more}\r\n"
    return head.encode() + raw


@dataclass
class Seen:
    """What the server saw and did."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    connections: int = 0
    received_ns: list[int] = field(default_factory=list)
    writes_ns: list[list[int]] = field(default_factory=list)


@asynccontextmanager
async def serve(
    script: Script, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, Seen]]:
    """Run the server in this event loop; yields its URL and what it sees."""
    seen = Seen()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        try:
            while await one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line for line in head.split("\r\n") if line.lower().startswith("content-length")]
        length = int(lengths[0].split(":")[1]) if lengths else 0
        body = json.loads(await reader.readexactly(length)) if length else {}
        seen.received_ns.append(time.perf_counter_ns())
        number = len(seen.bodies)
        seen.bodies.append(body)
        seen.headers.append(head)
        writes: list[int] = []
        seen.writes_ns.append(writes)
        for step in script(number, body):
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif step == RESET:
                writer.transport.abort()
                return False
            elif step == CLOSE:
                return False
            elif isinstance(step, bytes):
                writes.append(time.perf_counter_ns())
                writer.write(step)
                await writer.drain()
        return True

    server = await asyncio.start_server(connection, "127.0.0.1", 0, ssl=tls)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield f"{'https' if tls else 'http'}://{host}:{port}", seen
    finally:
        server.close()


@contextmanager
def in_thread(script: Script) -> Iterator[str]:
    """The server in a thread, for what has an event loop of its own; yields its URL."""
    urls: list[str] = []
    ready, done = threading.Event(), threading.Event()

    async def go() -> None:
        async with serve(script) as (url, _):
            urls.append(url)
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=asyncio.run, args=(go(),))
    thread.start()
    try:
        assert ready.wait(120)
        yield urls[0]
    finally:
        done.set()
        thread.join()
