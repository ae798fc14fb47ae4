"""A stalled start taken apart before it is ended: where each process waits, and who is the odd one.

Written into a folder: `processes.txt`, a stack of every process (`stack-PID.txt`, by py-spy, with
native frames where it can), `log-tail.txt` by rank, `environment.txt` (NCCL and the like, and where
ranks differ in it), `kernel.txt` (the driver's Xid lines), `gpus.txt`, and `reading.txt`: one
paragraph. What is known of such stalls is in `engines.signatures`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engines.activity import Stall, tree
from engines.phases import read_log
from engines.secret import command_without_secrets
from engines.signatures import stall_advice

DUMP_S = 20.0
MOST_AT_ONCE = min(16, max(2, os.cpu_count() or 1))
"""Processes looked at together: eight ranks one by one would take minutes."""
TAIL_LINES = 15
CALLERS = 3
SHOWN_ENVIRONMENT = re.compile(
    r"^(NCCL|GLOO|TORCH|VLLM|SGLANG|CUDA|OMP|HF|MASTER|RANK|WORLD|LOCAL_RANK|UCX|FI)_?"
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.I)
HEAD = re.compile(r"\AProcess \d+: .*?\n(?=Python v)", re.S)
RANK = re.compile(r"(?:_TP|\bTP|[Rr]ank[ =_]?)(\d+)")
_LIBRARY = re.compile(r"/(?:lib/python3[^/]*|multiprocessing|asyncio|concurrent)/(?!site-packages)")
_WAITS = re.compile(
    r"^(?:wait|_wait\w*|poll|select|_select|recv\w*|_recv\w*|read\w*|acquire|sleep|get|epoll\w*|"
    r"_bootstrap\w*|run|_run\w*|<module>|<lambda>|__call__|wrapper|_try_wait|communicate)$"
)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A process's main thread. `frames`: functions, innermost first, as `name (file:line)`.

    `paths` are the frames' whole file names. Both empty, and `error` set, where it could not be
    read.
    """

    pid: int
    name: str
    rank: int | None
    state: str
    frames: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    error: str | None = None

    @property
    def telling(self) -> tuple[str, ...]:
        """The frames that say what is being done, not merely that it is waited; innermost first."""
        named = zip(self.frames, self.paths, strict=True)
        return tuple(
            frame
            for frame, path in named
            if not _WAITS.match(frame.partition(" ")[0].rpartition(".")[2])
            and not _LIBRARY.search(path)
            and not path.startswith("<")
        )

    @property
    def where(self) -> str:
        """The innermost telling function, else the innermost."""
        return (*self.telling, *self.frames, "where its stack could not be read")[0]

    @property
    def chain(self) -> str:
        """`where`, and the two that called it."""
        return " < ".join(self.telling[:CALLERS]) or self.where

    @property
    def who(self) -> str:
        """The rank where it has one, else the process's name and id."""
        return f"rank {self.rank}" if self.rank is not None else f"{self.name} ({self.pid})"


