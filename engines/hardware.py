"""The NVIDIA GPUs of this machine, as the driver's own library (NVML) tells them.

Everything that asks NVML more than a process's memory is here, and its answer is plain facts, so
that what is concluded from them can be tried without the hardware. What the driver does not tell
is None; a machine without GPUs has none, and `absent` says why.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what was found on a machine."""


class GpuProcess(Facts, frozen=True, kw_only=True):
    """A process that holds memory of a GPU; of another container's its name is not known."""

    pid: int
    name: str | None = None
    used_bytes: int | None = None


class Gpu(Facts, frozen=True, kw_only=True):
    """One GPU, by NVML's index. `numa_node`: of the host's memory that it is nearest to.

    `pcie_width` is the number of lanes in use, of `pcie_width_max`; `nvlinks` the active links.
    `partitioned`: split by MIG.
    """

    index: int
    name: str
    uuid: str | None = None
    capability: str | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    numa_node: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: int | None = None
    partitioned: bool | None = None
    uncorrected_errors: int | None = None
    processes: tuple[GpuProcess, ...] = ()


class Link(Facts, frozen=True, kw_only=True):
    """How two GPUs reach each other: by NVLink, or the nearest thing that both hang from."""

    first: int
    second: int
    nvlink: bool | None = None
    path: str | None = None


class Gpus(Facts, frozen=True, kw_only=True):
    """All GPUs. `cuda`: the newest CUDA that the driver serves, as major.minor."""

    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    absent: str | None = None

    def visible(self, chosen: str | None) -> tuple[Gpu, ...]:
        """Those that CUDA_VISIBLE_DEVICES leaves, in its order; all where it is not set.

        As CUDA reads it, the list ends at the first entry that names no GPU.
        """
        if chosen is None:
            return self.gpus
        left: list[Gpu] = []
        for word in (part.strip() for part in chosen.split(",")):
            found = [g for g in self.gpus if _names(word, g)]
            if len(found) != 1:
                break
            left += found
        return tuple(left)


def _names(word: str, gpu: Gpu) -> bool:
    if word.isdecimal():
        return int(word) == gpu.index
    return bool(word) and gpu.uuid is not None and gpu.uuid.startswith(word)


_PATHS = {
    0: "on one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "PCIe within one NUMA node",
    50: "PCIe across NUMA nodes",
}
"""NVML's levels of the common ancestor (nvmlGpuTopologyLevel_t)."""


def read_gpus(library: Any = None) -> Gpus:
    """The GPUs of this machine. `library`: one in pynvml's place; never raises."""
    try:
        nvml = library or import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # the library raises its own kinds
        return Gpus(absent=_why_none(error))
    try:
        return _read(nvml)
    except Exception as error:
        return Gpus(absent=f"the NVIDIA driver does not answer: {error}")
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _why_none(error: Exception) -> str:
    kind = type(error).__name__
    if kind == "NVMLError_LibraryNotFound":
        return "no NVIDIA driver is on this machine (libnvidia-ml.so.1 is not found)"
    if kind == "NVMLError_DriverNotLoaded":
        return "the NVIDIA driver is installed and not loaded"
    return f"NVML cannot be used: {error}"


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """What the driver answers, None where it does not know this question."""
    try:
        return call(*arguments)
    except Exception:
        return None


def _read(nvml: Any) -> Gpus:
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    cuda = _ask(nvml.nvmlSystemGetCudaDriverVersion)
    return Gpus(
        driver=_text(_ask(nvml.nvmlSystemGetDriverVersion)),
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpus=tuple(_gpu(nvml, i, handle) for i, handle in enumerate(handles)),
        links=tuple(_links(nvml, handles)),
        absent=None if count else "the NVIDIA driver finds no GPU",
    )


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    pci = _ask(nvml.nvmlDeviceGetPciInfo, handle)
    mig = _ask(nvml.nvmlDeviceGetMigMode, handle)
    errors = _ask(nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                  nvml.NVML_VOLATILE_ECC)  # fmt: skip
    return Gpu(
        index=index,
        name=_text(_ask(nvml.nvmlDeviceGetName, handle)) or "unnamed",
        uuid=_text(_ask(nvml.nvmlDeviceGetUUID, handle)),
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        memory_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
        numa_node=None if pci is None else numa_node(_text(pci.busId) or ""),
        pcie_generation=_ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_width_max=_ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        nvlinks=_active_links(nvml, handle),
        partitioned=None if mig is None else bool(mig[0]),
        uncorrected_errors=errors,
        processes=tuple(_processes(nvml, handle)),
    )


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):  # as older releases of the library answer
        return value.decode("utf-8", "replace")
    return None if value is None else str(value)


def numa_node(bus: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node of a PCI device such as 00000000:17:00.0; None where the kernel names none."""
    domain, _, rest = bus.lower().partition(":")
    try:
        node = int((devices / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _active_links(nvml: Any, handle: Any) -> int | None:
    states = [_ask(nvml.nvmlDeviceGetNvLinkState, handle, i)
              for i in range(nvml.NVML_NVLINK_MAX_LINKS)]  # fmt: skip
    told = [state for state in states if state is not None]
    return sum(map(bool, told)) if told else None


def _processes(nvml: Any, handle: Any) -> Iterator[GpuProcess]:
    import psutil

    for found in _ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
        name = None
        with contextlib.suppress(psutil.Error):
            name = psutil.Process(found.pid).name()
        used = found.usedGpuMemory
        yield GpuProcess(pid=int(found.pid), name=name, used_bytes=None if used is None else used)


def _links(nvml: Any, handles: Sequence[Any]) -> Iterator[Link]:
    for (i, first), (j, second) in combinations(enumerate(handles), 2):
        level = _ask(nvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
        status = _ask(nvml.nvmlDeviceGetP2PStatus, first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        yield Link(
            first=i,
            second=j,
            nvlink=None if status is None else status == nvml.NVML_P2P_STATUS_OK,
            path=None if level is None else _PATHS.get(int(level)),
        )


def gpus_here() -> tuple[Gpus, tuple[Gpu, ...]]:
    """All GPUs, and those that this process may use."""
    found = read_gpus()
    return found, found.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
