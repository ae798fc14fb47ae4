"""Which GPU runs which code: the rules, and what is listed of real device code."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import EngineUsageError
from engines.hardware import Gpu
from engines.install import engine_python
from engines.kernels import Arch, KernelObject, cubin_runs, is_loaded, parse_arch, ptx_runs, scan
from harness.doctoring import kernels as doctor
from harness.doctoring.software import Environment, check_kernels

REPO = Path(__file__).resolve().parents[2]
archs = st.builds(Arch, st.integers(3, 13), st.integers(0, 9), st.sampled_from(["", "a", "f"]))
PTX = ".version 8.8\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }\n"


@pytest.mark.parametrize(
    ("code", "gpu", "cubin", "ptx"),
    [
        ("8.0", "8.9", True, True),
        ("8.6", "8.0", False, False),
        ("8.0", "9.0", False, True),
        ("9.0a", "9.0", True, True),
        ("9.0a", "10.0", False, False),
        ("10.0", "10.3", True, True),
        ("10.0f", "10.3", True, True),
        ("10.0f", "12.0", False, False),
        ("10.3a", "10.0", False, False),
        ("12.0a", "12.0", True, True),
        ("12.0a", "12.1", False, False),
        ("12.0f", "12.1", True, True),
        ("10.0", "12.0", False, True),
    ],
)
def test_what_runs_where(code: str, gpu: str, cubin: bool, ptx: bool) -> None:
    assert cubin_runs(parse_arch(code), parse_arch(gpu)) is cubin
    assert ptx_runs(parse_arch(code), parse_arch(gpu)) is ptx


@given(archs)
def test_an_architecture_is_read_in_every_spelling(arch: Arch) -> None:
    assert parse_arch(str(arch)) == parse_arch(arch.sm) == parse_arch(arch.sm[3:]) == arch
    assert parse_arch(arch.sm.replace("sm", "compute")) == arch


@given(archs, archs)
def test_a_cubin_never_leaves_its_major_and_ptx_covers_what_its_cubin_does(
    code: Arch, gpu: Arch
) -> None:
    if cubin_runs(code, gpu):
        assert code.major == gpu.major
        assert code.minor <= gpu.minor
        assert ptx_runs(code, gpu)


@pytest.mark.parametrize("text", ["", "12", "1", "sm_", "12.0b", "x", "12.00", "9999.0", "-9.0"])
def test_nonsense_is_no_architecture(text: str) -> None:
    with pytest.raises(EngineUsageError, match="no compute capability"):
        parse_arch(text)


def test_sgl_kernel_takes_one_of_its_two_common_ops() -> None:
    for gpu, taken in (("9.0", "sm90"), ("10.0", "sm100"), ("12.0", "sm100"), ("8.9", "sm100")):
        for variant in ("sm90", "sm100"):
            path = f"sgl_kernel/{variant}/common_ops.abi3.so"
            assert is_loaded(path, parse_arch(gpu)) is (variant == taken)


def test_the_object_that_everything_needs_fails_and_an_optional_one_does_not() -> None:
    gpu = parse_arch("12.0")
    hopper = (parse_arch("9.0a"),)
    common = KernelObject(path="sgl_kernel/sm100/common_ops.abi3.so", architectures=hopper, ptx=())
    flash = KernelObject(path="sgl_kernel/flash_ops.abi3.so", architectures=hopper, ptx=())
    other = KernelObject(path="sgl_kernel/sm90/common_ops.abi3.so", architectures=hopper, ptx=())
    assert doctor.coverage(common, gpu).fails
    assert "SGLang itself" in doctor.coverage(common, gpu).note
    optional = doctor.coverage(flash, gpu)
    assert not optional.fails
    assert "fa3" in optional.note
    assert "triton" in optional.note
    assert doctor.coverage(other, gpu).note == "not taken on this GPU"


def _ptxas() -> Path:
    """The assembler that comes with Triton, in SGLang's environment."""
    try:
        python = engine_python("sglang-cpu")
    except EngineUsageError as error:
        pytest.skip(str(error))
    code = "import triton, os; print(os.path.dirname(triton.__file__))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()) / "backends" / "nvidia" / "bin" / "ptxas"


def _cubin(ptxas: Path, folder: Path, arch: Arch) -> bytes:
    source, out = folder / f"{arch.sm}.ptx", folder / f"{arch.sm}.cubin"
    source.write_text(PTX.replace("sm_90", arch.sm), encoding="utf-8")
    subprocess.run([ptxas, "--gpu-name", arch.sm, source, "-o", out], check=True)
    return out.read_bytes()


def _fat_binary(cubins: list[tuple[Arch, bytes]]) -> bytes:
    """NVIDIA's container: a header, then each cubin behind a header of its own."""
    body = b""
    for arch, code in cubins:
        code += bytes(-len(code) % 8)
        number = arch.major * 10 + arch.minor
        head = struct.pack("<HHIQIIHHIQQ", 2, 0x101, 64, len(code), 0, 0, 8, 1, number, 0, 0x11)
        body += head.ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def _shared_object(fat: bytes) -> bytes:
    """The least of an ELF file that holds a fat binary."""
    names = b"\0.nv_fatbin\0.nvFatBinSegment\0.shstrtab\0"
    segment = struct.pack("<IIQQ", 0x466243B1, 1, 0x10000, 0)
    parts = [(b".nv_fatbin", 1, 2, 0x10000, fat), (b".nvFatBinSegment", 1, 3, 0x20000, segment)]
    parts.append((b".shstrtab", 3, 0, 0, names))
    at, table, body = 64, bytes(64), b""
    for name, kind, flags, address, data in parts:
        table += struct.pack(
            "<IIQQQQIIQQ", names.index(name), kind, flags, address, at, len(data), 0, 0, 8, 0
        )
        at, body = at + len(data), body + data
    body += bytes(-at % 8)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    where = 64 + len(body)
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, where, 0, 64, 56, 0, 64, 4, 3)
    return head + body + table


