"""What a run was made with: machine, versions, git commit, clock."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("spec-harness", "torch", "transformers", "numpy", "httptools", "uvloop", "msgspec")


def environment() -> dict[str, Any]:
    """The machine as it is now. What cannot be found out is None."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "load_average": list(os.getloadavg()),
        "gpus": gpus(),
        "python": platform.python_version(),
    }


def _cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def gpus() -> list[dict[str, Any]]:
    """The NVIDIA GPUs of this machine; none where the driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the library raises its own kinds, one of them for "no driver"
        return []
    try:
        found = []
        for i in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            found.append(
                {
                    "name": str(pynvml.nvmlDeviceGetName(handle)),
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    "compute_capability": f"{major}.{minor}",
                    "driver": str(pynvml.nvmlSystemGetDriverVersion()),
                }
            )
        return found
    finally:
        pynvml.nvmlShutdown()


def versions() -> dict[str, str | None]:
    """Versions of the harness and of the packages that touch its figures."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """The commit of the checkout that runs, and whether tracked files differ from it.

    Where `root` only lies within a repository, as an installed package in a project's environment
    does, that repository's commit says nothing of it: (None, None).
    """
    told = _git(root, "rev-parse", "--show-prefix", "HEAD")
    if told is None or not told.startswith(b"\n"):
        return None, None
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    return told.decode().strip(), None if status is None else bool(status.strip())


def git_diff(root: Path) -> str | None:
    """Identifies what tracked files differ in from the commit; None where git does not tell."""
    diff = _git(root, "diff", "--no-ext-diff", "--no-color", "HEAD")
    return None if diff is None else hashlib.sha256(diff).hexdigest()[:16]


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def clock_anchor() -> dict[str, Any]:
    """One moment on both clocks, so that `perf_counter_ns` readings can be dated."""
    return {
        "perf_counter_ns": time.perf_counter_ns(),
        "wall_time": datetime.now(UTC).isoformat(),
        "wall_time_ns": time.time_ns(),
    }
