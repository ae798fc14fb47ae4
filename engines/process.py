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
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from engines.activity import SAMPLE_S, Stall, StallWatch, sample
from engines.base import (
    Adapter,
    EngineFailed,
    EngineUsageError,
    PhaseTiming,
    ServeSpec,
)
from engines.ledger import PhaseLedger
from engines.oom import killed_since, oom_kills
from engines.phases import LogFollower, PhaseTracker, read_log, weights_size, with_weights
from engines.prefix import is_elsewhere, through
from engines.secret import HIDDEN, as_written, command_without_secrets, known_secrets
from engines.signatures import cause_of, relevant_lines
from engines.supervise import HIDE, MARKER, temp_name

SERVING = "serving"
POLL_S = 0.1
HEARTBEAT_S = 5.0
GRACE_S = 15.0
"""How long an engine may take to end by itself before it is killed."""
CARRIED_S = 10.0
"""How much longer, where another program carries the order to end to where the engine is."""
TAIL_LINES = 20
MAX_SHOWN = 300
"""Characters of a log line in a message."""
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # A crash of native code leaves Python's stack in the log.
    "PYTHONFAULTHANDLER": "1",
}
"""What every engine is started with, unless its adapter says otherwise."""

DEATH_SEEN_S = 3.0
"""How long after its requests failed an engine's death is looked for: what `death` is for."""
CLOSED_S = 60.0
"""The same, where nothing listens at its port any more: on a busy machine death is told late."""

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


def _absolute(spec: ServeSpec) -> ServeSpec:
    """`spec` with checkpoints that are found from any folder."""
    drafter, pair = (path and path.absolute() for path in (spec.drafter, spec.pair_drafter))
    return replace(spec, target=spec.target.absolute(), drafter=drafter, pair_drafter=pair)


