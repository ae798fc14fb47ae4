"""Building SGLang's kernels from source, for GPUs that a published wheel does not cover.

The build goes through the source's own build system (scikit-build-core, CMake, ninja), in a folder
that is kept: what is compiled already is not compiled again, after an interruption or a change.
Everything that can be seen missing is told before anything is unpacked or compiled.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engines.base import EngineFailed, EngineUsageError
from engines.console import run_step
from engines.install import engine_python, environments_root
from engines.kernels import Arch
from engines.recipes import Step

PACKAGES = ("sgl-kernel",)
GIB_PER_JOB = 8.0
"""What one compiler is given, on the safe side; no figure of a real build stands behind it."""
DISK_GIB = 20.0
OLDEST_CUDA = {
    # The CUDA toolkit whose nvcc first knew the architecture (release notes of each).
    (9, 0): (11, 8),
    (10, 0): (12, 8),
    (12, 0): (12, 8),
    (10, 3): (12, 9),
    (12, 1): (12, 9),
    (11, 0): (13, 0),
}
_CMAKE_MINIMUM = re.compile(r"cmake_minimum_required\s*\(\s*VERSION\s+(\d+(?:\.\d+)+)", re.I)
_VERSION = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class Build:
    """What to build. `python`: of the environment it is for; None: that of SGLang on GPUs.

    `jobs` None: as many as cores and memory allow. `defines`: CMake's, beside the build's own.
    """

    package: str
    arch: Arch
    source: Path
    python: Path | None = None
    jobs: int | None = None
    defines: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The programs of a build, each found and new enough."""

    nvcc: Path
    cmake: Path
    ninja: Path
    ccache: Path | None


