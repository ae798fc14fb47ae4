"""Is anything going on in a process tree? Its log, processor time, bytes and GPU memory, sampled.

A start that goes on leaves a trace in one of them. A stall leaves none: either every process waits
(`idle`), or some spin without a line, a byte or a page to show for it (`busy`), as ranks do that
wait for another one inside a collective operation.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

SAMPLE_S = 1.0
IDLE_CORES = 0.03
"""Processor time of a whole tree, in cores, that polling alone takes."""
LEAST_BYTES = 65_536
"""Bytes a sample that polling alone reads and writes."""

IDLE_BUDGET_S = 45.0
BUSY_BUDGET_S = 600.0
SLOW_PHASES: dict[str, tuple[float, float]] = {
    # What an engine compiles or captures leaves nothing but processor time for minutes.
    "compile": (90.0, 1800.0),
    "capture_graphs": (90.0, 1800.0),  # vLLM's name for it
    "graph_capture": (90.0, 1800.0),  # SGLang's
    "warm_up": (90.0, 1800.0),
    "warmup": (90.0, 1800.0),  # SGLang's
    "profile_memory": (60.0, 900.0),
    # A rendezvous waits for the slowest rank, which may still be importing.
    "distributed": (90.0, 600.0),
}


@dataclass(frozen=True, kw_only=True)
class ProcessUse:
    """What one process has used since it began; see `engines.base.PhaseUse`."""

    cpu_s: float
    read_bytes: int | None
    written_bytes: int | None
    read_call_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A process tree at one moment. Bytes and seconds are totals since the processes began.

    `gpu_bytes` None: no NVIDIA driver answers. `each`: what every process has used, by its id and
    birth. `gpu_used_bytes`: of all GPUs, whoever uses them.
    """

    at_s: float
    processes: frozenset[int]
    cpu_s: float
    io_bytes: int
    log_bytes: int
    gpu_bytes: int | None
    each: Mapping[tuple[int, float], ProcessUse] = field(default_factory=dict)
    rss_bytes: int = 0
    network_bytes: int | None = None
    gpu_used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Nothing has happened for `quiet_s` in `phase`. `kind`: see the module."""

    kind: Literal["idle", "busy"]
    phase: str
    quiet_s: float
    budget_s: float


def budgets(phase: str) -> tuple[float, float]:
    """How long a phase may be idle, and how long busy without a trace, in seconds."""
    return SLOW_PHASES.get(phase, (IDLE_BUDGET_S, BUSY_BUDGET_S))


def tree(pid: int) -> list[psutil.Process]:
    """The live descendants of `pid`, itself left out: it only watches over them."""
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def sample(pid: int, log_path: Path, at_s: float) -> Sample:
    """Look at the tree below `pid` and at the log."""
    cpu_s, io_bytes, rss_bytes, seen = 0.0, 0, 0, set()
    each: dict[tuple[int, float], ProcessUse] = {}
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            own_s = times.user + times.system
            cpu_s += own_s
            seen.add(process.pid)
            rss_bytes += process.memory_info().rss
            io = _io_of(process)
            if io is not None:
                # What is mapped is read by page faults, which only the block layer counts.
                io_bytes += io.read_chars + io.write_chars + io.read_bytes + io.write_bytes
            each[process.pid, process.create_time()] = ProcessUse(
                cpu_s=own_s,
                read_bytes=None if io is None else io.read_bytes,
                written_bytes=None if io is None else io.write_bytes,
                read_call_bytes=None if io is None else io.read_chars,
            )
    try:
        log_bytes = log_path.stat().st_size
    except OSError:
        log_bytes = 0
    return Sample(
        at_s=at_s,
        processes=frozenset(seen),
        cpu_s=cpu_s,
        io_bytes=io_bytes,
        log_bytes=log_bytes,
        gpu_bytes=gpu_bytes(seen),
        each=each,
        rss_bytes=rss_bytes,
        network_bytes=network_bytes(),
        gpu_used_bytes=gpu_used_bytes(),
    )


def _io_of(process: psutil.Process) -> Any:
    with contextlib.suppress(psutil.Error, AttributeError):  # not allowed; not on this system
        return process.io_counters()
    return None


def network_bytes() -> int | None:
    """Bytes that this machine sent and received, loopback left out; None where nothing counts."""
    try:
        cards = psutil.net_io_counters(pernic=True)
    except (OSError, RuntimeError):
        return None
    total = sum(c.bytes_sent + c.bytes_recv for name, c in cards.items() if name != "lo")
    return total or None  # a sandbox counts nothing and says 0


@functools.cache
def _driver() -> Any:
    """NVIDIA's management library, loaded once and for good; None without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: there is nothing to watch
        return None
    return pynvml


def gpu_bytes(pids: set[int]) -> int | None:
    """GPU memory held by these processes; None without an NVIDIA driver."""
    pynvml = _driver()
    if pynvml is None:
        return None
    try:
        total = 0
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in pids and process.usedGpuMemory is not None:
                    total += int(process.usedGpuMemory)
        return total
    except pynvml.NVMLError:
        return None


def gpu_used_bytes() -> int | None:
    """Used memory of all GPUs; None without an NVIDIA driver."""
    pynvml = _driver()
    if pynvml is None:
        return None
    try:
        every = range(pynvml.nvmlDeviceGetCount())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in every]
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    except pynvml.NVMLError:
        return None


def changed(before: Sample, after: Sample) -> bool:
    """Whether something was done between two samples, processor time apart."""
    span = max(after.at_s - before.at_s, 1e-9)
    return (
        after.log_bytes != before.log_bytes
        or after.gpu_bytes != before.gpu_bytes
        or after.processes != before.processes
        or after.io_bytes - before.io_bytes > LEAST_BYTES * max(span, 1.0)
    )


def worked(before: Sample, after: Sample) -> bool:
    """Whether the tree's processors were used between two samples."""
    span = max(after.at_s - before.at_s, 1e-9)
    return (after.cpu_s - before.cpu_s) / span > IDLE_CORES


class StallWatch:
    """Fed with samples in order; tells a stall once its phase's budget is used up.

    `patience` multiplies every budget; 0 never tells.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self._patience = patience
        self._last: Sample | None = None
        self._changed_s = 0.0
        self._worked_s = 0.0
        self._phase = ""

    def feed(self, now: Sample, phase: str) -> Stall | None:
        """Take a sample made in `phase`; a new phase is a change."""
        if not self._patience:
            return None
        before, self._last = self._last, now
        if before is None or phase != self._phase or changed(before, now):
            self._changed_s = self._worked_s = now.at_s
        elif worked(before, now):
            self._worked_s = now.at_s
        self._phase = phase
        idle, busy = (self._patience * budget for budget in budgets(phase))
        quiet_s = now.at_s - self._changed_s
        if now.at_s - self._worked_s > idle:
            return Stall(kind="idle", phase=phase, quiet_s=quiet_s, budget_s=idle)
        if quiet_s > busy:
            return Stall(kind="busy", phase=phase, quiet_s=quiet_s, budget_s=busy)
        return None
