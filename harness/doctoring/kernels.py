"""Which shared objects of a package have device code for a GPU, and what follows where not."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engines.kernels import Arch, KernelObject, is_loaded, parse_arch, scan, use_of
from harness.doctoring.telling import Tell
from harness.errors import UsageError


class ObjectCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """One shared object beside the GPU that was asked for.

    `loaded`: whether the package takes this object on that GPU. `fails`: nothing would run.
    `note`: what follows where the GPU is not covered.
    """

    path: str
    architectures: tuple[str, ...]
    ptx: tuple[str, ...]
    covered: bool
    loaded: bool = True
    fails: bool = False
    note: str = ""


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The coverage of a wheel, a folder or one shared object."""

    kernels: str
    arch: str
    objects: tuple[ObjectCoverage, ...]

    @property
    def fails(self) -> bool:
        """Whether something that is needed has no code for the GPU."""
        return any(o.fails for o in self.objects)


def kernels(path: Path, arch: str, tell: Tell) -> KernelReport:
    """What the shared objects of `path` hold for a GPU of compute capability `arch`.

    Raises `UsageError` where nothing there has device code.
    """
    gpu = parse_arch(arch)
    found = []
    for kernel in scan(path):
        found.append(coverage(kernel, gpu))
        tell(f"{kernel.path}: read")
    if not found:
        raise UsageError(f"--kernels {path}: no shared object with device code for GPUs is in it")
    return KernelReport(kernels=str(path), arch=f"{gpu.major}.{gpu.minor}", objects=tuple(found))


def coverage(kernel: KernelObject, gpu: Arch) -> ObjectCoverage:
    """One object held against `gpu`."""
    covered, loaded, use = kernel.covers(gpu), is_loaded(kernel.path, gpu), use_of(kernel.path)
    needed = kernel.damaged is not None or (use is not None and use.needed)
    fails = loaded and not covered and needed
    note = ""
    if kernel.damaged is not None:
        note = f"{kernel.damaged}: it cannot be loaded; install the package again"
    elif not loaded:
        note = "not taken on this GPU"
    elif not covered:
        what = "what needs it fails" if use is None else f"{use.what} fails: {use.instead}"
        note = f"no code for {gpu.major}.{gpu.minor}: {what}"
    return ObjectCoverage(
        path=kernel.path,
        architectures=tuple(a.sm for a in kernel.architectures),
        ptx=tuple(a.sm.replace("sm", "compute") for a in kernel.ptx),
        covered=covered,
        loaded=loaded,
        fails=fails,
        note=note,
    )


def text_of(report: KernelReport) -> str:
    """The report as plain lines: each object, what it holds, and what follows."""
    lines = [f"device code for {report.arch} in {report.kernels}", ""]
    width = max(len(o.path) for o in report.objects)
    for o in report.objects:
        mark = "yes" if o.covered else "NO" if o.loaded else "no"
        held = " ".join((*o.architectures, *o.ptx)) or "none"
        lines.append(f"  {mark:<3} {o.path:<{width}}  {held}")
        if o.note:
            lines.append(f"      {o.note}")
    if not any(o.ptx for o in report.objects):
        lines.append("\nno PTX: nothing of it can be compiled for a newer GPU by the driver")
    return "\n".join([*lines, "", conclusion(report)]) + "\n"


def conclusion(report: KernelReport) -> str:
    """What follows of all objects together, in one line."""
    missing = [Path(o.path).name.partition(".")[0] for o in report.objects if o.note and o.loaded]
    if report.fails:
        fatal = [Path(o.path).name.partition(".")[0] for o in report.objects if o.fails]
        return f"it cannot serve on {report.arch}: {', '.join(fatal)} would fail"
    if missing:
        return f"it can serve on {report.arch}, without what needs {', '.join(missing)}"
    return f"everything in it has code for {report.arch}"
