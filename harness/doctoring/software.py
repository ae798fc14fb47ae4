"""The engine's environment, the driver beneath it, the port, the tokenizer and the drafter."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from drafters.engines import ENGINES, Engine
from drafters.spec import DrafterError
from drafters.validate import validate
from engines.base import EngineUsageError
from engines.hardware import Gpu, Gpus
from engines.install import RECIPES, engine_python, environments_root, state, versions
from engines.kernels import parse_arch, scan
from engines.process import check_port
from harness.doctoring.finding import Finding, fail, ok, unknown, warn
from harness.doctoring.kernels import coverage
from harness.doctoring.telling import Tell, throttled
from harness.errors import UsageError, one_line
from harness.load.prompts.tokens import TargetTokenizer

_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"](\d+)\.(\d+)", re.M)
KERNEL_PACKAGES = (
    *("sgl_kernel", "vllm", "flash_attn", "flash_attn_3", "vllm_flash_attn", "flash_mla"),
    *("flashinfer_jit_cache", "deep_gemm", "deep_ep"),
)
"""Packages of an engine's environment whose shared objects hold device code."""
_GRAVE = {"error": fail, "warning": warn}


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's environment as found. `problem`: why its Python cannot be used.

    `cuda`: what its torch was built for, as major.minor; None for a CPU's build.
    """

    name: str
    state: str
    versions: Mapping[str, str] = {}
    problem: str | None = None
    site: Path | None = None
    cuda: str | None = None


def read_environment(name: str) -> Environment:
    """What there is of an engine's environment; its Python is started once, for the versions."""
    try:
        return _read_environment(name)
    except OSError as error:  # another user's
        problem = f"{error.filename}: {error.strerror}"
        return Environment(name=name, state="unreadable", problem=problem)


def _read_environment(name: str) -> Environment:
    try:
        python = engine_python(name)
    except EngineUsageError as error:
        return Environment(name=name, state=state(name), problem=str(error))
    site = next(iter(sorted(python.parent.parent.glob("lib/python3*/site-packages"))), None)
    own = python == environments_root() / ".venvs" / name / "bin" / "python"
    return Environment(
        name=name,
        state=state(name) if own else "given",
        versions=versions(name) if own else {},
        site=site,
        cuda=torch_cuda(site) if site else None,
    )