def dissect(pid: int, stall: Stall, *, folder: Path, log_path: Path, argv: Sequence[str]) -> str:
    """Take the tree below `pid` apart into `folder`; returns the reading, one paragraph.

    Nothing is ended or changed. What cannot be had is said in its file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = sorted(tree(pid), key=lambda process: process.pid)  # parents come first
    _write(folder / "processes.txt", _table(processes))
    log = _log_tail(log_path)
    named = _named_in(log)
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:  # py-spy reads symbols for seconds
        stacks = list(pool.map(lambda one: stack_of(one, folder, named.get(one.pid)), processes))
    _write(folder / "log-tail.txt", log)
    _write(folder / "environment.txt", _environment(processes))
    _write(folder / "command.txt", "\n".join(command_without_secrets(argv)) + "\n")
    _write(folder / "kernel.txt", _said_by(["dmesg", "--ctime"], keep=r"Xid|NVRM|oom|Out of mem"))
    _write(folder / "gpus.txt", _said_by(["nvidia-smi", "-q", "-d", "MEMORY,UTILIZATION,PIDS"]))
    text = reading(stall, [s for s in stacks if s is not None], log)
    _write(folder / "reading.txt", text + "\n")
    return text


def stack_of(process: psutil.Process, folder: Path, logged: str | None = None) -> Stack | None:
    """A process's stack, kept in `folder` too; None where it has gone meanwhile.

    `logged`: what it calls itself in the log, for a process whose title does not tell its rank.
    """
    try:
        name, state, command = _title(process), process.status(), _command(process)
    except psutil.Error:
        return None
    found = RANK.search(name) or RANK.search(logged or "")
    rank = int(found[1]) if found else None
    text, threads, error = _dump(process.pid, stopped=state == psutil.STATUS_STOPPED)
    # py-spy heads its text with the command as it is, over several lines where that has some.
    text = HEAD.sub(lambda _: f"Process {process.pid}: {command}\n", text)
    _write(folder / f"stack-{process.pid}.txt", text)
    main = next((t for t in threads if t.get("thread_name") == "MainThread"), None)
    frames = (main or (threads[-1] if threads else {})).get("frames", ())
    return Stack(
        pid=process.pid,
        name=name,
        rank=rank,
        state=state,
        frames=tuple(f"{f['name']} ({f['short_filename']}:{f['line']})" for f in frames),
        paths=tuple(str(f["filename"]) for f in frames),
        error=error,
    )


def _command(process: psutil.Process) -> str:
    """The command line, as a folder that is passed on may show it."""
    return " ".join(command_without_secrets(process.cmdline()))


def _title(process: psutil.Process) -> str:
    """What a process calls itself: engines name their workers in the command line's place."""
    command = process.cmdline()
    first = command[0] if command else process.name()
    return first if "::" in first else process.name()


def _dump(pid: int, *, stopped: bool) -> tuple[str, list[dict[str, Any]], str | None]:
    """py-spy's text (with native frames if it can), its threads, and why there are none."""
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if spy is None:
        return "py-spy is not installed\n", [], "py-spy is not installed"
    # A stopped process cannot be stopped once more to be looked at.
    ways = [["--nonblocking"]] if stopped else [["--native"], [], ["--nonblocking"]]
    text = error = ""
    for way in ways:
        text, error = _run([spy, "dump", "--pid", str(pid), *way])
        if not error:
            break
    if error:
        return f"{text}{error}\n", [], error
    plain = [way for way in ways if way != ["--native"]]
    for way in plain:
        told, failed = _run([spy, "dump", "--json", "--pid", str(pid), *way])
        if not failed:
            with contextlib.suppress(ValueError):
                return text, list(json.loads(told)), None
    return text, [], "py-spy's answer could not be read"


def _run(command: list[str]) -> tuple[str, str]:
    """Standard output, and one line of what went wrong."""
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=DUMP_S
        )
    except subprocess.TimeoutExpired:
        return "", f"{Path(command[0]).name} did not end within {DUMP_S:g} s"
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    if ran.returncode == 0 and ran.stdout.strip():
        return ran.stdout, ""
    said = [line for line in ran.stderr.splitlines() if line.strip()]
    return ran.stdout, (said[0] if said else f"ended with {ran.returncode}")[:300]


def reading(stall: Stall, stacks: Sequence[Stack], log: str) -> str:
    """One paragraph: what stands still, since when, who waits where, and what is known of it."""
    what = "nothing moves" if stall.kind == "idle" else "processors spin and nothing comes of it"
    parts = [f"{what} since {stall.quiet_s:.0f} s in the start-up phase {stall.phase!r}"]
    stopped = [s for s in stacks if s.state == psutil.STATUS_STOPPED]
    if stopped:
        parts.append(f"{_names(stopped)} stopped by a signal (SIGSTOP or a debugger)")
    waiting = [s for s in stacks if s.state == psutil.STATUS_DISK_SLEEP]
    if waiting:
        parts.append(f"{_names(waiting)} waits for a disk or a driver (state D)")
    parts += _agreement([s for s in stacks if s.frames])
    unread = [s for s in stacks if s.error]
    if unread:
        parts.append(f"no stack of {_names(unread)}: {unread[0].error}")
    parts += stall_advice(
        functions="\n".join(frame for s in stacks for frame in s.frames),
        files="\n".join(path for s in stacks for path in s.paths),
        log=log,
        phase=stall.phase,
    )
    return "; ".join(parts)


