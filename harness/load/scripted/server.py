"""A streaming server whose writes are timed: what a load generator is calibrated against.

    python -m harness.load.scripted.server [--port 0] [--first-ms 50] [--gap-ms 10] [--chunks 100] …

Speaks the OpenAI protocol of `/v1/completions` and `/v1/chat/completions`, and computes nothing:
every answer's bytes are made beforehand. Prints its URL as its first line. `GET /record` (or
`--record FILE`, at the end) gives a `script.ServerRecord` in MessagePack.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

import httptools
import msgspec

from harness.load.limits import raise_file_limit
from harness.load.scripted.schedule import Schedule, Stream
from harness.load.scripted.script import (
    HEAD,
    NUMBER,
    Answers,
    Script,
    ServerRecord,
    Wanted,
    metrics_text,
)

BACKLOG = 65_535
COMPLETIONS = {b"/v1/completions": False, b"/v1/chat/completions": True}


class Link(asyncio.Protocol):
    """One connection of a client; one request at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = b""
        self._body: list[bytes] = []
        self._read_ns = 0
        self._keep = True
        self._stream: Stream | None = None
        self.fd = -1
        self._behind = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.fd = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        self._read_ns = perf_counter_ns()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.reply("400 Bad Request", b'{"error":{"message":"not an HTTP request"}}')
            self._close()

    def eof_received(self) -> None:
        self._forget()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()

    # What httptools calls.

    def on_message_begin(self) -> None:
        self._path = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._keep = self._parser.should_keep_alive()
        self._server.request(self, self._parser.get_method(), self._path, b"".join(self._body))

    # What the server and the schedule call.

    def stream(self, number: int | None, writes: list[bytes], head: bytes) -> Stream | None:
        """Begin an answer that the schedule will write; None while another is under way."""
        if self._stream is not None or self.fd < 0:
            self._close()
            return None
        if head:
            self.write(head)
        self._stream = Stream(self, number, self._read_ns, writes)
        return self._stream

    def reply(self, status: str, body: bytes, kind: str = "application/json") -> None:
        """A whole answer at once."""
        self.write(response(status, body, kind))
        if not self._keep:
            self._close()

    def write(self, data: bytes) -> None:
        """To the socket, or behind what waits to be written to it."""
        written = 0
        if not self.behind():
            with suppress(OSError):
                written = os.write(self.fd, data)
        if written != len(data):
            self.write_later(data[written:])

    def behind(self) -> bool:
        """Whether bytes still wait that the socket did not take."""
        if self._behind and self._transport is not None:
            self._behind = self._transport.get_write_buffer_size() > 0
        return self._behind

    def write_later(self, data: bytes) -> None:
        """What the socket did not take; in order, before anything after it."""
        if self._transport is not None and self.fd >= 0:
            self._behind = True
            self._transport.write(data)

    def answered(self) -> None:
        """The last chunk has been written."""
        self._stream = None
        if not self._keep:
            self._close()

    def _close(self) -> None:
        self._forget()
        if self._transport is not None:
            self._transport.close()

    def _forget(self) -> None:
        # The number of a closed file soon names another connection.
        self.fd = -1
        if self._stream is not None:
            self._stream.fd = -1


