"""Faults of states and proposals, planted in a real vLLM and a real SGLang by their plugins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.pair import Pair
from faults.planting import healthy, write_plugin
from faults.records import Engine, Fault, Planted

_STATES = {
    "zero": "states_zero",
    "scaled": "states_scaled",
    "moved": "states_moved",
    "noisy": "states_noisy",
}


def _plugged(function: str, **parameters: Any) -> Any:
    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        plugin = write_plugin(
            folder, "faults.hooks.foreign", function, share=severity, seed=seed, **parameters
        )
        return healthy(pair, seed, plugin=plugin)

    return plant


def _faults() -> Iterator[Fault]:
    engines: tuple[Engine, ...] = ("vllm", "sglang")
    for engine in engines:
        for kind, cause in _STATES.items():
            yield Fault(
                name=f"{engine}_{cause}",
                cause=cause,
                way="engine",
                plant=_plugged(f"spoil_{engine}", kind=kind),
                costs=0.05,
                engines=(engine,),
                severities=(1.0, 0.4),
            )
    yield Fault(
        name="vllm_drafts_swapped",
        cause="proposals_other_request",
        way="engine",
        plant=_plugged("swap_vllm"),
        costs=0.1,
        engines=("vllm",),
        severities=(1.0, 0.4),
    )


FOREIGN: tuple[Fault, ...] = tuple(_faults())
