"""The host: file limits, shared memory, memory and CPU under a cgroup, huge pages, the clock."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from harness.doctoring.finding import Finding, fail, gib, ok, unknown, warn

UNLIMITED_V1 = 2**60
"""The first cgroup version writes "no limit" as a number near the largest one."""
QUEUE_BYTES = 240 * 2**20
"""vLLM's queue from the engine to its ranks: 10 pieces of 24 MiB (v0.32, shm_broadcast.py)."""
NCCL_BYTES = 32 * 2**20
"""What NCCL is known to ask of /dev/shm for one rank where GPUs talk through the host."""
SHM_COMFORT = 2**30


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The host as found; None: not to be found out.

    `open_files`: soft and hard limit, -1 for none. `cpu_limit` in cores and `memory_limit` in
    bytes are a cgroup's. `huge_reserved`: bytes set aside as huge pages that nobody uses.
    `clock_source`: the kernel's; `newest_file_s`: a moment that must lie in the past (Unix time).
    """

    open_files: tuple[int, int] | None = None
    shm_bytes: int | None = None
    shm_free: int | None = None
    cores: int | None = None
    cpu_limit: float | None = None
    memory_bytes: int | None = None
    memory_available: int | None = None
    memory_limit: int | None = None
    memory_used: int | None = None
    huge_pages: str | None = None
    huge_reserved: int | None = None
    numa_nodes: int | None = None
    clock_source: str | None = None
    now_s: float | None = None
    newest_file_s: float | None = None

    @property
    def memory_usable(self) -> int | None:
        """What a new process could take: the host's, or what the cgroup leaves."""
        left = None
        if self.memory_limit is not None:
            left = max(0, self.memory_limit - (self.memory_used or 0))
        known = [size for size in (self.memory_available, left) if size is not None]
        return min(known) if known else None

    @property
    def cores_usable(self) -> float | None:
        """Cores that this process may run on, the cgroup's share counted."""
        known = [c for c in (self.cores, self.cpu_limit) if c is not None]
        return min(known) if known else None


