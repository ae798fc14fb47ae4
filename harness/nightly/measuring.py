"""One entry's run as a process of its own: started, watched, ended, found again after a kill.

A run that takes its process down takes nothing else with it. The process stands under the
supervisor of the engines: however this one ends, by kill -9 too, none of it goes on by itself.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engines.console import SUPERVISOR
from harness.errors import UsageError, one_line
from harness.history.points import points_of
from harness.history.reading import LABELS, read_labels
from harness.history.records import Labels, Point
from harness.measure.store import SUMMARY, RunFolder, to_json, write_atomic
from harness.nightly.records import Attempt
from harness.nightly.series import blocks_of

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 90.0
"""How long a run that is asked to end may take to sum up what it has."""
WRITING = "writing to "
"""What a run says before the path of its folder."""
COMPLAINT = "harness: "
CUT_SHORT = "ended by the time budget"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How the harness is called: from which checkout, and in which environment.

    `hold`: a file that the run's supervisor keeps open until all of the run has ended.
    """

    python: str = sys.executable
    root: Path = ROOT
    environment: Mapping[str, str] = {}
    hold: int | None = None

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Under the supervisor. Its standard input is what keeps the run alive."""
        own = [self.python, "-m", "harness", *arguments]
        return [sys.executable, "-I", "-S", SUPERVISOR, str(GRACE_S), *own]

    def variables(self) -> dict[str, str]:
        """The child's environment: the checkout's own modules come first."""
        before = os.environ.get("PYTHONPATH")
        path = str(self.root) if not before else f"{self.root}{os.pathsep}{before}"
        return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **self.environment}


Say = Callable[[str], None]


def measure(
    arguments: Sequence[str],
    attempt: Attempt,
    *,
    out: Path,
    log: Path,
    say: Say,
    launch: Launch,
    limit_s: float | None = None,
) -> Attempt:
    """Run `python -m harness` with `arguments`, to its end or for `limit_s`; never raises for it.

    Interrupted, it asks the run to end, waits for it, and raises what interrupted it: the run's
    folder is kept, and `found` finds it again.
    """
    begun = time.monotonic()
    code, lines, cut = _watched(arguments, launch, log, say, limit_s)
    complaints = [line for line in lines if line.startswith(COMPLAINT)]
    error = complaints[-1].removeprefix(COMPLAINT) if complaints else None
    if code and error is None and lines:
        error = lines[-1]
    if cut:
        error = CUT_SHORT
    return msgspec.structs.replace(
        attempt,
        run=_told(lines, out) or found(out, attempt),
        exit_code=code,
        seconds=attempt.seconds + time.monotonic() - begun,
        error=None if code == 0 else one_line(error or f"exit code {code}", 400),
    )


def _told(lines: Sequence[str], out: Path) -> str | None:
    """The folder that a run itself said it writes to, below `out`."""
    for line in reversed(lines):
        place = Path(line.rpartition(WRITING)[2].strip())
        if place.parent == out and place.is_dir():
            return place.name
    return None


def _watched(
    arguments: Sequence[str], launch: Launch, log: Path, say: Say, limit_s: float | None
) -> tuple[int, list[str], bool]:
    """The exit code, the last lines, and whether the limit ended it."""
    lines: list[str] = []
    deadline = None if limit_s is None else time.monotonic() + limit_s
    cut = False
    with open(log, "a", encoding="utf-8") as file:
        process = subprocess.Popen(
            launch.command(arguments),
            cwd=launch.root if launch.root != ROOT else None,
            env=launch.variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C is handed on, once
            pass_fds=() if launch.hold is None else (launch.hold,),
        )
        arrived = _reading(process)
        try:
            while True:
                line = _next(arrived)
                if line == "":
                    break
                if line is not None:
                    file.write(line)
                    file.flush()
                    lines = [*_kept(lines), line.rstrip()]
                    if line.startswith("["):  # the run's own progress
                        say(line.rstrip())
                if not cut and deadline is not None and time.monotonic() > deadline:
                    cut = True
                    _ask_to_end(process)
            code = process.wait()
        finally:
            _ask_to_end(process)
            _wait(process)
    return code, lines, cut


def _kept(lines: list[str]) -> list[str]:
    """The last lines, and the one that names the run's folder."""
    return [line for line in lines[:-40] if WRITING in line] + lines[-40:]


def _reading(process: subprocess.Popen[str]) -> queue.Queue[str]:
    """The process's lines as they come, then an empty text."""
    arrived: queue.Queue[str] = queue.Queue()
    stream = process.stderr
    assert stream is not None

    def read() -> None:
        for line in stream:
            arrived.put(line or "\n")
        arrived.put("")

    threading.Thread(target=read, daemon=True).start()
    return arrived


def _next(arrived: queue.Queue[str]) -> str | None:
    try:
        return arrived.get(timeout=0.5)
    except queue.Empty:
        return None


def _ask_to_end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    if not process.stdin.closed:
        process.stdin.close()


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(timeout=GRACE_S + 20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def begin(arguments: Sequence[str]) -> Attempt:
    """An attempt that starts now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Attempt(begun=now, arguments=tuple(arguments))


def found(out: Path, attempt: Attempt) -> str | None:
    """The folder that an attempt's run made below `out`, by the command its manifest holds.

    So a run is found that was killed before it could say where it was writing.
    """
    stamp = f"{datetime.fromisoformat(attempt.begun):%Y%m%d-%H%M%S}"
    if not out.is_dir():
        return None
    names = sorted((p.name for p in out.iterdir() if p.name >= stamp and p.is_dir()), reverse=True)
    for name in names:
        try:
            manifest = RunFolder(out / name).manifest()
        except UsageError:
            continue
        if manifest.command[3:] == attempt.arguments:
            return name
    return None


def complete(run: Path) -> bool:
    """Whether every planned cell was measured and summed up."""
    folder = RunFolder(run)
    try:
        manifest = folder.manifest()
        return (run / SUMMARY).exists() and all(folder.has_cell(c.cell_id) for c in manifest.cells)
    except UsageError:
        return False


def label(run: Path, suite: str, pinned: str | None = None) -> None:
    """Say in the run's folder whose it is, and why it must be kept."""
    kept = pinned if pinned is not None else read_labels(run).pinned
    write_atomic(run / LABELS, to_json(Labels(suite=suite, pinned=kept)))


def unpin(run: Path) -> None:
    """Let the run be pruned like any other."""
    if (run / LABELS).exists():
        labels = msgspec.structs.replace(read_labels(run), pinned=None)
        write_atomic(run / LABELS, to_json(labels))


def figures(run: Path, suite: str) -> tuple[Point, ...]:
    """A run's points. Raises `UsageError`."""
    folder = RunFolder(run)
    return tuple(points_of(folder.summary(), folder.manifest(), Labels(suite=suite)))


def blocks(entry: str, run: Path) -> dict[str, tuple[float, ...]]:
    """A run's figures start by start, by series. Raises `UsageError`."""
    folder = RunFolder(run)
    return blocks_of(entry, folder.summary(), folder.manifest())
