"""Faults planted in a real vLLM and a real SGLang: states and proposals by their plugins, and the
method by their own flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.pair import Pair
from faults.planting import healthy, write_plugin
from faults.records import Engine, Fault, Planted

_METHOD: dict[Engine, tuple[str, str]] = {
    "vllm": ("--speculative-config.method", "eagle"),
    "sglang": ("--speculative-algorithm", "EAGLE"),
}
"""Asks for EAGLE over an EAGLE-3 head: it is handed the target's last state, and fc is left out."""
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


def _method(engine: Engine) -> Any:
    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        return healthy(pair, seed).harmed(extra_args=_METHOD[engine])

    return plant


def _faults() -> Iterator[Fault]:
    for engine in _METHOD:
        yield Fault(
            name=f"{engine}_method",
            cause="wrong_method",
            way="flags",
            plant=_method(engine),
            costs=0.1,
            engines=(engine,),
            mendable=True,
        )
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
