"""One engine as a process: started under a supervisor, followed by its log, ended for certain.

with EngineProcess(adapter, spec, workdir=…, log_path=…, deadline_s=600) as engine:
    engine.start()
    phases = engine.wait_ready()
    …  # serve at engine.base_url
    if not engine.alive():
        raise engine.failure()
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from engines.activity import StallWatch
from engines.base import (
    Adapter,
    EngineFailed,
    EngineUsageError,
    PhaseMark,
    PhaseTiming,
    ServeSpec,
)
from engines.prefix import is_elsewhere, through

FIRST_PHASE = "launch"
SERVING = "serving"
POLL_S = 0.1
HEARTBEAT_S = 5.0
GRACE_S = 15.0
"""How long an engine may take to end by itself before it is killed."""
CARRIED_S = 10.0
"""How much longer, where another program carries the order to end to where the engine is."""
TAIL_LINES = 20
MAX_LOG_BYTES = 4_000_000
MAX_LINE_BYTES = 1_000_000
MAX_SHOWN = 300
"""Characters of a log line in a message."""
MARKER = "SPEC_HARNESS_ENGINE_PROCESS"
"""Environment variable with a unique value in every process of one engine."""

_given_ports: set[int] = set()


def free_port() -> int:
    """A loopback TCP port that nothing listens on, never the same one twice in this process."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given_ports:
            _given_ports.add(port)
            return port


def check_port(host: str, port: int) -> None:
    """Raise `EngineUsageError` where `port` cannot be listened on."""
    if not 0 < port < 65536:
        raise EngineUsageError(f"port {port} is not a port: give one from 1 to 65535")
    with socket.socket() as probe:
        # As servers do: ports in TIME_WAIT are free, ports with a listener are not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EngineUsageError(
                    f"port {port} on {host} is in use: stop what listens there or choose another"
                ) from None
            raise EngineUsageError(
                f"port {port} on {host} cannot be used: {error.strerror}"
            ) from None


class PhaseTracker:
    """Start-up phases from log lines, each stretch of a phase kept apart.

    A line that matches a mark ends the current phase and begins the marked one, unless that is
    the current one already. A phase that comes back later (weights again, for the drafter) is a
    new stretch. Times are seconds since the launch.
    """

    def __init__(self, marks: tuple[PhaseMark, ...]) -> None:
        self._marks = [(mark.phase, re.compile(mark.pattern)) for mark in marks]
        self._begun: list[tuple[str, float]] = [(FIRST_PHASE, 0.0)]

    @property
    def current(self) -> tuple[str, float]:
        """The current phase and when it began."""
        return self._begun[-1]

    def feed(self, line: str, now_s: float) -> bool:
        """Take one log line; True if a phase began with it."""
        for phase, pattern in self._marks:
            if pattern.search(line):
                if phase == self.current[0]:
                    return False
                self._begun.append((phase, now_s))
                return True
        return False

    def timings(self, end_s: float | None) -> tuple[PhaseTiming, ...]:
        """All phases so far; the last ends at `end_s`."""
        ends = [start for _, start in self._begun[1:]] + [end_s]
        return tuple(
            PhaseTiming(phase=phase, start_s=start, end_s=end)
            for (phase, start), end in zip(self._begun, ends, strict=True)
        )


