"""Building kernels: a small real project stands for SGLang's sources, a script for nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import build as building
from engines.base import EngineFailed, EngineUsageError
from engines.build import Build, build, free_memory_gib, jobs_for
from engines.console import Units
from engines.kernels import parse_arch
from engines.recipes import RECIPES

pytest.importorskip("scikit_build_core", reason="the test extra is not installed")

UNITS = 6
SMALL = 0.01  # GiB: these projects are small, and the real need is no matter of this machine
CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(sgl-kernel LANGUAGES C)
if(NOT SGL_KERNEL_ENABLE_SM100A)
    message(FATAL_ERROR "not told to build for 12.0")
endif()
file(GLOB UNITS CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.c")
add_library(common_ops MODULE ${UNITS})
install(TARGETS common_ops LIBRARY DESTINATION sgl_kernel/sm100)
"""
PROJECT = """
[build-system]
requires = ["scikit-build-core"]
build-backend = "scikit_build_core.build"
[project]
name = "sgl-kernel"
version = "0.0.1"
[tool.scikit-build]
wheel.packages = ["sgl_kernel"]
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "DISK_GIB", SMALL)


def test_a_disk_that_is_too_small_is_told_before_anything_is_unpacked(
    source: Path, nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "DISK_GIB", 1e9)
    with pytest.raises(EngineUsageError, match=r"needs about 1e\+09 GiB .* make room"):
        build(wanted(source), root=tmp_path)
    assert not list((tmp_path / ".venvs").rglob("CMakeLists.txt"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tree = tmp_path / "sglang" / "sgl-kernel"
    (tree / "sgl_kernel").mkdir(parents=True)
    (tree / "sgl_kernel" / "__init__.py").touch()
    (tree / "CMakeLists.txt").write_text(CMAKE)
    (tree / "pyproject.toml").write_text(PROJECT)
    for unit in range(UNITS):
        (tree / f"u{unit}.c").write_text(f"int unit{unit}(void) {{ return {unit}; }}\n")
    return tree.parent


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit of version 12.8 on the PATH, as far as its version is asked for."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return toolkit(tmp_path / "cuda", "12.8", monkeypatch)


def toolkit(home: Path, release: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    (home / "bin").mkdir(parents=True, exist_ok=True)
    program = home / "bin" / "nvcc"
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{Path(sys.executable).parent}:/usr/bin:/bin")
    return program


def wanted(source: Path, **more: object) -> Build:
    fields = {"package": "sgl-kernel", "arch": parse_arch("12.0a"), "source": source,
              "python": Path(sys.executable), "jobs": 1}  # fmt: skip
    return Build(**{**fields, **more})  # type: ignore[arg-type]


def compiled(log: Path) -> set[str]:
    """The units that the log's last build compiled."""
    last = log.read_text().rpartition("=== ")[2]
    return {f"u{i}" for i in range(UNITS) if f"/u{i}.c.o -c" in last or f"u{i}.c.o  -c" in last}