def read_machine(newest: Path | None = None) -> MachineFacts:
    """This host. `newest`: a file that was written before now."""
    import psutil

    memory = psutil.virtual_memory()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    cpu, limit, used = read_cgroup()
    return MachineFacts(
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        shm_bytes=shm.total if shm else None,
        shm_free=shm.free if shm else None,
        cores=len(os.sched_getaffinity(0)),
        cpu_limit=cpu,
        memory_bytes=memory.total,
        memory_available=memory.available,
        memory_limit=limit,
        memory_used=used,
        huge_pages=_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        huge_reserved=reserved_pages(_text(Path("/proc/meminfo")) or ""),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        clock_source=_text(
            Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
        ),
        now_s=time.time(),
        newest_file_s=newest.stat().st_mtime if newest and newest.exists() else None,
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def reserved_pages(meminfo: str) -> int | None:
    """Bytes of huge pages that are set aside and free, from /proc/meminfo."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    try:
        return int(fields["HugePages_Free"]) * int(fields["Hugepagesize"].split()[0]) * 1024
    except (KeyError, ValueError, IndexError):
        return None


def read_cgroup(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[float | None, int | None, int | None]:
    """CPU limit in cores, memory limit and memory in use in bytes, of either cgroup version.

    A limit of any group above this process's holds too: the lowest is told. Within a container
    the process's own group is often the root that is mounted there.
    """
    cpus: list[float] = []
    limits: list[tuple[int, int | None]] = []
    for line in (_text(own) or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = controllers.split(",") if controllers else [""]
        for name in set(names) & {"", "cpu", "memory"}:
            for folder in _upwards(root / name, path):
                cpu = cpu_cores(folder)
                cpus += [cpu] if cpu is not None else []
                memory = memory_limit(folder)
                limits += [memory] if memory is not None else []
    lowest = min(limits, key=lambda pair: pair[0] - (pair[1] or 0)) if limits else (None, None)
    return (min(cpus) if cpus else None), lowest[0], lowest[1]


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    folder = mount / path.strip("/")
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent
    yield mount


def cpu_cores(folder: Path) -> float | None:
    """The limit of one group in cores: `cpu.max`, or the first version's quota and period."""
    words = (_text(folder / "cpu.max") or "").split()
    if not words:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        words = [quota, period] if quota and period else []
    try:
        quota_us, period_us = int(words[0]), int(words[1])
    except (IndexError, ValueError):
        return None  # "max", or no such file
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def memory_limit(folder: Path) -> tuple[int, int | None] | None:
    """The limit of one group and what it uses, in bytes; None where it has no limit."""
    pairs = (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for limit_name, used_name in pairs:
        limit = _text(folder / limit_name)
        if limit and limit.isdecimal() and int(limit) < UNLIMITED_V1:
            used = _text(folder / used_name)
            return int(limit), int(used) if used and used.isdecimal() else None
    return None


def check_open_files(facts: MachineFacts, connections: int, files: int) -> Finding:
    """Whether so many connections at once, and the checkpoint's files, may be open."""
    where = "RLIMIT_NOFILE"
    if facts.open_files is None:
        return unknown("host", "open_files", where, "the limit on open files is not known")
    soft, hard = facts.open_files
    need = 512 + 2 * connections + files
    what = f"{_limit(soft)} open files are allowed ({_limit(hard)} at most), about {need} are used"
    if 0 <= hard < need:
        return fail("host", "open_files", where, what, "raise the hard limit (limits.conf, "
                    "LimitNOFILE= of the unit, --ulimit nofile= of the container)")  # fmt: skip
    if 0 <= soft < need:
        how = f"run `ulimit -n {need}` first: not every engine raises it by itself"
        return warn("host", "open_files", where, what, how)
    return ok("host", "open_files", where, what)


def _limit(value: int) -> str:
    return "any number of" if value < 0 else str(value)


def check_shm(facts: MachineFacts, ranks: int) -> Finding:
    """Whether /dev/shm holds what `ranks` processes of one engine share."""
    if facts.shm_free is None:
        return unknown("host", "shm", "/dev/shm", "there is no /dev/shm here")
    need = QUEUE_BYTES + ranks * NCCL_BYTES if ranks > 1 else 0
    what = f"{gib(facts.shm_free)} are free"
    how = "start the container with --ipc=host or --shm-size=16g, or remount /dev/shm larger"
    if facts.shm_free < need:
        return fail(
            "host", "shm", "/dev/shm", f"{what}, {ranks} ranks share about {gib(need)}", how
        )
    if ranks > 1 and facts.shm_free < SHM_COMFORT:
        return warn("host", "shm", "/dev/shm", f"{what}: little for {ranks} ranks", how)
    return ok("host", "shm", "/dev/shm", what)


def check_cpu(facts: MachineFacts, ranks: int) -> Finding:
    """Whether there are cores for the ranks, the server, and the load generator."""
    cores = facts.cores_usable
    if cores is None:
        return unknown("host", "cpu", "CPU", "the number of cores is not known")
    limited = facts.cpu_limit is not None and facts.cpu_limit < (facts.cores or cores + 1)
    what = f"{cores:g} cores may be used" + (", by the cgroup's limit" if limited else "")
    need = ranks + 2 if ranks > 1 else 2
    if cores < need:
        told = (
            f"{what}; {ranks} rank{'s' if ranks > 1 else ''}, the server and the load want {need}"
        )
        return warn("host", "cpu", "CPU", told, "give the container more CPU, or expect the client "
                    "or the engine's own CPU work to be the limit")  # fmt: skip
    return ok("host", "cpu", "CPU", what)


def check_huge_pages(facts: MachineFacts) -> Finding:
    """Whether memory is set aside as huge pages, where no engine can use it."""
    mode = facts.huge_pages or ""
    mode = mode[mode.find("[") + 1 : mode.find("]")] if "[" in mode else "not known"
    what = f"transparent huge pages: {mode}"
    reserved, total = facts.huge_reserved, facts.memory_bytes
    if reserved and total and reserved > total / 10:
        told = f"{what}; {gib(reserved)} of memory are set aside as huge pages that nobody uses"
        return warn("host", "huge_pages", "memory", told, "set vm.nr_hugepages=0 with sysctl")
    return ok("host", "huge_pages", "memory", what)


def check_clock(facts: MachineFacts) -> Finding:
    """Whether the wall clock can be right, and clock readings are cheap."""
    now, newest, source = facts.now_s, facts.newest_file_s, facts.clock_source
    if now is None:
        return unknown("host", "clock", "clock", "the clock was not read")
    told = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if newest is not None and now < newest - 1:
        return warn("host", "clock", "clock", f"it says {told}, before the harness was written: "
                    "runs get wrong dates, and certificates are refused",
                    "set the clock, and keep it by NTP or chrony")  # fmt: skip
    if source in ("hpet", "acpi_pm", "jiffies"):
        return warn(
            "host",
            "clock",
            "clock",
            f"the kernel reads it from {source}: each reading "
            "is slow, and every arrival is stamped",
            "boot with clocksource=tsc",
        )
    return ok("host", "clock", "clock", f"{told}, read from {source or 'a source not told'}")


def check_machine(
    facts: MachineFacts, *, ranks: int, connections: int, files: int
) -> list[Finding]:
    """All checks of the host for an engine of `ranks` processes and so many connections."""
    return [
        check_open_files(facts, connections, files),
        check_shm(facts, ranks),
        check_cpu(facts, ranks),
        check_huge_pages(facts),
        check_clock(facts),
    ]
