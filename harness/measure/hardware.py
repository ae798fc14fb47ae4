"""The machine at one moment: its GPUs by NVIDIA's management library, and the host.

What a driver or a system does not tell is left out of a reading: absent, never zero.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

ENERGY, POWER = "energy_j", "power_w"
SM_CLOCK, THROTTLE = "sm_clock_mhz", "throttle_reasons"
CPU, BUSIEST_CORE = "cpu_share", "busiest_core_share"
NET_SENT, NET_RECEIVED = "net_sent_bytes", "net_received_bytes"
ENGINE_BYTES = "engine_memory_bytes"
GPU_TOTALS = (ENERGY,)
HOST_TOTALS = (NET_SENT, NET_RECEIVED, "disk_read_bytes", "disk_written_bytes")
"""Totals since the driver was loaded, or the system began; all others are of the moment."""
NO_DRIVER = "no NVIDIA driver here"

Reading = dict[str, float]


def load_nvml() -> tuple[Any, str | None]:
    """The management library, ready for use, and None; or None, and why there is none."""
    try:
        import pynvml
    except ImportError:
        return None, "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        told = str(error)
        missing = "not found" in told.lower() or "not loaded" in told.lower()
        return None, NO_DRIVER if missing else f"NVIDIA's library answers: {told}"
    if count == 0:
        return None, "the NVIDIA driver names no GPU"
    return pynvml, None


def gpu_words(gpus: Any) -> str:
    """The GPUs of a manifest's environment in words: equal ones counted.

    Whatever else stands there in a file that somebody edited is none.
    """
    told = [g for g in gpus if isinstance(g, dict)] if isinstance(gpus, list | tuple) else []
    names = [f"{g.get('name')} (driver {g.get('driver')})" for g in told if g]
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{n} x {name}" for name, n in counts.items()) or "none"


def number_of(value: Any) -> float | None:
    """A number of a manifest's environment, whose values have no type; None where it is none."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


class Gpus:
    """Reads every GPU. `nvml`: the library, already begun.

    Which figures a GPU has is found out at each reading: one that it does not support is left out.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        count = nvml.nvmlDeviceGetCount()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def describe(self) -> dict[str, dict[str, Any]]:
        """Each GPU's name, UUID and limits, by its index; what it does not tell is None."""
        return {str(i): self._describe_one(handle) for i, handle in enumerate(self._handles)}

    def _describe_one(self, handle: Any) -> dict[str, Any]:
        n = self._nvml
        return {
            "name": self._ask(lambda: str(n.nvmlDeviceGetName(handle))),
            "uuid": self._ask(lambda: str(n.nvmlDeviceGetUUID(handle))),
            "power_limit_w": self._ask(lambda: n.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            "memory_bytes": self._ask(lambda: int(n.nvmlDeviceGetMemoryInfo(handle).total)),
        }

    def read(self, engine_pids: frozenset[int]) -> dict[str, Reading]:
        """Every GPU's figures, by its index.

        Memory that processes of `engine_pids` hold there tells which GPUs are the engine's.
        """
        return {
            str(index): self._read_one(handle, engine_pids)
            for index, handle in enumerate(self._handles)
        }

    def _read_one(self, handle: Any, engine_pids: frozenset[int]) -> Reading:
        n = self._nvml
        rates = self._ask(lambda: n.nvmlDeviceGetUtilizationRates(handle))
        told: dict[str, float | None] = {
            POWER: self._ask(lambda: n.nvmlDeviceGetPowerUsage(handle) / 1000),
            ENERGY: self._ask(lambda: n.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
            SM_CLOCK: self._ask(lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM)),
            "memory_clock_mhz": self._ask(
                lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM)
            ),
            THROTTLE: self._ask(lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "memory_used_bytes": self._ask(lambda: n.nvmlDeviceGetMemoryInfo(handle).used),
            "utilisation": None if rates is None else rates.gpu / 100,
            "memory_utilisation": None if rates is None else rates.memory / 100,
            "temperature_c": self._ask(
                lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU)
            ),
            ENGINE_BYTES: self._engine_bytes(handle, engine_pids),
        }
        return {name: float(value) for name, value in told.items() if value is not None}

    def _engine_bytes(self, handle: Any, pids: frozenset[int]) -> int | None:
        """None where no process is told, as in a container that hides process ids, or no memory."""
        found = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if not found or not pids:
            return None
        held = [p.usedGpuMemory for p in found if p.pid in pids]
        return None if None in held else sum(held)

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._nvml.NVMLError:
            return None


class Host:
    """Reads the host's processors, memory, network (loopback apart) and disks."""

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        psutil.cpu_percent(None, percpu=True)  # the first answer is of no stretch of time

    def read(self) -> Reading:
        """Shares are of the time since the last reading; 1 is every core."""
        psutil = self._psutil
        cores = psutil.cpu_percent(None, percpu=True)
        memory = psutil.virtual_memory()
        told: Reading = {
            "memory_used_bytes": float(memory.total - memory.available),
            "swap_used_bytes": float(psutil.swap_memory().used),
        }
        if cores:
            told[CPU] = sum(cores) / len(cores) / 100
            told[BUSIEST_CORE] = max(cores) / 100
        with contextlib.suppress(OSError, RuntimeError):
            nets = psutil.net_io_counters(pernic=True)
            outward = [net for name, net in nets.items() if name != "lo"]
            sent, received = (sum(net[way] for net in outward) for way in (0, 1))
            if sent or received:  # a sandbox counts nothing and says 0
                told[NET_SENT], told[NET_RECEIVED] = float(sent), float(received)
        with contextlib.suppress(OSError, RuntimeError):
            disks = psutil.disk_io_counters()
            if disks is not None and (disks.read_bytes or disks.write_bytes):
                told["disk_read_bytes"] = float(disks.read_bytes)
                told["disk_written_bytes"] = float(disks.write_bytes)
        return told
