"""Which GPUs the compiled kernels of a package have device code for, told without a GPU.

A shared object carries its device code in fat binaries: cubins, each for one architecture, and
sometimes PTX, which the driver compiles for newer ones. NVIDIA's own `cuobjdump` lists both; it is
found in the package `nvidia-cuda-cuobjdump`, in `triton`, or on the PATH. What runs where is told
in NVIDIA's CUDA programming guide, under binary and PTX compatibility.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from engines.base import EngineUsageError

_SHARED_OBJECT = re.compile(r"\.so(\.\d+)*$")
_ARCH = re.compile(r"(?:sm_|compute_)?(\d{1,3})(?:\.(\d))?([af]?)")
_LISTED = re.compile(r"\.(?:sm|compute)_(\d+[af]?)\.(?:cubin|ptx)\s*$", re.M)
_SECTION = b".nv_fatbin"
OLDEST = 3
"""The oldest major that CUDA has known for years: 12 without its minor is no 1.2."""
_ELF64 = struct.Struct("<4sB35xQ10xHH2x")
"""A header's magic and word size, where its section table lies, and the entries' size and count."""


class Arch(NamedTuple):
    """A GPU's architecture (compute capability), or what code was compiled for.

    `suffix`: "" (this minor version and later ones of the same major), "f" (the same for a family's
    own features), "a" (this one alone).
    """

    major: int
    minor: int
    suffix: str = ""

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}"

    @property
    def sm(self) -> str:
        """As compilers write it, such as sm_120a."""
        return f"sm_{self.major}{self.minor}{self.suffix}"


def parse_arch(text: str) -> Arch:
    """12.0, 12.0a, 120, sm_120a or compute_120 -> Arch. Raises `EngineUsageError`."""
    found = _ARCH.fullmatch(text.strip().lower())
    if found is not None:
        digits, minor, suffix = found.groups()
        if minor is not None:
            return Arch(int(digits), int(minor), suffix)
        if len(digits) > 1 and int(digits[:-1]) >= OLDEST:
            return Arch(int(digits[:-1]), int(digits[-1]), suffix)
    raise EngineUsageError(
        f"--arch {text}: no compute capability; write it as major.minor, such as 12.0 (RTX PRO "
        "6000) or 9.0 (H200)"
    )


def cubin_runs(code: Arch, gpu: Arch) -> bool:
    """Whether a cubin for `code` runs on `gpu`: the same major, a minor not above the GPU's."""
    if code.suffix == "a":
        return (code.major, code.minor) == (gpu.major, gpu.minor)
    return code.major == gpu.major and code.minor <= gpu.minor


def ptx_runs(code: Arch, gpu: Arch) -> bool:
    """Whether the driver can compile PTX for `code` on `gpu`: any later one, unless "a" or "f"."""
    if code.suffix:
        return cubin_runs(code, gpu)
    return (code.major, code.minor) <= (gpu.major, gpu.minor)


@dataclass(frozen=True, kw_only=True)
class KernelObject:
    """One shared object with device code: `path` within the wheel or folder that was given.

    `damaged`: why it could not be read, nor would be loaded.
    """

    path: str
    architectures: tuple[Arch, ...] = ()
    ptx: tuple[Arch, ...] = ()
    damaged: str | None = None

    def covers(self, gpu: Arch) -> bool:
        """Whether it has code that runs on `gpu`."""
        return any(cubin_runs(code, gpu) for code in self.architectures) or any(
            ptx_runs(code, gpu) for code in self.ptx
        )


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a shared object is for. `needed`: without it nothing runs; else `instead` helps."""

    what: str
    needed: bool
    instead: str


_BUILD = "build sgl-kernel for it"
_USES = {
    "common_ops": Use(what="SGLang itself", needed=True, instead=_BUILD),
    "flash_ops": Use(
        what="SGLang's attention backend fa3",
        needed=False,
        instead=f"choose triton, flashinfer or (MLA) trtllm_mla, or {_BUILD}",
    ),
    "flashmla_ops": Use(
        what="SGLang's attention backend flashmla",
        needed=False,
        instead=f"choose triton or trtllm_mla, or {_BUILD}",
    ),
    "spatial_ops": Use(
        what="SGLang's split of a GPU's processors",
        needed=False,
        instead=f"leave it off, or {_BUILD}",
    ),
    "infllm_ops": Use(
        what="SGLang's InfLLM sparse attention", needed=False, instead=f"leave it off, or {_BUILD}"
    ),
    "_C": Use(what="vLLM itself", needed=True, instead="install a vLLM built for it"),
    "_moe_C": Use(
        what="vLLM's mixture of experts", needed=True, instead="install a vLLM built for it"
    ),
    "_vllm_fa2_C": Use(
        what="vLLM's attention backend FLASH_ATTN (2)",
        needed=False,
        instead="choose FLASHINFER, TRITON_ATTN or (MLA) TRITON_MLA",
    ),
    "_vllm_fa3_C": Use(
        what="vLLM's FlashAttention 3",
        needed=False,
        instead="it is for 9.0 alone; others are chosen",
    ),
    "_flashmla_C": Use(
        what="vLLM's attention backend FLASHMLA", needed=False, instead="choose TRITON_MLA"
    ),
    "_flashmla_extension_C": Use(
        what="vLLM's sparse FLASHMLA", needed=False, instead="choose TRITON_MLA"
    ),
}


def use_of(path: str) -> Use | None:
    """What an object is for, by its file's name; None where that is not known."""
    return _USES.get(Path(path).name.partition(".")[0])


