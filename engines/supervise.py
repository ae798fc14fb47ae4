"""A small parent for one engine: no process of the engine outlives the harness. Linux.

    python -I -S supervise.py [--outer | --inner] GRACE_S COMMAND [ARGUMENT...]

The harness holds the write end of this process's standard input. When that pipe closes, however
the harness ended (return, Ctrl-C, kill -9), the engine and all its descendants are terminated
and reaped; the same happens when the engine itself ends. Descendants are found through the
process tree: as a child subreaper this process inherits every orphan of the engine, also those
that went into a session of their own.

The engine's output goes to standard error, which is the log; with `HIDE` in the environment it
comes by way of this process, which puts a mark in the place of secrets before they reach the disk.
On standard output the engine's exit code (128 plus the signal that ended it) is written the moment
it is known, before what the engine left behind is cleared away.

Where the command is a program that starts the engine elsewhere (`engines.prefix`), this process
runs twice. The outer one keeps the program's standard input open, and its closing is how the
program's far end, the inner one, is asked to end; it is killed only after the grace. The inner one
tells no exit code, as its standard output is the log.

The engine gets a temporary folder of its own, which goes with it: engines leave sockets and files
there by the hundred, and one that is killed removes none.

Standard library only, and run as a script without site packages, so that it starts in
milliseconds and nothing of the harness's environment can break it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

HIDE = "SPEC_HARNESS_HIDE"
"""The variable with the number of bytes of `{"mark": …, "values": […]}` as JSON, which come on
standard input first: a variable holds no more than 128 KiB. The engine does not get it."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK_S = 1.0
"""How often the parent's id is checked, in case a forked sibling still holds the pipe open."""
OUTER, INNER = "--outer", "--inner"
KILL_WAIT_S = 10.0
"""How long a killed process may take to go; one stuck in the kernel is reported, not awaited."""

READ_BYTES, MOST_READS = 1 << 16, 16
"""Of the engine's output at once: more than a pipe holds, and never without end."""
BOUNDED_BELOW = 8
"""Bytes of a value that is hidden even within a word; a shorter one only where it stands alone."""
MARKER = "SPEC_HARNESS_ENGINE_PROCESS"
"""Environment variable with a unique value in every process of one engine."""
LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path."""
SOCKET_NAME = 37
"""Bytes that an engine adds to its temporary folder for a socket: a slash and a UUID."""
CUT_SHOWN = 4
"""Fewer bytes of a secret than this are shown where the output ends within it."""


class Redactor:
    """Puts `mark` in the place of each of `values` in a stream, wherever the stream is cut."""

    def __init__(self, values: Sequence[bytes], mark: bytes) -> None:
        import re  # a start without secrets does not need it

        self.mark = mark
        self.values = sorted(values, key=len, reverse=True)
        word = rb"[0-9A-Za-z_]"
        self._pattern = re.compile(
            b"|".join(
                re.escape(v)
                if len(v) >= BOUNDED_BELOW
                else b"(?<!%s)%s(?!%s)" % (word, re.escape(v), word)
                for v in self.values
            )
        )
        self._rest = b""
        self._seen = 0  # bytes of the rest that have been given out: what stands before the next

    def feed(self, data: bytes) -> bytes:
        """What may be shown by now; what may be the beginning of a secret waits for its end."""
        text = self._rest + data
        shown, end = self._shown(text, len(text) - self._held(text[self._seen :]))
        self._seen = min(end, 1)
        self._rest = text[end - self._seen :]
        return shown

    def end(self) -> bytes:
        """What still waited, as the output has ended. A secret that was cut off is not shown."""
        text, held = self._rest, self._held(self._rest[self._seen :])
        cut = len(text) - held if held >= CUT_SHOWN else len(text)
        shown, end = self._shown(text, cut)
        self._rest, self._seen = b"", 0
        return shown + self.mark if end < len(text) else shown

    def _shown(self, text: bytes, cut: int) -> tuple[bytes, int]:
        """`text` as far as `cut`, or as the secret that begins before it; and where that is."""
        shown, at = b"", self._seen
        for found in self._pattern.finditer(text, self._seen):
            if found.start() >= cut:
                break
            shown += text[at : found.start()] + self.mark
            at = found.end()
        end = max(cut, at)
        return shown + text[at:end], end

    def _held(self, text: bytes) -> int:
        """The length of the longest end of `text` that may become a secret."""
        longest = 0
        for value in self.values:
            # A short value is known only by what comes after it.
            most = len(value) - (len(value) >= BOUNDED_BELOW)
            at = text.find(value[:1], max(0, len(text) - most))
            while 0 <= at < len(text) - longest:
                if value.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(value[:1], at + 1)
        return longest


def _redactor() -> Redactor | None:
    """What the harness asks to hide; the variable is taken out of the environment."""
    size = int(os.environ.pop(HIDE, "0"))
    if not size:
        return None
    import json

    told = b""
    while len(told) < size:
        data = os.read(0, size - len(told))
        if not data:
            sys.exit(1)  # the harness is gone already
        told += data
    asked = json.loads(told)
    return Redactor([os.fsencode(v) for v in asked["values"]], asked["mark"].encode())


def temp_name(mark: str) -> str:
    """The name of the temporary folder of the engine with that mark; short, for sockets in it."""
    return f"spec-{mark[:12]}"


def own_temp() -> dict[str, str]:
    """The variables of a new temporary folder, which is the last of them; none where one cannot be.

    What engines keep there from start to start stays where it was.
    """
    import getpass
    import tempfile
    import uuid

    try:
        base = tempfile.gettempdir()
        user = "".join("_" if c in '\\/:*?"<>|' else c for c in getpass.getuser())  # as torch does
        folder = os.path.join(base, temp_name(os.environ.get(MARKER) or uuid.uuid4().hex))
        os.mkdir(folder, 0o700)
    except (OSError, KeyError):  # nowhere to write; a user without a name
        return {}
    if len(os.fsencode(folder)) + SOCKET_NAME > LONGEST_SOCKET:
        os.rmdir(folder)
        return {}
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{base}/torchinductor_{user}"
    return {"TORCHINDUCTOR_CACHE_DIR": cache, "TMPDIR": folder}


def _prctl(option: int, value: int) -> None:
    """Call prctl where the system has it; elsewhere the guarantee is weaker, not absent."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """For a child before it becomes its program: it is killed once the thread that made it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def parents() -> dict[int, int]:
    """Every live process's parent, zombies left out: pid -> parent's pid."""
    found = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The command name in parentheses may hold spaces and parentheses itself.
                state, ppid = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state not in (b"Z", b"X"):
            found[int(entry)] = int(ppid)
    return found


