"""The GPUs held against what the plan asks for: how many, driver, links, who else is on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.hardware import Gpu, Gpus
from harness.doctoring.finding import Finding, fail, gib, ok, unknown, warn


def check_gpus(found: Gpus, visible: Sequence[Gpu], wanted: int) -> Iterator[Finding]:
    """What there is of GPUs. `wanted`: how many the plan is served on; 0: a CPU's plan."""
    if not found.gpus:
        why = found.absent or "no GPU was found"
        if wanted:
            yield fail("gpu", "absent", "GPU", f"{wanted} wanted, none here: {why}",
                       "run it on the GPU machine, or set engine.device=cpu")  # fmt: skip
        else:
            yield ok("gpu", "absent", "GPU", f"none here, none needed: {why}")
        return
    yield ok("gpu", "driver", "driver", f"NVIDIA {found.driver or 'not told'}, CUDA up to "
             f"{found.cuda or 'not told'}")  # fmt: skip
    yield _count(found, visible, wanted)
    yield from _each(visible)
    yield _alike(visible)
    if wanted > 1 or (not wanted and len(visible) > 1):
        yield from _topology(found, visible[:wanted] if wanted else visible)


def _count(found: Gpus, visible: Sequence[Gpu], wanted: int) -> Finding:
    names = ", ".join(dict.fromkeys(f"{g.name} ({g.capability or '?'})" for g in visible))
    hidden = len(found.gpus) - len(visible)
    said = f"{len(visible)}: {names}" if visible else "none"
    what = f"{said}; CUDA_VISIBLE_DEVICES hides {hidden}" if hidden else said
    if len(visible) < wanted:
        return fail(
            "gpu",
            "count",
            "GPU",
            f"{wanted} wanted, {what}",
            "set engine.tensor_parallel to what is there, or unset CUDA_VISIBLE_DEVICES",
        )
    return ok("gpu", "count", "GPU", what)


def _each(visible: Sequence[Gpu]) -> Iterator[Finding]:
    for gpu in visible:
        where = f"GPU {gpu.index}"
        if gpu.processes:
            who = ", ".join(
                f"{p.name or 'a process'} {p.pid}"
                + (f" ({gib(p.used_bytes)})" if p.used_bytes else "")
                for p in gpu.processes
            )
            yield warn(
                "gpu",
                "processes",
                where,
                f"other processes are on it: {who}",
                "end them first: they take memory, and the figures would be theirs too",
            )
        if gpu.partitioned:
            yield warn("gpu", "mig", where, "it is split by MIG", "serve on one of its parts by "
                       "its UUID, or have MIG switched off")  # fmt: skip
        if gpu.uncorrected_errors:
            yield warn("gpu", "ecc", where, f"{gpu.uncorrected_errors} uncorrected memory errors "
                       "since the driver was loaded", "reset the GPU, or leave it out")  # fmt: skip
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            yield warn(
                "gpu",
                "pcie",
                where,
                f"its PCIe link runs {gpu.pcie_width} of {gpu.pcie_width_max} lanes",
                "reseat the card, or look at the slot's width",
            )


def _alike(visible: Sequence[Gpu]) -> Finding:
    kinds = {(g.name, g.capability) for g in visible}
    if len(kinds) > 1:
        told = ", ".join(f"GPU {g.index} {g.name}" for g in visible)
        return warn(
            "gpu",
            "alike",
            "GPU",
            f"they are of different kinds: {told}",
            "choose alike ones with CUDA_VISIBLE_DEVICES: the slowest sets the pace",
        )
    busy = any(g.processes for g in visible)
    return ok("gpu", "alike", "GPU", "all of one kind" + ("" if busy else ", nobody else on them"))


def _topology(found: Gpus, used: Sequence[Gpu]) -> Iterator[Finding]:
    """How the GPUs that serve together reach each other, and from which host memory."""
    chosen = {g.index for g in used}
    links = [k for k in found.links if k.first in chosen and k.second in chosen]
    if not links or all(k.nvlink is None and k.path is None for k in links):
        yield unknown("gpu", "links", "GPU", "the driver does not tell how they are connected")
    elif all(k.nvlink for k in links):
        yield ok("gpu", "links", "GPU", "NVLink between every two of them")
    else:
        paths = dict.fromkeys("NVLink" if k.nvlink else k.path or "not told" for k in links)
        what = f"not every two have NVLink; they are connected by: {', '.join(paths)}"
        how = "each step's all-reduce crosses PCIe; set --disable-custom-all-reduce where it hangs"
        yield warn("gpu", "links", "GPU", what, how)
    nodes = {g.numa_node for g in used if g.numa_node is not None}
    if len(nodes) > 1:
        told = ", ".join(map(str, sorted(nodes)))
        yield warn("gpu", "numa", "GPU", f"they hang from NUMA nodes {told}",
                   "bind each rank to its GPU's node, where the engine can")  # fmt: skip
    else:
        yield ok("gpu", "numa", "GPU", f"NUMA node {nodes.pop()}" if nodes else "no NUMA node told")
