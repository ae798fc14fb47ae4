"""Which profile a run starts from: the one asked for, or the one that fits what is here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.base import EngineUsageError
from engines.catalog import adapter as adapter_named
from engines.checkpoint import read_json
from engines.hardware import Gpu, gpus_here
from harness.errors import UsageError
from harness.plan.load import FOR_ENGINE, Source, parse_set, put, read_profile

if TYPE_CHECKING:
    from harness.prepare import Request

KIMI = "KimiK25ForConditionalGeneration"
MACHINE_GPUS = 8
KINDS = (("sm120", "12.0", 90), ("h200", "9.0", 130), ("b200", "10.0", 170))
"""Machines that there are profiles for: name, compute capability, GB of each GPU at least."""


def choose_profile(request: Request, engine: str) -> tuple[Source, str]:
    """The profile asked for, or the one that fits; and why, to be printed."""
    if request.profile is not None:
        source = read_profile(request.profile)
        check_engine_parts(source)
        return source, f"profile {source.name}"
    if request.urls:
        return read_profile("attach"), "profile attach: the servers run already"
    said: dict[str, Any] = {}
    for item in request.sets:
        put(said, *parse_set(item))
    target = (said.get("target") or {}).get("path")
    if not target:
        return read_profile("demo"), "profile demo: no target.path is given"
    if engine in ("vllm", "sglang") and "device" not in (said.get("engine") or {}):
        found = fitting(target, (said.get("drafter") or {}).get("path"))
        if found is not None:
            name, why = found
            return read_profile(name), f"profile {name}: {why}"
    return read_profile("model"), "profile model: target.path is given"


def fitting(target: str, drafter: str | None) -> tuple[str, str] | None:
    """The profile for a target on this machine's GPUs, and why; None where there is none for it."""
    architectures = _config(target).get("architectures")
    if not isinstance(architectures, list) or KIMI not in architectures:
        return None
    found = machine(gpus_here()[1])
    if found is None:
        return None
    kind, gpu = found
    head = "llama" if drafter and not _is_mla(drafter) else "mla"
    beside = f", the drafter is of {head.upper() if head == 'mla' else 'Llama'} kind"
    why = f"the target is a Kimi-K2.5, the machine has {MACHINE_GPUS} {gpu}"
    return f"kimi-k2.5-{kind}-{head}", why + (beside if drafter else "")


def _is_mla(drafter: str) -> bool:
    """Whether its config is of an MLA head: speculators nests that, a converted one does not."""
    config = _config(drafter)
    inner = config.get("transformer_layer_config")
    return any("kv_lora_rank" in part for part in (config, inner) if isinstance(part, dict))


def machine(found: Sequence[Gpu]) -> tuple[str, str] | None:
    """The kind of machine that these GPUs make, and the GPU's name; None where it is another."""
    for kind, capability, gigabytes in KINDS:
        fit = [
            gpu
            for gpu in found
            if gpu.capability == capability and (gpu.memory_bytes or 0) >= gigabytes * 1_000_000_000
        ]
        if len(fit) == len(found) == MACHINE_GPUS:
            return kind, fit[0].name
    return None


def _config(folder: str) -> dict[str, Any]:
    """The checkpoint's config; empty where it cannot be read, which is told later on."""
    try:
        return read_json(Path(folder).expanduser() / "config.json")
    except (EngineUsageError, OSError, RuntimeError, ValueError):
        return {}


def check_engine_parts(source: Source) -> None:
    """Raise `UsageError` where the profile has a part for an engine that does not exist."""
    parts = source.table.get(FOR_ENGINE)
    for name in parts if isinstance(parts, dict) else ():
        try:
            adapter_named(name)
        except EngineUsageError as error:
            raise UsageError(f"{source.where}, [{FOR_ENGINE}.{name}]: {error}") from None