def descendants(root: int) -> list[int]:
    """The live processes below `root`, at any depth."""
    children: dict[int, list[int]] = {}
    for pid, ppid in parents().items():
        children.setdefault(ppid, []).append(pid)
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def send(pids: list[int], signum: int) -> None:
    """Signal each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


class Supervisor:
    """Runs one command; `run` returns the exit code to leave with."""

    def __init__(self, command: list[str], grace_s: float, role: str = "") -> None:
        self.command = command
        self.grace_s = grace_s
        self.role = role
        self.process: subprocess.Popen[bytes] | None = None
        self.parent = os.getppid()
        self.child = 0
        self.child_status: int | None = None
        self.stop_asked = False
        self.redactor = _redactor()
        self.temp: dict[str, str] = {}
        self.said: int | None = None  # the end of the pipe that the engine writes into

    def run(self) -> int:
        try:
            return self._run()
        finally:
            if self.temp:
                import shutil

                shutil.rmtree(self.temp["TMPDIR"], ignore_errors=True)

    def _run(self) -> int:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        wakeup = self._catch_signals()
        try:
            self.child = self._spawn()
        except OSError as error:
            print(f"cannot start {self.command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            return 127
        self._watch(wakeup)
        if self.child_status is not None:
            self._drain()  # who hears of the end looks for the last words
            self._report()
        self._end_all()
        self._drain()
        return self._code()

    def _code(self) -> int:
        if self.child_status is None:
            return 128 + signal.SIGKILL
        code = os.waitstatus_to_exitcode(self.child_status)
        return 128 - code if code < 0 else code

    def _report(self) -> None:
        if self.role == INNER:
            return
        with contextlib.suppress(OSError):  # nobody listens once the harness is gone
            os.write(1, f"{self._code()}\n".encode())

    def _catch_signals(self) -> int:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._ask_stop)
        return read_end

    def _ask_stop(self, *_: object) -> None:
        self.stop_asked = True

    def _spawn(self) -> int:
        log = 2
        if self.redactor is not None:
            self.said, log = os.pipe()
            os.set_blocking(self.said, False)
        if self.role != OUTER:
            self.temp = own_temp()
        # A group of its own: a Ctrl-C in the terminal must not reach the engine before its turn.
        # The parent-death signal covers the one case left, this process being killed itself.
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.temp},
            stdin=subprocess.PIPE if self.role == OUTER else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        if log != 2:
            os.close(log)
        return self.process.pid

    def _pump(self) -> None:
        """What the engine has said meanwhile, into the log."""
        for _ in range(MOST_READS):
            if self.redactor is None or self.said is None:
                return
            try:
                data = os.read(self.said, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                os.close(self.said)
                self.said = None
            _log(self.redactor.feed(data))

    def _drain(self) -> None:
        """`_pump`, and what was held back."""
        self._pump()
        if self.redactor is not None:
            _log(self.redactor.end())

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.child_status = status

    def _watch(self, wakeup: int) -> None:
        """Return when the engine has ended, or the harness is gone, or a stop was asked for."""
        while True:
            heard = [0, wakeup] if self.said is None else [0, wakeup, self.said]
            ready, _, _ = select.select(heard, [], [], TICK_S)
            if wakeup in ready:
                os.read(wakeup, 4096)
            self._pump()
            self._reap()
            harness_gone = (0 in ready and not os.read(0, 4096)) or os.getppid() != self.parent
            if self.child_status is not None or self.stop_asked or harness_gone:
                return

    def _ask_to_end(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()  # the program ends by itself when its far end has ended
        else:
            send([self.child], signal.SIGTERM)

    def _end_all(self) -> None:
        """Ask the engine to end, then whatever it left behind; after the grace, kill."""
        start = time.monotonic()
        if self.child_status is None:
            self._ask_to_end()
        rest_asked = False
        killed: float | None = None
        while True:
            self._pump()
            self._reap()
            left = descendants(os.getpid())
            now = time.monotonic()
            if not left and self.child_status is not None:
                return
            if killed is not None and now - killed > KILL_WAIT_S:
                print(f"processes that could not be killed: {left}", file=sys.stderr, flush=True)
                return
            if now - start > self.grace_s:
                if killed is None:
                    print(f"still there after {self.grace_s:g} s: killed", file=sys.stderr)
                    killed = now
                send(left, signal.SIGKILL)
            elif self.child_status is not None and not rest_asked:
                rest_asked = True
                send(left, signal.SIGTERM)
            time.sleep(0.02)


def _log(data: bytes) -> None:
    """Write all of it; a log that cannot be written must not end the engine."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


if __name__ == "__main__":
    _role = sys.argv.pop(1) if sys.argv[1] in (OUTER, INNER) else ""
    sys.exit(Supervisor(sys.argv[2:], float(sys.argv[1]), _role).run())
