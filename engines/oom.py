"""Whether the kernel ended a process for want of memory: its own counters, read before and after.

A process that is killed so dies of SIGKILL without a word, and may have been a worker whose parent
only sees it gone.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """How many processes were killed for want of memory since boot, by who counts them.

    `control group`: of this process's own group and those below it; `machine`: of all. One that
    cannot be read is left out.
    """
    found: dict[str, int] = {}
    for path in _group_files(proc, cgroups):
        count = _count(path)
        if count is not None:
            found["control group"] = count
            break
    machine = _count(proc / "vmstat")
    if machine is not None:
        found["machine"] = machine
    return found


def _group_files(proc: Path, cgroups: Path) -> list[Path]:
    """Where this process's memory group counts, in version 2 and 1; inside a container at the top.

    A line is `id:controllers:path`.
    """
    lines: list[list[str]] = []
    with contextlib.suppress(OSError):
        text = (proc / "self" / "cgroup").read_text(encoding="utf-8", errors="replace")
        lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    found = []
    for _number, controllers, path in lines:
        own = path.lstrip("/")
        if controllers == "":
            found += [cgroups / own / "memory.events", cgroups / "memory.events"]
        elif "memory" in controllers.split(","):
            top = cgroups / "memory"
            found += [top / own / "memory.oom_control", top / "memory.oom_control"]
    return found


def _count(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
        counted = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        if counted is not None:
            return int(counted[1])
    return None


def killed_since(before: dict[str, int], after: dict[str, int]) -> str | None:
    """What was killed between two readings, in words; None: nothing. The group's count first."""
    for who in ("control group", "machine"):
        kills = after.get(who, 0) - before.get(who, after.get(who, 0))
        if kills > 0:
            where = "its control group" if who == "control group" else "this machine"
            many = "1 process" if kills == 1 else f"{kills} processes"
            return f"the kernel killed {many} of {where} for want of memory"
    return None