class LogFollower:
    """Complete new lines of a growing file, read once each. A carriage return ends a line too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # cut by someone: from its beginning again
                file.seek(self._offset)
                data = file.read(MAX_LOG_BYTES)
        except OSError:
            return []  # taken away by someone: the engine goes on without
        self._offset += len(data)
        *lines, rest = re.split(rb"[\r\n]", self._rest + data)
        self._rest = rest[-MAX_LINE_BYTES:]
        return [line.decode("utf-8", "replace") for line in lines if line.strip()]


class EngineProcess:
    """Starts what `adapter.launch(spec, workdir)` says and owns it until `stop()`.

    `on_phase(phase, elapsed_s)` is called when a phase begins and at least every five seconds
    while waiting, `elapsed_s` counted from the launch. The engine's output goes to `log_path`.
    A start in which nothing happens any more is dissected and ended; `patience` multiplies how
    long that may last (`engines.activity`), 0 waits for the deadline alone.
    """

    def __init__(
        self,
        adapter: Adapter,
        spec: ServeSpec,
        *,
        workdir: Path,
        log_path: Path,
        deadline_s: float,
        patience: float = 1.0,
        on_phase: Callable[[str, float], None] | None = None,
    ) -> None:
        self.adapter = adapter
        self.spec = spec
        self.workdir = workdir
        self.log_path = log_path
        self.deadline_s = deadline_s
        # Behind another program nothing would be seen of what the engine does.
        self._watch = StallWatch(0.0 if is_elsewhere(spec.command_prefix) else patience)
        self.argv: tuple[str, ...] = ()
        self.ready_s: float | None = None
        self._on_phase = on_phase or (lambda phase, elapsed_s: None)
        self._tracker = PhaseTracker(adapter.phases)
        self._process: subprocess.Popen[bytes] | None = None
        self._marker = uuid.uuid4().hex
        self._started = 0.0
        self._last_beat = 0.0
        self._died_s: float | None = None
        self._code: int | None = None

    @property
    def base_url(self) -> str:
        """The server's root, without a trailing slash and without `/v1`."""
        return f"http://{_reachable(self.spec)}:{self.spec.port}"

    @property
    def pid(self) -> int | None:
        """The supervisor's process id; the engine's processes are its descendants."""
        return self._process.pid if self._process else None

    @property
    def phases(self) -> tuple[PhaseTiming, ...]:
        """The start-up phases seen so far; of a start that failed, the last has no end."""
        return self._tracker.timings(self.ready_s)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Launch the engine; raises `EngineUsageError` where it cannot be (port in use, …)."""
        if self._process is not None:
            raise RuntimeError("an EngineProcess starts once")
        if self.spec.reach is None:
            check_port(self.spec.host, self.spec.port)
        self.adapter.check(self.spec)
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        launch = self.adapter.launch(self.spec, self.workdir)
        self.argv = launch.argv
        supervisor = str(Path(__file__).with_name("supervise.py"))
        how, started = [f"{GRACE_S:g}"], launch.argv
        if self.spec.command_prefix:
            self.argv = (*self.spec.command_prefix, *launch.argv)
            started = through(
                self.spec.command_prefix,
                launch,
                grace_s=GRACE_S,
                env={"PYTHONUNBUFFERED": "1", MARKER: self._marker},
            )
            how = ["--outer", f"{GRACE_S + CARRIED_S:g}"]
        command = [sys.executable, "-I", "-S", supervisor, *how, *started]
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **launch.env, MARKER: self._marker},
                cwd=launch.cwd or self.workdir,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._started = time.monotonic()
        self._beat(force=True)

    def wait_ready(self) -> tuple[PhaseTiming, ...]:
        """Wait until the engine serves; its phases, the last of them ended by readiness.

        Raises `EngineFailed` as soon as the engine dies, or when `deadline_s` has passed since
        the launch.
        """
        follower = LogFollower(self.log_path)
        while True:
            alive = self.alive()
            for line in follower.new_lines():
                if self._tracker.feed(line, self._elapsed()):
                    self._beat(force=True)
            if not alive:
                raise self.failure()
            if self._answers():
                self.ready_s = self._elapsed()
                return self.phases
            if self._elapsed() > self.deadline_s:
                raise self._failed(f"not ready after {self.deadline_s:g} s")
            self._raise_if_stalled()
            self._beat()
            time.sleep(POLL_S)

    def _raise_if_stalled(self) -> None:
        """Look about once a second; a stall is dissected while it still stands there."""
        assert self.pid is not None
        stall = self._watch.look(self.pid, self.log_path, self._elapsed(), self._tracker.current[0])
        if stall is None:
            return
        from engines.stall import dissect

        folder = self.log_path.parent / "stall"
        told = dissect(self.pid, stall, folder=folder, log_path=self.log_path, argv=self.argv)
        raise self._failed(f"stalled: {told}; taken apart in {folder}")

    def alive(self) -> bool:
        """Whether the engine's main process runs."""
        if self._process is None or self._process.stdout is None or self._code is not None:
            return False
        with contextlib.suppress(BlockingIOError, ValueError):  # nothing said yet; stopped
            said = os.read(self._process.stdout.fileno(), 64)
            self._code = int(said) if said else self._supervisor_code()
        if self._code is None and self._process.poll() is not None:
            self._code = self._supervisor_code()
        if self._code is not None:
            self._died_s = self._elapsed()
        return self._code is None

    def failure(self) -> EngineFailed:
        """What the engine died of, from its exit code and its log."""
        self.alive()
        code = self._code
        if code is None:
            return self._failed("stopped answering")
        if code > 128:
            name = signal.Signals(code - 128).name if code - 128 in _SIGNALS else str(code - 128)
            hint = " (often: out of memory)" if name == "SIGKILL" else ""
            return self._failed(f"was ended by {name}{hint}")
        return self._failed(f"exited with code {code}")

    def stop(self) -> None:
        """End the engine and everything it started. May be called any number of times."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()  # the supervisor's sign to end the engine
        try:
            process.wait(timeout=GRACE_S + CARRIED_S + 15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._sweep()
        self.alive()  # takes note of the exit code before the pipe goes
        if process.stdout is not None:
            process.stdout.close()

    def _supervisor_code(self) -> int:
        """The code of a supervisor that has left: the engine's, unless it was killed itself."""
        assert self._process is not None
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _sweep(self) -> None:
        """Kill what bears this engine's mark: only a supervisor killed itself leaves any."""
        needle = f"{MARKER}={self._marker}".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if needle in entry.read_bytes().split(b"\0"):
                    os.kill(int(entry.parent.name), signal.SIGKILL)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _beat(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._last_beat >= HEARTBEAT_S:
            self._last_beat = now
            self._on_phase(self._tracker.current[0], self._elapsed())

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(_reachable(self.spec), self.spec.port, timeout=2.0)
        try:
            connection.request("GET", self.adapter.ready_path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _failed(self, what: str) -> EngineFailed:
        if self.ready_s is None:
            phase, began = self._tracker.current
            now = self._died_s if self._died_s is not None else self._elapsed()
            where = f" in start-up phase {phase!r} ({now - began:.1f} s in it, {now:.1f} s in all)"
        else:
            phase, where = SERVING, " while serving"
        text = read_log(self.log_path)
        cause = self.adapter.failure_cause(text)
        tail = tuple(line for line in re.split(r"[\r\n]+", text) if line.strip())[-TAIL_LINES:]
        tail = tuple(line[:2000] for line in tail)
        shown = (cause or (tail[-1].strip() if tail else ""))[:MAX_SHOWN]
        said = f": {shown}" if shown else ", and its log is empty"
        return EngineFailed(
            f"{self.adapter.name} {what}{where}{said}; log: {self.log_path}",
            phase=phase,
            cause=cause,
            log_path=self.log_path,
            tail=tail,
        )


_SIGNALS = frozenset(int(signum) for signum in signal.Signals)


def _reachable(spec: ServeSpec) -> str:
    """Where the server is reached from this machine."""
    if spec.reach is not None:
        return spec.reach
    return "127.0.0.1" if spec.host in ("0.0.0.0", "", "::") else spec.host


def read_log(path: Path) -> str:
    """The log's text; of a very long one the first and the last two megabytes."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    if len(data) > MAX_LOG_BYTES:
        half = MAX_LOG_BYTES // 2
        data = data[:half] + b"\n[...]\n" + data[-half:]
    return data.decode("utf-8", "replace")
