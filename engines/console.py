"""Runs one step of an install: its output to the log, its progress, condensed, to stderr."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from engines.base import EngineFailed
from engines.recipes import Step

PLAIN_EVERY_S = 8.0
"""On a stream that is no terminal; a line comes at least this often."""
_ACTIVITY = re.compile(
    r"^\s*(?:(?:Collecting|Downloading|Processing|Building wheels?|Preparing|Uninstalling) .*"
    r"|Installing (?:collected packages|build dependencies).*|Requirement already satisfied: \S+)"
)


def run_step(
    environment: str, step: Step, command: list[str], env: dict[str, str], log: Path
) -> None:
    """Run `command` to its end; raises `EngineFailed` naming the step, the cause and the log."""
    lines: list[str] = []
    with open(log, "a", encoding="utf-8") as file:
        print(f"\n=== {environment}: {step.title}\n$ {command}", file=file, flush=True)
        process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
        progress = _Progress()
        try:
            for line in _lines(process):
                if line is not None:
                    file.write(line)
                    file.flush()
                    lines.append(line.rstrip())
                progress.show(line)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            progress.end()
    if code != 0:
        cause = _cause(lines) or f"exit code {code}"
        raise EngineFailed(
            f"{environment}: the step '{step.title}' failed: {cause}; log: {log}",
            phase=step.title,
            cause=cause,
            log_path=log,
            tail=tuple(lines[-20:]),
        )


def _lines(process: subprocess.Popen[str]) -> Iterator[str | None]:
    """The process's output lines as they come, and None each second in which none came."""
    arrived: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    stream = process.stdout

    def read() -> None:
        for line in stream:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = arrived.get(timeout=1.0)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


class _Progress:
    """The latest activity and the time: one line kept up to date, or a line now and then."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._activity = "working"
        self._terminal = sys.stderr.isatty()

    def show(self, line: str | None) -> None:
        if line is not None and (found := _ACTIVITY.match(line)):
            self._activity = " ".join(found.group(0).split())[:70]
        now = time.monotonic()
        if now - self._last < (0.5 if self._terminal else PLAIN_EVERY_S):
            return
        self._last = now
        text = f"  {now - self._start:4.0f} s  {self._activity}"
        print(
            f"\r\x1b[K{text}" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def end(self) -> None:
        elapsed = time.monotonic() - self._start
        start = "\r\x1b[K" if self._terminal else ""
        print(f"{start}  {elapsed:4.0f} s  ended", file=sys.stderr, flush=True)


def _cause(lines: list[str]) -> str | None:
    """pip's last error, or the last line of a traceback."""
    errors = [line for line in lines if line.startswith("ERROR: ")]
    if errors:
        told = errors[-1].removeprefix("ERROR: ")
        if "No matching distribution" in told and "+cpu" in told:
            told += " (add an index with PyTorch's CPU builds to your pip configuration)"
        return told
    shown = [line for line in lines if line.strip()]
    return shown[-1].strip() if shown else None
