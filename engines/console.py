"""Runs one step of an install or a build: its output to the log, its progress to stderr.

The command runs under the supervisor of the engines: nothing of it outlives this process.
"""

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
GRACE_S = 5.0
_COMPILER = re.compile(r"(?:: (?:fatal )?error[:\s]|CMake Error|^nvcc fatal|Killed signal)")
_UNITS = re.compile(r"^\s*(?:\x1b\[[\d;]*m)*\[(\d+)/(\d+)\] ")
"""What ninja says before each unit that it has compiled."""
SUPERVISOR = str(Path(__file__).with_name("supervise.py"))
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
            [sys.executable, "-I", "-S", SUPERVISOR, str(GRACE_S), *command],
            env=env,
            stdin=subprocess.PIPE,  # its end is the supervisor's sign to end the command
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
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
            _end(process)
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


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=GRACE_S + 15.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _lines(process: subprocess.Popen[str]) -> Iterator[str | None]:
    """The process's output lines as they come, and None each second in which none came."""
    arrived: queue.Queue[str | None] = queue.Queue()
    assert process.stderr is not None
    stream = process.stderr

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
        self._units = Units()

    def show(self, line: str | None) -> None:
        if line is not None and (found := _ACTIVITY.match(line)):
            self._activity = " ".join(found.group(0).split())[:70]
        if line is not None and (told := self._units.feed(line, time.monotonic())):
            self._activity = told
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


class Units:
    """How far a compilation is, by ninja's own count, and how long the rest will take."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def feed(self, line: str, now_s: float) -> str | None:
        """What to show once a line tells the count; None where it does not.

        The time left is that of the units so far: a unit that was there already costs nothing, and
        ninja does not count it.
        """
        found = _UNITS.match(line)
        if found is None:
            return None
        done, of = int(found[1]), int(found[2])
        if self._first is None or done < self._first[0]:
            self._first = (done, now_s)
        begun, since = self._first
        told = f"{done} of {of} units compiled"
        if done > begun and now_s > since:
            left = (of - done) * (now_s - since) / (done - begun)
            told += f", about {_duration(left)} left"
        return told


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _cause(lines: list[str]) -> str | None:
    """The compiler's first error, pip's last one, or the last line of a traceback."""
    compiler = [line.strip() for line in lines if _COMPILER.search(line)]
    if compiler:
        return compiler[0]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    if errors:
        told = errors[-1].removeprefix("ERROR: ")
        if "No matching distribution" in told and "+cpu" in told:
            told += " (add an index with PyTorch's CPU builds to your pip configuration)"
        return told
    shown = [line for line in lines if line.strip()]
    return shown[-1].strip() if shown else None