def build(wanted: Build, *, root: Path | None = None) -> Path:
    """Build a wheel and return its path; progress on stderr.

    Raises `EngineUsageError` for what is missing or too old, `EngineFailed` (with the log's path)
    where the build fails.
    """
    if wanted.package not in PACKAGES:
        raise EngineUsageError(
            f"nothing is known of building {wanted.package!r}: known is {', '.join(PACKAGES)}"
        )
    check_source(wanted.source)
    tools = find_tools(wanted)
    python = wanted.python or engine_python("sglang")
    if not _imports(python, "scikit_build_core"):
        raise EngineUsageError(
            f"{python} has no scikit-build-core, which the build goes through: "
            f"`{python} -m pip install scikit-build-core`"
        )
    folder = (root or environments_root()).absolute() / ".venvs" / f"build-{wanted.package}"
    folder = folder / f"{wanted.arch.sm}-{_key(wanted.source)}"
    folder.mkdir(parents=True, exist_ok=True)
    _check_disk(folder)
    source = unpacked(wanted.source, folder / "source")
    check_cmake(tools.cmake, source)
    jobs = wanted.jobs or jobs_for(os.cpu_count() or 1, free_memory_gib())
    log = folder / "build.log"
    again = " (going on with what is compiled already)" if (folder / "build").is_dir() else ""
    print(
        f"{wanted.package} for {wanted.arch.sm}: {jobs} jobs, "
        f"{'ccache' if tools.ccache else 'no ccache'}, in {folder}{again}; log: {log}",
        file=sys.stderr,
        flush=True,
    )
    wheels = folder / "wheels"
    step = Step(title=f"build {wanted.package} for {wanted.arch.sm}", kind="pip")
    command = _command(python, source, wheels, folder / "build", wanted)
    run_step(wanted.package, step, command, _environment(tools, jobs, folder), log)
    found = sorted(wheels.glob("*.whl"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise EngineFailed(f"the build made no wheel; log: {log}", phase="build", log_path=log)
    return found[-1]


def jobs_for(cores: int, memory_gib: float) -> int:
    """How many compilers may run at once: one a core, and no more than the memory bears."""
    return max(1, min(cores, int(memory_gib / GIB_PER_JOB)))


def free_memory_gib(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory that is free now, within this process's control group (`groups`: where they are)."""
    import psutil

    free = float(psutil.virtual_memory().available)
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = int((groups / limit).read_text()) - int((groups / used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        # Files read and not used since count as used; the kernel drops them where memory is wanted.
        most += _group_figure((groups / limit).with_name("memory.stat"), cache)
        free = min(free, float(max(most, 0)))
    return free / 2**30


def _group_figure(file: Path, name: str) -> int:
    """A figure of a control group's `memory.stat`; 0 where it is not told."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def find_tools(wanted: Build) -> Tools:
    """nvcc, cmake and ninja, the first new enough for the GPU. Raises `EngineUsageError`."""
    missing = [name for name in ("nvcc", "cmake", "ninja") if _which(name) is None]
    if missing:
        raise EngineUsageError(
            f"building {wanted.package} needs {', '.join(missing)} on the PATH: nvcc comes with "
            "the CUDA toolkit (also looked for in $CUDA_HOME/bin and /usr/local/cuda/bin), cmake "
            "and ninja with `pip install cmake ninja`"
        )
    nvcc, cmake, ninja = (path for n in ("nvcc", "cmake", "ninja") if (path := _which(n)))
    _check_cuda(nvcc, wanted.arch)
    return Tools(nvcc=nvcc, cmake=cmake, ninja=ninja, ccache=_which("ccache"))


def _which(name: str) -> Path | None:
    """On the PATH, beside this Python, or (nvcc) where CUDA is usually put."""
    folders = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    if name == "nvcc":
        homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        folders = [*(f"{home}/bin" for home in homes[:2] if home), *folders, f"{homes[2]}/bin"]
    found = shutil.which(name, path=os.pathsep.join(folders))
    return None if found is None else Path(found)


def _check_cuda(nvcc: Path, arch: Arch) -> None:
    needed = OLDEST_CUDA.get((arch.major, arch.minor))
    said = _said([str(nvcc), "--version"])
    found = re.search(r"release (\d+)\.(\d+)", said)
    if found is None:
        raise EngineUsageError(f"{nvcc} --version names no release: {said.strip()[-200:]!r}")
    have = (int(found[1]), int(found[2]))
    if needed is not None and have < needed:
        raise EngineUsageError(
            f"{nvcc} is of CUDA {have[0]}.{have[1]}, and {arch.sm} needs {needed[0]}.{needed[1]} "
            "or newer: install that toolkit, or name it with CUDA_HOME"
        )


def check_cmake(cmake: Path, source: Path) -> None:
    """Raise `EngineUsageError` where cmake is older than the source asks for."""
    text = (source / "CMakeLists.txt").read_text("utf-8", "replace")
    asked, have = _CMAKE_MINIMUM.search(text), _VERSION.search(_said([str(cmake), "--version"]))
    if asked is None or have is None:
        return  # cmake itself will say
    needed = tuple(int(part) for part in asked[1].split(".")[:2])
    if (int(have[1]), int(have[2])) < needed:
        raise EngineUsageError(
            f"{cmake} is {have[0]}, and {source / 'CMakeLists.txt'} needs {asked[1]} or newer: "
            "`pip install --upgrade cmake`, first on the PATH"
        )


def check_source(source: Path) -> None:
    """Raise `EngineUsageError` where there is neither a source tree nor an archive."""
    if source.is_dir():
        _project(source)
    elif not source.is_file():
        raise EngineUsageError(f"--source {source}: no such folder or archive")
    elif not (tarfile.is_tarfile(source) or zipfile.is_zipfile(source)):
        raise EngineUsageError(f"--source {source}: neither a tar archive nor a zip archive")


def unpacked(source: Path, place: Path) -> Path:
    """The project's folder: the tree given, or the archive's, unpacked whole or not at all.

    An archive unpacked before is left as it is, so that what was compiled from it stays good.
    """
    if source.is_dir():
        return _project(source)
    if not place.is_dir():
        half = Path(tempfile.mkdtemp(dir=place.parent, prefix=".source-"))
        try:
            if zipfile.is_zipfile(source):
                with zipfile.ZipFile(source) as archive:
                    archive.extractall(half)  # it leaves out what would lie outside
            else:
                with tarfile.open(source) as archive:
                    archive.extractall(half, filter="data")
            os.replace(half, place)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
            raise EngineUsageError(f"--source {source}: cannot be unpacked: {error}") from None
        finally:
            shutil.rmtree(half, ignore_errors=True)
    return _project(place)


def _project(tree: Path) -> Path:
    """Where CMakeLists.txt and pyproject.toml lie: at the top, one below, or in `sgl-kernel`."""
    below = [path for path in sorted(tree.iterdir()) if path.is_dir()]
    for folder in (tree, tree / "sgl-kernel", *below, *(path / "sgl-kernel" for path in below)):
        if (folder / "CMakeLists.txt").is_file() and (folder / "pyproject.toml").is_file():
            return folder.absolute()
    raise EngineUsageError(
        f"--source {tree}: holds no project with CMakeLists.txt and pyproject.toml; give the "
        "folder sgl-kernel of SGLang's sources, or an archive of it"
    )


def _key(source: Path) -> str:
    """Names the build folder: by an archive's content, by a tree's place."""
    if source.is_dir():
        return hashlib.sha256(str(source.absolute()).encode()).hexdigest()[:12]
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _command(
    python: Path, source: Path, wheels: Path, build_folder: Path, wanted: Build
) -> list[str]:
    defines = {**_defines(wanted.arch), **wanted.defines}
    settings = [f"build-dir={build_folder}", "build.verbose=true"]
    settings += [f"cmake.define.{name}={value}" for name, value in defines.items()]
    command = [str(python), "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
    for setting in settings:
        command += ["--config-settings", setting]
    return [*command, "--wheel-dir", str(wheels), str(source)]


def _defines(arch: Arch) -> dict[str, str]:
    """SGLang's own options (`sgl-kernel/CMakeLists.txt`).

    Its lists of architectures are fixed: from CUDA 12.8 on they hold 12.0a. What is older than 9.0
    is left out, a third of the work. One thread a compiler, so that memory goes by jobs.
    """
    told = {"SGL_KERNEL_COMPILE_THREADS": "1"}
    if arch.major >= 9:
        told["ENABLE_BELOW_SM90"] = "OFF"
    if arch.major >= 10:
        told["SGL_KERNEL_ENABLE_SM100A"] = "ON"
    return told


def _environment(tools: Tools, jobs: int, folder: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env.update(
        PYTHONUNBUFFERED="1",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        CMAKE_BUILD_PARALLEL_LEVEL=str(jobs),
        MAX_JOBS=str(jobs),
        CMAKE_GENERATOR="Ninja",
        CUDACXX=str(tools.nvcc),
        PATH=os.pathsep.join(
            [*dict.fromkeys(str(t.parent) for t in (tools.cmake, tools.ninja, tools.nvcc)),
             env.get("PATH", os.defpath)]
        ),
    )  # fmt: skip
    if tools.ccache is not None:
        # SGLang's build uses ccache only where CCACHE_DIR is set; others take the launchers.
        env.setdefault("CCACHE_DIR", str(folder.parent / "ccache"))
        for language in ("C", "CXX", "CUDA"):
            env.setdefault(f"CMAKE_{language}_COMPILER_LAUNCHER", str(tools.ccache))
    return env


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free / 2**30
    if free < DISK_GIB and not (folder / "build").is_dir():
        raise EngineUsageError(
            f"a build needs about {DISK_GIB:g} GiB and {folder} has {free:.1f} free: make room, or "
            "set SPEC_HARNESS_VENVS to another folder"
        )


def _imports(python: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-I", "-c", code], timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _said(command: list[str]) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineUsageError(f"{command[0]} cannot be run: {error}") from None
    return ran.stdout + ran.stderr