@pytest.mark.engine
def test_real_device_code_is_listed_in_a_folder_and_in_a_wheel(tmp_path: Path) -> None:
    ptxas = _ptxas()
    # "f" is left out: cuobjdump does not list it apart from the plain one, and both run alike
    told = [parse_arch(a) for a in ("8.0", "9.0a", "10.0", "10.3a", "12.0a")]
    blob = _shared_object(_fat_binary([(a, _cubin(ptxas, tmp_path, a)) for a in told]))
    folder = tmp_path / "sgl_kernel" / "sm100"
    folder.mkdir(parents=True)
    (folder / "common_ops.abi3.so").write_bytes(blob)
    (folder / "plain.so").write_bytes(Path(sys.executable).read_bytes())  # no device code
    (folder / "again.so").hardlink_to(folder / "common_ops.abi3.so")
    (found,) = [k for k in scan(tmp_path / "sgl_kernel") if k.architectures]
    assert sorted(found.architectures) == sorted(told)
    assert found.ptx == ()
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        file.write(folder / "common_ops.abi3.so", "sgl_kernel/sm100/common_ops.abi3.so")
    report = doctor.kernels(wheel, "12.0", lambda line: None)
    assert [o.path for o in report.objects] == ["sgl_kernel/sm100/common_ops.abi3.so"]
    assert report.objects[0].covered
    assert not report.fails
    assert doctor.kernels(wheel, "12.1", lambda line: None).fails
    assert not doctor.kernels(wheel, "8.9", lambda line: None).fails


@pytest.mark.engine
def test_the_kernels_of_an_environment_are_held_against_the_gpus_at_hand(tmp_path: Path) -> None:
    ptxas, hopper = _ptxas(), parse_arch("9.0a")
    folder = tmp_path / "site" / "sgl_kernel"
    (folder / "sm100").mkdir(parents=True)
    blob = _shared_object(_fat_binary([(hopper, _cubin(ptxas, tmp_path, hopper))]))
    (folder / "flash_ops.abi3.so").write_bytes(blob)
    found = Environment(name="sglang", state="ready", site=tmp_path / "site")
    blackwell = Gpu(index=0, name="RTX PRO 6000", capability="12.0")

    def told(*gpus: Gpu) -> list[tuple[str, str]]:
        checks = check_kernels(found, gpus, lambda line: None)
        return [(f.severity, f.where) for f in checks if f.where.startswith(str(folder))]

    assert told() == []
    assert told(Gpu(index=0, name="H200", capability="9.0")) == [("ok", str(folder))]
    assert told(blackwell) == [("warn", str(folder / "flash_ops.abi3.so"))]
    (folder / "sm100" / "common_ops.abi3.so").write_bytes(blob)
    assert ("fail", str(folder / "sm100" / "common_ops.abi3.so")) in told(blackwell)


@pytest.mark.engine
def test_a_cut_off_object_is_a_finding_and_the_others_are_told(tmp_path: Path) -> None:
    ptxas = _ptxas()
    ampere = parse_arch("8.0")
    blob = _shared_object(_fat_binary([(ampere, _cubin(ptxas, tmp_path, ampere))]))
    (tmp_path / "whole.so").write_bytes(blob)
    (tmp_path / "part.so").write_bytes(blob[: len(blob) - 100])
    (tmp_path / "empty.so").write_bytes(b"")
    report = doctor.kernels(tmp_path, "8.0", lambda line: None)
    by_path = {o.path: o for o in report.objects}
    assert by_path["whole.so"].covered
    assert "cut off" in by_path["part.so"].note
    assert "cut off" in by_path["empty.so"].note
    assert report.fails


@pytest.mark.parametrize("what", ["missing", "text", "folder", "zip"])
def test_what_holds_no_kernels_is_one_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "text":
        path.write_text("x" * 100)
    elif what == "folder":
        path.mkdir()
    elif what == "zip":
        path.write_bytes(b"PK\x05\x06" + bytes(18))
    command = [sys.executable, "-m", "harness", "doctor", "--kernels", str(path), "--arch", "12.0"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(path) in done.stderr


@pytest.mark.full
def test_the_published_wheel_of_sglangs_kernels(tmp_path: Path) -> None:
    """373 MB from the package registry; what it holds stands in docs/doctor.md."""
    get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*get, "sglang-kernel==0.4.10"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    command = [sys.executable, "-m", "harness", "doctor", "--kernels", str(wheel), "--json"]
    done = subprocess.run([*command, "--arch", "12.0"], cwd=REPO, capture_output=True, check=True)
    objects = {o["path"]: o for o in json.loads(done.stdout)["objects"]}
    short = {path.removeprefix("sgl_kernel/").partition(".")[0]: o for path, o in objects.items()}
    assert {name for name, o in short.items() if "sm_120a" in o["architectures"]} == {
        *("sm90/common_ops", "sm100/common_ops", "spatial_ops", "infllm_ops"),
    }
    assert short["flash_ops"]["architectures"] == ["sm_80", "sm_86", "sm_90a"]
    assert short["flashmla_ops"]["architectures"] == ["sm_90a", "sm_100", "sm_103a"]
    assert {name for name, o in short.items() if not o["covered"]} == {"flash_ops", "flashmla_ops"}
    assert not any(o["ptx"] for o in objects.values())