def is_loaded(path: str, gpu: Arch) -> bool:
    """Whether the package takes this object on `gpu`.

    sgl_kernel holds common_ops twice and takes `sm90/` on 9.0, `sm100/` on every other GPU
    (load_utils.py of 0.4.10).
    """
    variant = Path(path).parent.name
    if variant not in ("sm90", "sm100"):
        return True
    return (variant == "sm90") == ((gpu.major, gpu.minor) == (9, 0))


def scan(path: Path) -> Iterator[KernelObject]:
    """Every shared object with device code in a wheel, a folder, or the one file given.

    Raises `EngineUsageError` where `path` is none of them, or the lister is not found.
    """
    lister = cuobjdump()
    for name, held in _objects(path):
        with held as file:
            damaged = _cut_off(file)
            if damaged is not None:
                yield KernelObject(path=name, damaged=damaged)
            elif _has_device_code(file):
                yield KernelObject(
                    path=name,
                    architectures=_listed(lister, "--list-elf", file),
                    ptx=_listed(lister, "--list-ptx", file),
                )


def cuobjdump() -> Path:
    """NVIDIA's lister of device code. Raises `EngineUsageError` where there is none."""
    for package, pattern in (("nvidia", "*/bin/cuobjdump"), ("triton", "**/bin/cuobjdump")):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for file in sorted(Path(folder).glob(pattern)):
                return _made_executable(file)
    on_path = shutil.which("cuobjdump")
    if on_path is None:
        raise EngineUsageError(
            "cuobjdump, which lists device code, is not here: pip install nvidia-cuda-cuobjdump"
        )
    return Path(on_path)


def _made_executable(file: Path) -> Path:
    if not os.access(file, os.X_OK):
        try:
            file.chmod(file.stat().st_mode | 0o111)
        except OSError as error:
            raise EngineUsageError(f"{file} cannot be made executable: {error.strerror}") from None
    return file


@contextmanager
def _as_it_lies(file: Path) -> Iterator[Path]:
    yield file


@contextmanager
def _unpacked(wheel: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="spec-harness-") as folder:
        free = shutil.disk_usage(folder).free
        if member.file_size > free:
            raise EngineUsageError(
                f"{member.filename} unpacks to {member.file_size / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} are free in {Path(folder).parent}: set TMPDIR to a larger disk"
            )
        file = Path(folder) / Path(member.filename).name
        with wheel.open(member) as packed, file.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
        yield file


def _objects(path: Path) -> Iterator[tuple[str, AbstractContextManager[Path]]]:
    """The shared objects by name, each unpacked only while it is looked at."""
    if path.is_dir():
        seen: set[tuple[int, int]] = set()
        for file in sorted(path.rglob("*.so*")):
            if file.is_file() and _SHARED_OBJECT.search(file.name):
                stat = file.stat()  # one file under several names is told once
                if (stat.st_dev, stat.st_ino) not in seen:
                    seen.add((stat.st_dev, stat.st_ino))
                    yield str(file.relative_to(path)), _as_it_lies(file)
    elif not path.is_file():
        raise EngineUsageError(f"--kernels {path}: no such wheel, folder or shared object")
    elif zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as wheel:
                for member in wheel.infolist():
                    if _SHARED_OBJECT.search(member.filename):
                        yield member.filename, _unpacked(wheel, member)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise EngineUsageError(f"--kernels {path}: a damaged wheel ({error})") from None
    elif _begins_as_elf(path):
        yield path.name, _as_it_lies(path)
    else:
        raise EngineUsageError(f"--kernels {path}: neither a wheel nor a shared object")


def _cut_off(file: Path) -> str | None:
    """Why an ELF file is not whole: its section table is told to lie behind its end."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(_ELF64.size)
    if len(head) < _ELF64.size:
        return f"cut off: {size} bytes" if head[:4] in (b"", b"\x7fELF") else None
    magic, bits, sections, entry, count = _ELF64.unpack(head)
    whole = sections + entry * count
    if magic == b"\x7fELF" and bits == 2 and whole > size:
        return f"cut off: {size} of {whole} bytes"
    return None


def _has_device_code(file: Path) -> bool:
    """Whether there is a fat binary in it: the names of the sections stand near the file's end."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data[:4] == b"\x7fELF" and data.rfind(_SECTION) >= 0


def _listed(lister: Path, option: str, file: Path) -> tuple[Arch, ...]:
    """The architectures that `cuobjdump` lists, each once, in order."""
    ran = subprocess.run(
        [str(lister), option, str(file)], capture_output=True, text=True, errors="replace"
    )
    if ran.returncode != 0 and "info" not in ran.stderr + ran.stdout:
        last = (ran.stderr.strip() or ran.stdout.strip() or "no output").splitlines()[-1]
        raise EngineUsageError(f"{file}: cuobjdump ended with {ran.returncode}: {last[:200]}")
    return tuple(sorted({parse_arch(name) for name in _LISTED.findall(ran.stdout)}))


def _begins_as_elf(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(4) == b"\x7fELF"
