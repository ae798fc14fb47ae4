"""Faults of the engine's own doing, planted in the reference engine by a plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faults.pair import Pair
from faults.planting import healthy, write_plugin
from faults.records import Fault, Planted

HOOKS = "faults.hooks"
TWO = (1.0, 0.4)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "count": 40}
"""Sampled steps scatter: more prompts tell a loss from chance."""


def _handed(kind: str, *, where: str = "everywhere", unit: str = "row", **served: Any) -> Any:
    """States of this kind; the severity is the share of rows (or requests) that are spoiled."""

    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        plugin = write_plugin(
            folder,
            f"{HOOKS}.handed",
            "spoil_states",
            kind=kind,
            where=where,
            unit=unit,
            share=severity,
            seed=seed,
        )
        return healthy(pair, seed, plugin=plugin, **served)

    return plant


def _run(kind: str, **served: Any) -> Any:
    """The drafter run so; the severity is the share of its calls that go wrong."""

    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        plugin = write_plugin(
            folder, f"{HOOKS}.drafting", "run_wrongly", kind=kind, share=severity, seed=seed
        )
        return healthy(pair, seed, plugin=plugin, **served)

    return plant


def _change(what: str, **served: Any) -> Any:
    """The engine reads one thing of the checkpoint otherwise than it stands there."""

    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        plugin = write_plugin(folder, f"{HOOKS}.drafting", "change_drafter", what=what)
        return healthy(pair, seed, plugin=plugin, **served)

    return plant


def _serve(function: str, *, by_share: bool = True, **served: Any) -> Any:
    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        given: dict[str, Any] = {"share": severity, "seed": seed} if by_share else {}
        plugin = write_plugin(folder, f"{HOOKS}.serving", function, **given)
        return healthy(pair, seed, plugin=plugin, **served)

    return plant


def _wrong_rope(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    theta = 1000.0 if severity >= 1 else 2000.0
    plugin = write_plugin(folder, f"{HOOKS}.serving", "compute_otherwise", theta=theta)
    return healthy(pair, seed, plugin=plugin)


def _inexact(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    plugin = write_plugin(folder, f"{HOOKS}.serving", "compute_otherwise", noise=1.5 * severity)
    return healthy(pair, seed, plugin=plugin)


def _reused(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    plugin = write_plugin(folder, f"{HOOKS}.handed", "reuse_prefix", share=severity, seed=seed)
    return healthy(pair, seed, plugin=plugin, rounds=2)


def _fault(name: str, cause: str, plant: Any, costs: float, **more: Any) -> Fault:
    return Fault(name=name, cause=cause, way="engine", plant=plant, costs=costs, **more)


STATES: tuple[Fault, ...] = (
    _fault("states_zero", "states_zero", _handed("zero"), 0.1, severities=TWO),
    _fault("states_zero_prefill", "states_zero", _handed("zero", where="prefill"), 0.03),
    _fault("states_zero_decode", "states_zero", _handed("zero", where="decode"), 0.1),
    _fault("states_zero_late", "states_zero", _handed("zero", where="late"), 0.05),
    _fault("states_stale", "states_stale", _handed("stale", where="decode"), 0.1, severities=TWO),
    _fault("states_moved", "states_moved", _handed("moved"), 0.1, severities=TWO),
    _fault("states_moved_decode", "states_moved", _handed("moved", where="decode"), 0.1),
    _fault(
        "states_other_request",
        "states_other_request",
        _handed("other_request", where="batch"),
        0.1,
        severities=TWO,
    ),
    _fault("states_scaled", "states_scaled", _handed("scaled"), 0.05, severities=TWO),
    _fault("states_normed", "states_normed", _handed("normed"), 0.05),
    _fault("states_branch", "states_without_residual", _handed("branch"), 0.1, severities=TWO),
    _fault(
        "states_partial",
        "states_partial_sums",
        _handed("partial"),
        0.1,
        severities=TWO,
        emulated=True,
    ),
    _fault("states_noisy", "states_noisy", _handed("noisy"), 0.05),
    _fault(
        "states_skipped",
        "states_skipped",
        _handed("zero", where="batch", unit="request"),
        0.1,
        severities=(0.7, 0.4),
        also=("states_zero",),
        emulated=True,
    ),
    _fault("prefix_reuse", "prefix_reuse", _reused, 0.03, emulated=True, also=("states_zero",)),
)
EXECUTION: tuple[Fault, ...] = (
    _fault("tokens_unshifted", "token_shift", _run("unshifted"), 0.1, severities=TWO),
    _fault("positions_restarted", "positions", _run("restarted"), 0.05, severities=TWO),
    _fault("residual_missing", "residual_missing", _run("without_residual"), 0.1, severities=TWO),
    _fault("recurrence_lost", "recurrence", _run("forgetful"), 0.1, severities=TWO),
    _fault("cache_not_overwritten", "kv_not_overwritten", _run("not_overwritten"), 0.02),
    _fault("prompt_cache_lost", "drafter_cache", _run("prompt_lost"), 0.1, severities=TWO),
    _fault("drafts_swapped", "proposals_other_request", _run("swapped"), 0.1, severities=TWO),
    _fault("stale_inputs", "drafter_graph", _run("stale_inputs"), 0.1, severities=TWO),
    _fault("flag_norm_output", "norm_output", _change("norm_output"), 0.05),
    _fault(
        "flag_norm_before_residual", "norm_before_residual", _change("norm_before_residual"), 0.1
    ),
)
SERVING: tuple[Fault, ...] = (
    _fault("refused", "verification", _serve("refuse"), 0.1, severities=TWO),
    _fault("strict_rejection", "strict_rejection", _serve("verify_strictly", **SAMPLED), 0.03),
    _fault("greedy_drafts", "greedy_drafts_sampled", _run("greedy_drafts", **SAMPLED), 0.0),
    _fault("miscounted", "counting", _serve("miscount", by_share=False), 0.1),
    _fault("target_rope", "target_computed_wrong", _wrong_rope, 0.03, severities=(1.0, 0.5)),
    _fault("target_inexact", "target_computed_wrong", _inexact, 0.03, severities=(1.0, 0.5)),
)
ENGINE = (*STATES, *EXECUTION, *SERVING)
