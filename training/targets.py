"""The target of a plan: the folder it names, or the demo pair's."""

from __future__ import annotations

from pathlib import Path

from engines.checkpoint import check_named
from harness.errors import EngineFailure, UsageError
from training.plan import TrainingPlan


def target_folder(plan: TrainingPlan) -> Path:
    """The target's folder, absolute; the demo target is made first where it is missing.

    Raises `UsageError` where the plan is for a target whose folder it does not name,
    `EngineUsageError` where the folder holds no model, `EngineFailure` where the demo target could
    not be made.
    """
    if plan.target.path is None and plan.target.sizes is not None:
        raise UsageError(
            f"target.path: not set, and the plan {plan.name} is for a target of its own; give its "
            "folder with --set target.path=DIR"
        )
    if plan.target.path is None:
        return demo_folder(plan) / "target"
    folder = Path(plan.target.path).expanduser().resolve()
    check_named(folder, "target")
    return folder


def demo_folder(plan: TrainingPlan) -> Path:
    """The demo pair's folder with a finished target and its prompts; makes them, in minutes."""
    from training.demo import pair

    configs = pair.configs(plan.demo.target, plan.demo.drafter)
    folder = pair.pair_folder(configs[0])
    if pair.target_ready(folder):
        return folder
    try:
        return pair.make(*configs)
    except pair.PairError as error:
        raise EngineFailure(str(error)) from None


def demo_prompts(plan: TrainingPlan) -> Path | None:
    """The demo pair's prompts where the plan's workload asks for them."""
    return demo_folder(plan) / "prompts.jsonl" if plan.workload.dataset == "demo" else None