class Server:
    """Routes requests; the streams are the schedule's."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._answers = Answers(script)
        self._decode = msgspec.json.Decoder(Wanted).decode
        self._schedule = Schedule(script)
        self._begun_cpu_s = time.process_time()

    def record(self) -> bytes:
        """The record so far, in MessagePack."""
        cpu_s = time.process_time() - self._begun_cpu_s
        record = ServerRecord(requests=self._schedule.served(), cpu_s=cpu_s)
        return msgspec.msgpack.encode(record)

    def request(self, link: Link, method: bytes, path: bytes, body: bytes) -> None:
        """Answer one request, now or on schedule."""
        path = path.partition(b"?")[0]
        chat = COMPLETIONS.get(path)
        if chat is not None and method == b"POST":
            self._complete(link, body, chat)
        elif path == b"/health":
            link.reply("200 OK", b"", "text/plain")
        elif path == b"/v1/models":
            link.reply("200 OK", self._models())
        elif path == b"/metrics":
            link.reply("200 OK", self._metrics().encode(), "text/plain; version=0.0.4")
        elif path == b"/record":
            link.reply("200 OK", self.record(), "application/msgpack")
        else:
            link.reply("404 Not Found", b'{"error":{"message":"no such path","code":404}}')

    def _complete(self, link: Link, body: bytes, chat: bool) -> None:
        try:
            wanted = self._decode(body)
        except msgspec.DecodeError as error:
            message = {"error": {"message": f"not a request: {error}", "code": 400}}
            link.reply("400 Bad Request", msgspec.json.encode(message))
            return
        if wanted.stream:
            writes, head = self._answers.stream(chat=chat, wanted=wanted), HEAD
        else:
            writes, head = [response("200 OK", self._answers.whole(chat=chat))], b""
        found = NUMBER.search(body)
        stream = link.stream(int(found.group(1)) if found else None, writes, head)
        if stream is not None:
            self._schedule.add(stream)

    def _models(self) -> bytes:
        card = {"id": self._script.model, "object": "model", "owned_by": "scripted"}
        return msgspec.json.encode(
            {"object": "list", "data": [card | {"max_model_len": 1_000_000}]}
        )

    def _metrics(self) -> str:
        schedule = self._schedule
        return metrics_text(
            self._script,
            schedule.written(),
            finished=schedule.finished,
            running=schedule.running,
        )


def response(status: str, body: bytes, kind: str = "application/json") -> bytes:
    """A length-delimited answer."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def serve(script: Script, host: str, port: int, *, stop_with_stdin: bool) -> bytes:
    """Serve until SIGTERM or SIGINT (or until standard input ends); returns the record."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(script)
    listening = await loop.create_server(lambda: Link(server), host, port, backlog=BACKLOG)
    port = listening.sockets[0].getsockname()[1]
    print(f"http://{host}:{port}", flush=True)

    def heard() -> None:
        if not os.read(0, 4096):  # whoever started it is gone, however it went
            stop.set()

    if stop_with_stdin:
        loop.add_reader(0, heard)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would be a pause of the server's making in the middle of a stream
    await stop.wait()
    listening.close()
    return server.record()


def arguments() -> argparse.Namespace:
    """The command line's."""
    known = Script()
    parser = argparse.ArgumentParser(
        prog="python -m harness.load.scripted.server", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--first-ms", type=float, default=known.first_ms)
    parser.add_argument("--gap-ms", type=float, default=known.gap_ms)
    parser.add_argument("--chunks", type=int, default=known.chunks)
    parser.add_argument("--tokens", default="1", help="tokens of each chunk in turn: 1,2,3")
    parser.add_argument("--draft-tokens", type=int, help="of each verify step, in /metrics")
    parser.add_argument("--service-slots", type=int, default=0, help="answers at once; 0: any")
    parser.add_argument("--model", default=known.model)
    parser.add_argument("--record", type=Path, help="write the record there at the end")
    parser.add_argument("--stop-with-stdin", action="store_true")
    given = parser.parse_args()
    try:
        given.tokens = tuple(int(word) for word in given.tokens.split(","))
    except ValueError:
        parser.error(f"--tokens {given.tokens}: whole numbers with commas, such as 1,2,3")
    if min(given.tokens) < 1 or given.chunks < 1 or min(given.first_ms, given.gap_ms) < 0:
        parser.error("--chunks and --tokens are at least 1, and no delay is negative")
    return given


def main() -> None:
    """Serve one script until told to stop."""
    import uvloop

    given = arguments()
    raise_file_limit()
    script = Script(
        first_ms=given.first_ms,
        gap_ms=given.gap_ms,
        chunks=given.chunks,
        tokens=given.tokens,
        service_slots=given.service_slots,
        draft_tokens=given.draft_tokens,
        model=given.model,
    )
    serving = serve(script, given.host, given.port, stop_with_stdin=given.stop_with_stdin)
    try:
        record = uvloop.run(serving)
    except OSError as error:
        sys.exit(f"{given.host}:{given.port}: {error.strerror or error}")
    if given.record is not None:
        given.record.write_bytes(record)


if __name__ == "__main__":
    main()
