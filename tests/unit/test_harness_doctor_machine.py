"""The doctor on the disk, the host and the GPUs, by facts.

The facts of GPUs are written by hand: none is here.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
from doctor_findings import codes, only

from engines.hardware import Gpu, GpuProcess, Gpus, Link
from harness.doctoring import machine, storage
from harness.doctoring.finding import Finding
from harness.doctoring.gpus import check_gpus
from harness.doctoring.machine import MachineFacts

GIB = 2**30


# --- the disk ---------------------------------------------------------------------------------


def test_a_file_is_read_no_further_than_it_may(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(20 * 2**20))
    speed = storage.read_speed(file, most=9 * 2**20, seconds=600)
    assert speed is not None and 9 * 2**20 <= speed.bytes <= 12 * 2**20
    assert storage.read_speed(tmp_path / "none") is None


def test_a_file_that_another_process_holds_is_read_past_memory_or_said_to_be_there(
    tmp_path: Path,
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(2**22))
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as held:
            assert sum(held[:: mmap.PAGESIZE]) > 0  # every page is mapped now
            if not storage.in_memory(stream.fileno()):
                pytest.skip("this file system does not tell what is in memory")
            speed = storage.read_speed(file, seconds=600)
            assert speed is not None and speed.bytes == 2**22
            assert storage.in_memory(stream.fileno())  # it had to be read some other way


def reading(per_s: float, **changes: Any) -> storage.ReadSpeed:
    fields = {"file": "w", "bytes": 2**28, "seconds": 2**28 / per_s, **changes}
    return storage.ReadSpeed(**fields)


@pytest.mark.parametrize(
    ("speed", "severity"),
    [
        (reading(365e6), "fail"),  # 547 GB in 25 minutes, against a patience of 10
        (reading(1e9), "fail"),  # 547 s are above the 500 allowed here
        (reading(2e9), "warn"),
        (reading(25e9), "ok"),
        (reading(25e9, cached=True), "unknown"),
        (reading(1e9, bytes=1000), "unknown"),
        (None, "unknown"),
    ],
)
def test_the_load_time_against_the_plans_patience(speed: Any, severity: str) -> None:
    first = next(storage.check_read(speed, 547 * 10**9, 500.0, 10**12))
    assert first.severity == severity


def test_a_checkpoint_above_the_memory_is_read_at_every_start() -> None:
    found = list(storage.check_read(reading(2e9), 547 * 10**9, 3600.0, 256 * GIB))
    assert [(f.severity, f.code) for f in found] == [("ok", "read"), ("warn", "cache")]


@pytest.mark.parametrize(
    ("free", "writable", "severity"),
    [(10, True, "fail"), (2**29, True, "warn"), (2**31, True, "ok"), (2**31, False, "fail"),
     (None, True, "unknown")],
)  # fmt: skip
def test_room_on_the_disk(free: int | None, writable: bool, severity: str) -> None:
    place = storage.Room(
        folder="r", purpose="the run", free=free, wanted=GIB, least=2**20, writable=writable
    )
    assert only(storage.check_room([place])).severity == severity


def test_nothing_is_written_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert not storage.room(folder, "the run", GIB).writable


def test_rights_alone_do_not_tell_where_a_folder_can_be_made() -> None:
    assert not storage.room(Path("/proc"), "the run", GIB).writable  # of root too


def test_room_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    place = storage.room(tmp_path / "a" / "b", "a run", 1)
    assert place.free is not None and place.free > 0 and place.writable


# --- the host ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "severity"),
    [((1024, 1024), "fail"), ((1024, 65536), "warn"), ((65536, 65536), "ok"), ((-1, -1), "ok")],
)
def test_open_files(limits: tuple[int, int], severity: str) -> None:
    assert machine.check_open_files(MachineFacts(open_files=limits), 256, 64).severity == (
        "ok" if severity == "ok" else severity if limits[0] < 1088 else "ok"
    )


@pytest.mark.parametrize(
    ("free", "ranks", "severity"),
    [(64 * 2**20, 8, "fail"), (600 * 2**20, 8, "warn"), (16 * GIB, 8, "ok"),
     (64 * 2**20, 1, "ok"), (None, 8, "unknown")],
)  # fmt: skip
def test_shared_memory(free: int | None, ranks: int, severity: str) -> None:
    """64 MiB is what a container has unless it is told otherwise."""
    assert machine.check_shm(MachineFacts(shm_free=free), ranks).severity == severity


def test_cores_by_the_cgroups_limit() -> None:
    facts = MachineFacts(cores=64, cpu_limit=4.0)
    said = machine.check_cpu(facts, 8)
    assert said.severity == "warn" and "cgroup" in said.what
    assert machine.check_cpu(MachineFacts(cores=64), 8).severity == "ok"


def test_huge_pages_set_aside() -> None:
    facts = MachineFacts(memory_bytes=100 * GIB, huge_reserved=50 * GIB, huge_pages="[never] x")
    assert machine.check_huge_pages(facts).severity == "warn"
    meminfo = "HugePages_Free:      512\nHugepagesize:       2048 kB\n"
    assert machine.reserved_pages(meminfo) == GIB
    assert machine.reserved_pages("") is None


def test_the_clock() -> None:
    past = MachineFacts(now_s=0.0, newest_file_s=1.7e9)
    assert machine.check_clock(past).severity == "warn"
    assert machine.check_clock(MachineFacts(now_s=2e9, clock_source="hpet")).severity == "warn"
    assert machine.check_clock(MachineFacts(now_s=2e9, newest_file_s=1e9)).severity == "ok"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_lowest_limit_of_the_groups_above_holds(tmp_path: Path) -> None:
    root, own = tmp_path / "cg", tmp_path / "own"
    write(root / "pod" / "box", cpu__max="max 100000", memory__max="max")
    write(root / "pod", cpu__max="350000 100000", memory__max=str(8 * GIB))
    (root / "pod" / "memory.current").write_text(str(GIB))
    own.write_text("0::/pod/box\n")
    assert machine.read_cgroup(root, own) == (3.5, 8 * GIB, GIB)
    facts = MachineFacts(memory_available=32 * GIB, memory_limit=8 * GIB, memory_used=GIB)
    assert facts.memory_usable == 7 * GIB


def test_limits_of_the_first_cgroup_version(tmp_path: Path) -> None:
    root, own = tmp_path / "cg", tmp_path / "own"
    write(root / "memory", memory__limit_in_bytes=str(4 * GIB), memory__usage_in_bytes="5")
    cpu = root / "cpu" / "x"
    cpu.mkdir(parents=True)
    (cpu / "cpu.cfs_quota_us").write_text("-1")
    (cpu / "cpu.cfs_period_us").write_text("100000")
    own.write_text("4:memory:/gone\n1:cpu,cpuacct:/x\n")
    assert machine.read_cgroup(root, own) == (None, 4 * GIB, 5)
    (cpu / "cpu.cfs_quota_us").write_text("150000")
    assert machine.read_cgroup(root, own)[0] == 1.5
    (root / "memory" / "memory.limit_in_bytes").write_text(str(2**63 - 4096))  # no limit
    assert machine.read_cgroup(root, own)[1] is None
    assert machine.read_cgroup(root, tmp_path / "none") == (None, None, None)


# --- the GPUs ---------------------------------------------------------------------------------


def eight(nvlink: bool = True, **changes: Any) -> Gpus:
    fields: dict[str, Any] = {"name": "H200", "capability": "9.0", "numa_node": 0, **changes}
    return Gpus(
        driver="580",
        cuda="13.0",
        gpus=tuple(Gpu(index=i, **fields) for i in range(8)),
        links=tuple(
            Link(first=i, second=j, nvlink=nvlink, path="PCIe within one NUMA node")
            for i in range(8)
            for j in range(i + 1, 8)
        ),
    )


def on(found: Gpus, wanted: int) -> list[Finding]:
    return list(check_gpus(found, found.visible(None), wanted))


def test_absent_gpus_are_absent_and_fail_only_a_plan_that_wants_them() -> None:
    none = Gpus(absent="no NVIDIA driver is on this machine")
    assert only(check_gpus(none, (), 0)).severity == "ok"
    said = only(check_gpus(none, (), 8))
    assert said.severity == "fail" and "8 wanted, none here" in said.what


def test_eight_alike_gpus_with_nvlink_are_in_order() -> None:
    assert {f.severity for f in on(eight(), 8)} == {"ok"}


@pytest.mark.parametrize(
    ("found", "wanted", "severity", "code"),
    [
        (eight(), 16, "fail", "count"),
        (eight(nvlink=False), 8, "warn", "links"),
        (eight(partitioned=True), 8, "warn", "mig"),
        (eight(uncorrected_errors=2), 8, "warn", "ecc"),
        (eight(pcie_width=4, pcie_width_max=16), 8, "warn", "pcie"),
        (eight(processes=(GpuProcess(pid=7, name="python", used_bytes=GIB),)), 8, "warn",
         "processes"),
    ],
)  # fmt: skip
def test_each_fault_of_the_gpus(found: Gpus, wanted: int, severity: str, code: str) -> None:
    told = on(found, wanted)
    assert set(codes(told, severity)) == {code}


def test_unlike_gpus_numa_nodes_and_untold_links() -> None:
    mixed = Gpus(
        gpus=(
            Gpu(index=0, name="A", capability="8.0", numa_node=0),
            Gpu(index=1, name="B", capability="9.0", numa_node=1),
        )
    )
    told = on(mixed, 2)
    assert set(codes(told, "warn")) == {"alike", "numa"} and codes(told, "unknown") == ["links"]
    hidden = list(check_gpus(eight(), eight().visible("0,1"), 8))
    assert "hides 6" in only(f for f in hidden if f.severity == "fail").what