def torch_cuda(site: Path) -> str | None:
    """The CUDA that an environment's torch was built for, read without importing it."""
    try:
        found = _CUDA.search((site / "torch" / "version.py").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return f"{found[1]}.{found[2]}" if found else None


def other_environments(besides: str | None) -> list[Environment]:
    """The environments that are there beside the one that is used."""
    found = (read_environment(name) for name in RECIPES if name != besides)
    return [environment for environment in found if environment.state != "missing"]


def check_environment(found: Environment, gpus: Gpus, *, on_gpus: bool) -> Iterator[Finding]:
    """Whether the environment can be started, and whether the driver serves its CUDA."""
    where = f"environment {found.name}"
    if found.problem is not None:
        what, _, how = found.problem.partition("): ")
        yield fail("engine", "environment", where, f"{what})" if how else what, how)
        return
    told = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    told = told or "its versions are not told"
    if found.state == "unchecked":
        yield warn(
            "engine",
            "environment",
            where,
            f"{told}; made by hand and never checked",
            f"run `python -m harness engines install {found.name}`: it adopts it, checked",
        )
    else:
        yield ok("engine", "environment", where, told)
    if on_gpus:
        yield check_cuda(found, gpus)


def check_cuda(found: Environment, gpus: Gpus) -> Finding:
    """Whether the driver serves the CUDA that the environment's torch was built for.

    By NVIDIA's minor-version compatibility a driver of the same major serves a later minor, but
    cannot compile its PTX.
    """
    where = f"environment {found.name}"
    if found.cuda is None:
        return fail(
            "engine",
            "cuda",
            where,
            "its torch is built for CPUs",
            "install the engine's CUDA build into it",
        )
    if gpus.cuda is None:
        return unknown("engine", "cuda", where, f"its torch wants CUDA {found.cuda}; what the "
                       "driver serves is not known")  # fmt: skip
    wanted, served = _pair(found.cuda), _pair(gpus.cuda)
    what = f"its torch wants CUDA {found.cuda}, the driver serves up to {gpus.cuda}"
    if served[0] < wanted[0]:
        return fail("engine", "cuda", where, what, "install a newer NVIDIA driver, or an engine "
                    "built for an older CUDA")  # fmt: skip
    if served < wanted:
        return warn(
            "engine",
            "cuda",
            where,
            f"{what}: kernels compiled at start may be refused",
            "install a newer NVIDIA driver",
        )
    return ok("engine", "cuda", where, what)


def _pair(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)


def kernel_folders(found: Environment) -> list[Path]:
    """Where an environment, and flashinfer's cache, keep shared objects with device code."""
    folders = [found.site / name for name in KERNEL_PACKAGES] if found.site else []
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()
    folders.append(Path(base) / ".cache" / "flashinfer")
    return [folder for folder in folders if os.path.isdir(folder)]  # another user's: none


def check_kernels(found: Environment, visible: Sequence[Gpu], tell: Tell) -> Iterator[Finding]:
    """Whether the environment's device code covers each kind of GPU at hand; none: nothing said."""
    kinds = sorted({gpu.capability for gpu in visible if gpu.capability})
    folders = kernel_folders(found)
    if not kinds or not folders:
        return
    told = throttled(tell)
    for folder in folders:
        covered = 0
        try:
            for kernel in scan(folder):
                told(f"{kernel.path}: read")
                held = [coverage(kernel, parse_arch(kind)) for kind in kinds]
                bad = next((h for h in held if h.fails), None) or next(
                    (h for h in held if h.note and h.loaded), None
                )
                covered += bad is None
                if bad is not None:
                    say = fail if bad.fails else warn
                    yield say("kernels", "coverage", f"{folder / bad.path}", bad.note)
        except EngineUsageError as error:
            yield unknown("kernels", "coverage", str(folder), str(error))
            continue
        if covered:
            yield ok("kernels", "coverage", str(folder), f"{covered} objects have code for "
                     f"{', '.join(kinds)}")  # fmt: skip


def port_holder(port: int) -> str | None:
    """Who listens on a TCP port, where this user may know it."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for c in psutil.net_connections(kind="tcp"):
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(c.pid)
                    command = one_line(" ".join(process.cmdline()) or process.name(), 80)
                    return f"process {c.pid}: {command}"
    return None


def check_ports(host: str, port: int | None, reach: str | None = None) -> Finding:
    """Whether the plan's port can be listened on, and who holds it.

    `reach`: the other machine that listens, if it is another.
    """
    if port is None:
        return ok("port", "port", "engine.port", "none set: a free one is taken at each start")
    where = f"engine.port={port}"
    if reach is not None:
        return unknown("port", "port", where, f"it is {reach}'s, which was not looked at")
    try:
        check_port(host, port)
    except EngineUsageError as error:
        holder = port_holder(port)
        what = f"port {port} is in use" if "in use" in str(error) else str(error)
        what += f" by {holder}" if holder else ""
        return fail("port", "port", where, what, "end it, or set another engine.port")
    return ok("port", "port", where, "free")


def check_tokenizer(folder: Path, trust_remote_code: bool, template: bool) -> Iterator[Finding]:
    """Whether the tokenizer loads and gives a text back, and the chat template can be applied.

    `template`: the plan's requests are chats. The folder's own code is run only if the plan
    trusts it. What is no `tokenizer.json` may want packages that are the engine's alone, so that
    it proves nothing if it cannot be loaded here.
    """
    where = str(folder)
    tokens = TargetTokenizer(folder, trust_remote_code=trust_remote_code)
    said = "The quick brown fox: 1 + 1 = 2."
    try:
        ids = tokens.encode(said)
        back = tokens.decode(ids)
    except UsageError as error:
        if (folder / "tokenizer.json").is_file():
            yield fail("models", "tokenizer", where, _told(error, folder), "fetch its files again")
        else:
            yield unknown("models", "tokenizer", where, "it cannot be loaded in this environment: "
                          f"{_told(error, folder)}")  # fmt: skip
        return
    if back.split() != said.split():
        yield warn("models", "tokenizer", where, f"it gives {one_line(back, 60)!r} back for "
                   f"{said!r}", "see whether its files are all of one version")  # fmt: skip
    else:
        yield ok("models", "tokenizer", where, f"the tokenizer loads ({len(ids)} tokens of a try)")
    try:
        chat = tokens.chat_ids([{"role": "user", "content": said}], {})
    except UsageError as error:
        grave = warn if template else unknown
        yield grave("models", "template", where, _told(error, folder), "put the model's chat "
                    "template (chat_template.jinja) into the folder")  # fmt: skip
        return
    yield ok("models", "template", where, f"the chat template takes a message ({len(chat)} tokens)")


def _told(error: Exception, folder: Path) -> str:
    return str(error).removeprefix(f"{folder}").lstrip(": /")


def check_drafter(
    drafter: Path, target: Path, engine: str, watch: Callable[[str, int], None]
) -> Iterator[Finding]:
    """Every check of `drafters validate`, for the engine that would serve it."""
    of: Engine | None = next((e for e in ENGINES if e == engine), None)
    try:
        found = validate(drafter, target, engine=of, watch=watch)
    except DrafterError as error:
        yield fail("models", "drafter", str(drafter), str(error))
        return
    grave = [f for f in found if f.severity != "note"]
    for one in grave:
        what = f"{one.what}: {one.why}" if one.why else one.what
        yield _GRAVE[one.severity]("models", f"drafter_{one.code}", one.where, what, one.remedy)
    if not any(f.severity == "error" for f in grave):
        beside = f", {len(grave)} warnings" if grave else ""
        yield ok("models", "drafter", str(drafter), f"it fits the target and is whole{beside}")
