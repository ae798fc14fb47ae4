"""The scripted server in a process of its own, started and stopped around a `with` block."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import msgspec

from harness.errors import EngineFailure, one_line
from harness.load.scripted.script import Script, ServerRecord

STOP_S = 10.0
READ_S = 60.0


class ScriptedServer:
    """A scripted server that runs: where it is, and what it has done."""

    def __init__(self, url: str, script: Script) -> None:
        self.url = url
        self.script = script
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or 0

    def get(self, path: str) -> bytes:
        """The body of a GET request, whatever proxies the environment names."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=READ_S)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            return connection.getresponse().read()
        finally:
            connection.close()

    def record(self) -> ServerRecord:
        """What it has served since it was started."""
        return msgspec.msgpack.decode(self.get("/record"), type=ServerRecord)


@contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    """Start a server for `script` on a free port. Raises `EngineFailure` where it cannot start.

    It ends with the block, and with this process however that ends: its standard input is ours.
    """
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "harness.load.scripted.server",
            "--stop-with-stdin",
            *options(script),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            _, said = process.communicate()
            raise EngineFailure(f"the scripted server did not start: {one_line(said[-300:])}")
        yield ScriptedServer(url, script)
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        if process.stderr is not None:
            process.stderr.close()


def options(script: Script) -> list[str]:
    """The command line of `harness.load.scripted.server` that says `script`."""
    words = [f"--first-ms={script.first_ms}", f"--gap-ms={script.gap_ms}"]
    words += [f"--chunks={script.chunks}", f"--tokens={','.join(map(str, script.tokens))}"]
    words += [f"--service-slots={script.service_slots}", f"--model={script.model}"]
    if script.draft_tokens is not None:
        words.append(f"--draft-tokens={script.draft_tokens}")
    return words
