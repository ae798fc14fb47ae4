"""Fixtures of the tests that drive the command line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attached import ENGINE, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start scripted servers; each call gives a URL. All are gone afterwards."""
    running: list[subprocess.Popen[bytes]] = []

    def go(*options: str) -> str:
        port_file = tmp_path / f"port-{len(running)}"
        running.append(subprocess.Popen([sys.executable, str(ENGINE), str(port_file), *options]))
        deadline = time.monotonic() + 300
        while not port_file.exists():
            assert time.monotonic() < deadline, "the scripted server does not start"
            time.sleep(0.02)
        return f"http://127.0.0.1:{port_file.read_text()}"

    yield go
    for process in running:
        process.kill()
        process.wait()