class EngineProcess:
    """Starts what `adapter.launch(spec, workdir)` says and owns it until `stop()`.

    `on_phase(phase, elapsed_s)` is called when a phase begins and at least every five seconds
    while waiting, `elapsed_s` counted from the launch. The engine's output goes to `log_path`, with
    a mark in the place of secrets: `secrets`, and what `engines.secret.known_secrets` finds.
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
        secrets: Collection[str] = (),
    ) -> None:
        self.adapter = adapter
        # The engine is started in another folder than this process runs in.
        self.spec = _absolute(spec)
        self.workdir = workdir.absolute()
        self.log_path = log_path
        self.deadline_s = deadline_s
        self._secrets = secrets
        # Behind another program nothing would be seen of what the engine does.
        self._watch = StallWatch(0.0 if is_elsewhere(spec.command_prefix) else patience)
        self.argv: tuple[str, ...] = ()
        self.ready_s: float | None = None
        self._on_phase = on_phase or (lambda phase, elapsed_s: None)
        self._tracker = PhaseTracker(adapter.phases)
        self._ledger = PhaseLedger()
        self._sampled_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._marker = uuid.uuid4().hex
        self._started = 0.0
        self._last_beat = 0.0
        self._died_s: float | None = None
        self._code: int | None = None
        self._death: EngineFailed | None = None
        self._kills: dict[str, int] = {}
        self._kills_after: dict[str, int] | None = None

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
        sizes = weights_size(self.spec.target), weights_size(self.spec.drafter)
        timed = with_weights(self._tracker.timings(self.ready_s), *sizes)
        return tuple(replace(t, use=self._ledger.use(i)) for i, t in enumerate(timed))

    @property
    def wall_s(self) -> float | None:
        """How long the start took until readiness, or has taken until now or its end."""
        if self._process is None:
            return None
        return self.ready_s or self._died_s or self._elapsed()

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
        # For records alone: what is started keeps its keys.
        whole = (*self.spec.command_prefix, *launch.argv)
        self.argv = command_without_secrets(whole)
        known = known_secrets(whole, launch.env, self._secrets)
        hide = json.dumps({"mark": HIDDEN, "values": as_written(known)}).encode() if known else b""
        hiding = {HIDE: str(len(hide))} if hide else {}
        self._kills = oom_kills()
        supervisor = str(Path(__file__).with_name("supervise.py"))
        how, started = [f"{GRACE_S:g}"], launch.argv
        if self.spec.command_prefix:
            started = through(
                self.spec.command_prefix,
                launch,
                grace_s=GRACE_S,
                env={**ENVIRONMENT, MARKER: self._marker},
            )
            how = ["--outer", f"{GRACE_S + CARRIED_S:g}"]
        command = [sys.executable, "-I", "-S", supervisor, *how, *started]
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **ENVIRONMENT, **launch.env, MARKER: self._marker, **hiding},
                cwd=launch.cwd or self.workdir,
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # one that died says so by its exit code
            while hide:
                hide = hide[os.write(self._process.stdin.fileno(), hide) :]
        os.set_blocking(self._process.stdout.fileno(), False)
        self._started = time.monotonic()
        self._sample(self._tracker.index)
        self._beat(force=True)

    def wait_ready(self) -> tuple[PhaseTiming, ...]:
        """Wait until the engine serves; its phases, the last of them ended by readiness.

        Raises `EngineFailed` as soon as the engine dies, or when `deadline_s` has passed since
        the launch.
        """
        follower = LogFollower(self.log_path)
        while True:
            alive = self.alive()
            running = self._tracker.index
            for line in follower.new_lines():
                if self._tracker.feed(line, self._elapsed()):
                    self._beat(force=True)
            stall = self._sample(running, force=self._tracker.index != running)
            if not alive:
                raise self.failure()
            if self._answers():
                self.ready_s = self._elapsed()
                self._sample(self._tracker.index, force=True)
                return self.phases
            if self._elapsed() > self.deadline_s:
                raise self._failed(f"not ready after {self.deadline_s:g} s", kind="deadline")
            if stall is not None:
                raise self._stalled(stall)
            self._beat()
            time.sleep(POLL_S)

    def _sample(self, running: int, *, force: bool = False) -> Stall | None:
        """Look about once a second, and when a phase has ended: `running` is it, or goes on."""
        assert self.pid is not None
        now_s = self._elapsed()
        if not force and self._sampled_s and now_s - self._sampled_s < SAMPLE_S:
            return None
        self._sampled_s = now_s
        seen = sample(self.pid, self.log_path, now_s)
        self._ledger.feed(seen, running)
        return self._watch.feed(seen, self._tracker.current[0])

    def _stalled(self, stall: Stall) -> EngineFailed:
        """A stall is dissected while it still stands there."""
        from engines.stall import dissect

        assert self.pid is not None
        folder = self.log_path.parent / "stall"
        told = dissect(self.pid, stall, folder=folder, log_path=self.log_path, argv=self.argv)
        return self._failed(f"stalled: {told}; taken apart in {folder}", kind="stall")

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

    def death(self, within_s: float = 0.0) -> EngineFailed | None:
        """What the engine died of, None while it lives.

        `within_s`: how long to look. A client sees the reset connections a moment before the
        process is known to be dead.
        """
        begun = time.monotonic()
        while self.alive():
            waited_s = time.monotonic() - begun
            if waited_s >= within_s and not (within_s and waited_s < CLOSED_S and self._closed()):
                return None
            time.sleep(0.05)
        if self._death is None:
            self._death = self.failure()
        return self._death

    def failure(self) -> EngineFailed:
        """What the engine died of, from its exit code and its log."""
        self.alive()
        code = self._code
        if code is None:
            return self._failed("stopped answering")
        if code > 128:
            name = signal.Signals(code - 128).name if code - 128 in _SIGNALS else str(code - 128)
            hint = " (often: out of memory)" if name == "SIGKILL" and not self._starved() else ""
            return self._failed(f"was ended by {name}{hint}", signal_name=name)
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
        """Clear away what bears this engine's mark: only a supervisor killed itself leaves any."""
        needle = f"{MARKER}={self._marker}".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if needle in entry.read_bytes().split(b"\0"):
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        base = self.spec.extra_env.get("TMPDIR") or tempfile.gettempdir()
        shutil.rmtree(Path(base, temp_name(self._marker)), ignore_errors=True)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _beat(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._last_beat >= HEARTBEAT_S:
            self._last_beat = now
            self._on_phase(self._tracker.said, self._elapsed())

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(_reachable(self.spec), self.spec.port, timeout=2.0)
        try:
            connection.request("GET", self.adapter.ready_path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _closed(self) -> bool:
        """Whether its port refuses connections."""
        try:
            socket.create_connection((_reachable(self.spec), self.spec.port), timeout=1.0).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    def _starved(self) -> str | None:
        """What the kernel killed for want of memory since the launch, in words."""
        if self._died_s is not None and self._kills_after is None:
            self._kills_after = oom_kills()  # what is killed later was not it
        return killed_since(self._kills, self._kills_after or {})

    def _failed(
        self, what: str, *, signal_name: str | None = None, kind: str | None = None
    ) -> EngineFailed:
        if self.ready_s is None:
            phase, began = self._tracker.current
            now = self._died_s if self._died_s is not None else self._elapsed()
            where = f" in start-up phase {phase!r} ({now - began:.1f} s in it, {now:.1f} s in all)"
        else:
            phase, where = SERVING, " while serving"
        text = read_log(self.log_path)
        death = cause_of(
            text,
            self.adapter.failure_cause(text),
            signal_name=signal_name,
            starved=self._starved() if self._code else None,
        )
        tail = relevant_lines(text, death.cause, TAIL_LINES)
        shown = (death.cause or (tail[-1].strip() if tail else ""))[:MAX_SHOWN]
        said = f": {shown}" if shown else ", and its log is empty"
        advice = f"; {death.advice}" if death.advice and kind is None else ""
        return EngineFailed(
            f"{self.adapter.name} {what}{where}{said}{advice}; log: {self.log_path}",
            phase=phase,
            cause=death.cause,
            kind=kind or death.kind,
            log_path=self.log_path,
            tail=tail,
        )


_SIGNALS = frozenset(int(signum) for signum in signal.Signals)


def _reachable(spec: ServeSpec) -> str:
    """Where the server is reached from this machine."""
    if spec.reach is not None:
        return spec.reach
    return "127.0.0.1" if spec.host in ("0.0.0.0", "", "::") else spec.host
