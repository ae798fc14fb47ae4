"""Where the offline expectation comes from: the reference engine, or states captured before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.errors import UsageError
from training.capture.proving import FLOAT32_GROWTH
from training.evaluation.records import WalkedFrom
from training.kept import begun_sections
from training.plan import TrainingPlan
from training.targets import reference_refusal

if TYPE_CHECKING:
    import torch

KEY = "evaluate.offline"
"""Of a stage's record: there where states were walked."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """The way taken, and why."""

    walked_from: WalkedFrom
    why: str


def way_of(plan: TrainingPlan, target: Path, folder: Path, *, states: bool = True) -> Way:
    """The plan's `evaluate.offline` for this target; `states`: whether there are any to walk.

    With `auto` a `folder` that was begun one way goes on so: free memory comes and goes. Raises
    `UsageError` where the way that the plan asks for is closed.
    """
    asked = plan.evaluate.offline
    if asked == "states" and states:
        return _by_states(plan, "evaluate.offline says so")
    if asked == "states":
        raise UsageError(
            f"{KEY}=states: a drafter from elsewhere has no captured states; evaluate it in the "
            f"folder of its training, or leave {KEY} out"
        )
    begun = begun_sections(folder)
    if asked == "auto" and begun is not None:
        why = "this folder was begun so"
        by_states = begun.get(KEY) == "states"
        return _by_states(plan, why) if by_states else Way(walked_from="engine", why=why)
    growth = FLOAT32_GROWTH if plan.engine.dtype == "float32" else 1.0
    refused = reference_refusal(target, growth=growth)
    if refused is None:
        return Way(walked_from="engine", why="the reference engine can load the target")
    if asked == "auto" and states:
        return _by_states(plan, f"the reference engine cannot load it: {refused}")
    way_out = (
        f"use --set {KEY}=states to walk over the captured states"
        if states
        else "without it a drafter from elsewhere has no expectation: there are no states of it"
    )
    raise UsageError(f"{KEY}={asked}: the reference engine cannot load it: {refused}; {way_out}")


def _by_states(plan: TrainingPlan, why: str) -> Way:
    """Raises `UsageError` for an engine whose drafts are drawn: it accepts other ones."""
    if plan.sampling.temperature > 0 and "reference" in plan.evaluate.engines:
        raise UsageError(
            "evaluate.engines: the answers were sampled (sampling.temperature = "
            f"{plan.sampling.temperature:g}), and the reference engine then draws its drafts, "
            "where the walk over states takes the likeliest, as vLLM and SGLang do; name one of "
            "these"
        )
    return Way(walked_from="states", why=why)


def walked_dtype(device: torch.device, served: torch.dtype) -> torch.dtype:
    """What the drafter is walked in: as it is served; on a CPU float32, the type of its attention.

    `Unroll` computes attention in float32 there whatever the weights are.
    """
    import torch

    return torch.float32 if device.type == "cpu" else served
