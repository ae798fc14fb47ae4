"""GPU facts from NVML: the library is a scripted one, no GPU is here."""

from __future__ import annotations

import ctypes.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.hardware import Gpu, Gpus, numa_node, read_gpus


class Unsupported(Exception):
    """As NVML answers a question that a GPU does not know."""


class Library:
    """Answers like pynvml for two GPUs of the kind that this harness was first used on."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_NVLINK_MAX_LINKS = 18
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        gib = 2**30
        answers: dict[str, Any] = {
            "nvmlDeviceGetCount": 2,
            "nvmlSystemGetDriverVersion": b"580.65.06",
            "nvmlSystemGetCudaDriverVersion": 13000,
            "nvmlDeviceGetName": "NVIDIA RTX PRO 6000 Blackwell",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=96 * gib, free=95 * gib),
            "nvmlDeviceGetCudaComputeCapability": (12, 0),
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:17:00.0"),
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetTopologyCommonAncestor": 50,
            "nvmlDeviceGetP2PStatus": 5,
        }
        if name == "nvmlDeviceGetHandleByIndex":
            return lambda index: index
        if name == "nvmlDeviceGetUUID":
            return lambda handle: f"GPU-{handle}abc"
        if name == "nvmlDeviceGetComputeRunningProcesses":
            return lambda handle: [SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)]
        if name in answers:
            return lambda *arguments: answers[name]

        def refuse(*arguments: Any) -> Any:
            raise Unsupported(name)

        return refuse


def test_what_the_driver_tells_becomes_facts_and_what_it_does_not_is_none() -> None:
    library = Library()
    found = read_gpus(library)
    assert (found.driver, found.cuda, found.absent) == ("580.65.06", "13.0", None)
    first = found.gpus[0]
    assert (first.capability, first.uuid) == ("12.0", "GPU-0abc")
    assert (first.memory_bytes, first.free_bytes) == (96 * 2**30, 95 * 2**30)
    assert (first.pcie_width, first.pcie_width_max) == (8, 16)
    assert first.nvlinks is None and first.partitioned is None and first.uncorrected_errors is None
    # The process is of another container: it has no name here, nor is its memory told.
    assert first.processes[0].name is None and first.processes[0].used_bytes is None
    link = found.links[0]
    assert (link.first, link.second, link.nvlink) == (0, 1, False)
    assert link.path == "PCIe across NUMA nodes"
    assert library.open == 0


@pytest.mark.skipif(
    ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has a driver"
)
def test_a_machine_without_a_driver_says_so() -> None:
    found = read_gpus()
    assert found.gpus == () and "no NVIDIA driver" in (found.absent or "")


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("1,7,0", [1]),  # as CUDA does: the list ends at the first that is none
        ("GPU-b", [1]),
        ("GPU-", []),  # names more than one
        ("-1", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(chosen: str | None, left: list[int]) -> None:
    gpus = tuple(Gpu(index=i, name="x", uuid=f"GPU-{'abc'[i]}") for i in range(3))
    assert [g.index for g in Gpus(gpus=gpus).visible(chosen)] == left


def test_the_numa_node_of_a_pci_device(tmp_path: Path) -> None:
    device = tmp_path / "0000:17:00.0"
    device.mkdir()
    (device / "numa_node").write_text("1\n")
    assert numa_node("00000000:17:00.0", tmp_path) == 1
    (device / "numa_node").write_text("-1\n")
    assert numa_node("00000000:17:00.0", tmp_path) is None
    assert numa_node("00000000:18:00.0", tmp_path) is None