def test_a_wheel_is_built_and_only_what_changed_is_compiled_again(
    source: Path, nvcc: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = build(wanted(source), root=tmp_path)
    with zipfile.ZipFile(wheel) as held:
        assert any(n.startswith("sgl_kernel/sm100/") and n.endswith(".so") for n in held.namelist())
    (log,) = (tmp_path / ".venvs").rglob("build.log")
    assert compiled(log) == {f"u{i}" for i in range(UNITS)}
    assert "1 jobs" in capfd.readouterr().err
    (source / "sgl-kernel" / "u3.c").write_text("int unit3(void) { return 33; }\n")
    build(wanted(source), root=tmp_path)
    assert compiled(log) == {"u3"}
    assert "going on with what is compiled already" in capfd.readouterr().err


def test_a_compiler_s_error_is_the_cause_and_the_rest_is_kept(
    source: Path, nvcc: Path, tmp_path: Path
) -> None:
    broken = source / "sgl-kernel" / f"u{UNITS - 1}.c"
    broken.write_text("int unit(void) { return nothing; }\n")
    with pytest.raises(EngineFailed, match=r"nothing.*undeclared") as failed:
        build(wanted(source), root=tmp_path)
    assert failed.value.log_path is not None
    assert failed.value.log_path.is_file()
    broken.write_text("int unit(void) { return 1; }\n")
    build(wanted(source), root=tmp_path)
    assert f"u{UNITS - 1}" in compiled(failed.value.log_path)
    assert len(compiled(failed.value.log_path)) < UNITS


def test_an_archive_is_unpacked_once(source: Path, nvcc: Path, tmp_path: Path) -> None:
    archive = tmp_path / "sglang.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(source, "sglang-0.5.23")
    place = tmp_path / "source"
    first = building.unpacked(archive, place)
    assert first == place / "sglang-0.5.23" / "sgl-kernel"
    (first / "mark").touch()
    assert (building.unpacked(archive, place) / "mark").exists()


def test_a_cut_archive_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    archive = tmp_path / "sglang.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(source, "sglang")
        packed.add(shutil.which("ls") or sys.executable, "filler")
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(EngineUsageError, match="cannot be unpacked"):
        building.unpacked(archive, tmp_path / "source")
    assert not (tmp_path / "source").exists()
    assert not list(tmp_path.glob(".source-*"))


def test_an_older_toolkit_is_told_before_anything_is_compiled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit(tmp_path / "old", "12.4", monkeypatch)
    with pytest.raises(EngineUsageError, match=r"CUDA 12\.4, and sm_120a needs 12\.8 or newer"):
        build(wanted(source), root=tmp_path)
    assert not (tmp_path / ".venvs").exists()


def test_what_is_missing_is_named_at_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_which", lambda name: None)
    with pytest.raises(EngineUsageError, match="needs nvcc, cmake, ninja on the PATH"):
        build(wanted(source), root=tmp_path)


def test_an_older_cmake_than_the_source_asks_for_is_told(
    source: Path, nvcc: Path, tmp_path: Path
) -> None:
    lists = source / "sgl-kernel" / "CMakeLists.txt"
    lists.write_text(CMAKE.replace("3.18", "99.1 FATAL_ERROR"))
    with pytest.raises(EngineUsageError, match=r"needs 99\.1 or newer"):
        build(wanted(source), root=tmp_path)


@pytest.mark.parametrize("what", ["nothing", "empty", "text"])
def test_a_source_that_is_none_is_told(what: str, tmp_path: Path) -> None:
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    elif what == "text":
        path.write_text("no archive")
    with pytest.raises(EngineUsageError, match="--source"):
        build(wanted(path), root=tmp_path)


def test_the_command_line_ends_with_the_coverage_or_one_line(
    source: Path, nvcc: Path, tmp_path: Path
) -> None:
    code = f"import engines.build as b; b.DISK_GIB = {SMALL}; from harness.cli import main; main()"
    command = [sys.executable, "-c", code, "engines", "build", "sgl-kernel"]
    command += ["--arch", "12.0a", "--source", str(source), "--python", sys.executable]
    env = {**os.environ, "SPEC_HARNESS_VENVS": str(tmp_path)}
    ran = subprocess.run(
        command, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    # The small project holds no device code, which is what the check at the end is for.
    assert ran.returncode == 2, ran.stderr
    assert "no shared object with device code" in ran.stderr.splitlines()[-1]
    assert list((tmp_path / ".venvs").rglob("*.whl"))


@given(st.integers(1, 256), st.floats(0, 4096))
def test_jobs_never_outgrow_cores_or_memory(cores: int, memory: float) -> None:
    jobs = jobs_for(cores, memory)
    assert 1 <= jobs <= cores
    assert jobs == 1 or jobs * building.GIB_PER_JOB <= memory


def test_the_time_left_is_that_of_the_units_compiled_here() -> None:
    units = Units()
    assert units.feed("-- Detecting CXX compiler", 0) is None
    assert units.feed("  [1/11] Building CUDA object a.o", 10) == "1 of 11 units compiled"
    assert units.feed("[6/11] Building", 60) == "6 of 11 units compiled, about 50 s left"
    assert (
        units.feed("\x1b[32m[9/101] Building", 370) == "9 of 101 units compiled, about 69 min left"
    )
    assert units.feed("[1/3] Linking", 400) == "1 of 3 units compiled"  # another round of ninja


def test_the_engines_on_gpus_have_recipes() -> None:
    for name in ("vllm", "sglang"):
        check = RECIPES[name].steps[-1]
        compile(check.arguments[0], name, "exec")
        assert any(f"{name}==" in word for step in RECIPES[name].steps for word in step.arguments)


@pytest.mark.parametrize(
    ("folder", "names", "cache"),
    [
        (".", ("memory.max", "memory.current"), "inactive_file"),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
    ],
)
def test_cached_files_of_a_control_group_are_free_memory(
    tmp_path: Path, folder: str, names: tuple[str, str], cache: str
) -> None:
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / names[0]).write_text(f"{2**30}\n")
    (group / names[1]).write_text(f"{2**30 - 2**20}\n")
    assert free_memory_gib(tmp_path) == 2**20 / 2**30
    (group / "memory.stat").write_text(f"anon 5\nactive_file 7\n{cache} {2**21}\n")
    assert free_memory_gib(tmp_path) == 3 * 2**20 / 2**30
    (group / names[0]).write_text("max\n")
    assert free_memory_gib(tmp_path) > 3 * 2**20 / 2**30