def _agreement(stacks: Sequence[Stack]) -> list[str]:
    """Who waits where: the ranks by majority and odd ones, then the other processes."""
    ranks = [s for s in stacks if s.rank is not None]
    parts = _by_place(ranks) if len(ranks) > 1 else []
    rest = [s for s in stacks if s not in ranks] if parts else list(stacks)
    return parts + [f"{s.who} in {s.chain}" for s in rest]


def _by_place(ranks: Sequence[Stack]) -> list[str]:
    places: dict[str, list[Stack]] = defaultdict(list)
    for stack in ranks:
        places[stack.where].append(stack)
    if len(places) == 1:
        return [f"all {len(ranks)} ranks in {ranks[0].chain}"]
    (most, count), *_ = Counter({p: len(s) for p, s in places.items()}).most_common()
    odd = [(place, s) for place, s in places.items() if place != most]
    if count == 1:
        return [f"{stack.who} in {stack.chain}" for stack in ranks]
    told = ", ".join(f"{_names(s)} still in {s[0].chain}" for _, s in odd)
    return [f"{count} ranks in {most}, {told}"]


def _names(stacks: Iterable[Stack]) -> str:
    names = [s.who for s in stacks]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _table(processes: Sequence[psutil.Process]) -> str:
    rows = [f"{'pid':>8} {'parent':>8} {'state':<12} {'cpu s':>8} {'MiB':>8}  command"]
    for process in processes:
        with contextlib.suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            rows.append(
                f"{process.pid:>8} {process.ppid():>8} {process.status():<12} "
                f"{times.user + times.system:>8.1f} {process.memory_info().rss >> 20:>8}  "
                f"{_command(process)[:300]}"
            )
    return "\n".join(rows) + "\n"


def _named_in(log: str) -> dict[int, str]:
    """Processes by the names that their lines begin with, such as `(Worker_TP1 pid=77)`."""
    return {int(pid): name for name, pid in re.findall(r"^\((\w+) pid=(\d+)\)", log, re.M)}


def _log_tail(path: Path) -> str:
    """The last lines of each rank, ranks by the prefix that engines write before a line."""
    lines = read_log(path).splitlines()[-5000:]
    if not lines:
        return f"{path} is empty, or cannot be read\n"
    by_rank: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        if line.strip():
            found = re.match(r"\(([\w ]+?)(?: pid=\d+)?\)|\[[^\]]*?((?:TP|DP|PP)\d+)[^\]]*\]", line)
            by_rank[(found[1] or found[2]) if found else ""].append(line[:500])
    parts = [
        f"== {rank or 'no rank'}\n" + "\n".join(own[-TAIL_LINES:]) for rank, own in by_rank.items()
    ]
    return "\n".join(parts) + "\n"


def _environment(processes: Sequence[psutil.Process]) -> str:
    """What steers the engine's communication: its first process's, then what others have apart.

    Secrets are left out.
    """
    told: list[tuple[str, dict[str, str]]] = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            names = sorted(k for k in variables if SHOWN_ENVIRONMENT.match(k))
            shown = {name: variables[name] for name in names if not SECRET.search(name)}
            told.append((f"{_title(process)} ({process.pid})", shown))
    first = told[0][1] if told else {}
    parts = ["".join(f"{key}={value}\n" for key, value in first.items()) or "nothing set\n"]
    for who, own in told[1:]:
        apart = [f"{key}={value}\n" for key, value in own.items() if first.get(key) != value]
        apart += [f"{key} is not set\n" for key in first if key not in own]
        if apart:
            parts.append(f"== {who}, where it differs\n{''.join(apart)}")
    return "".join(parts)


def _said_by(command: list[str], keep: str | None = None) -> str:
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not on this machine\n"
    text, error = _run(command)
    if keep is not None:
        text = "".join(f"{line}\n" for line in text.splitlines() if re.search(keep, line))
    return text + (f"{command[0]}: {error}\n" if error else "") or "nothing\n"


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not hide the stall itself
        path.write_text(text, encoding="utf-8")
