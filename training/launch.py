"""An engine as a plan's `[engine]` says, and what its start tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines.base import ServeSpec
from engines.process import free_port
from harness.errors import UsageError
from harness.plan.serve import as_engine_says
from harness.records import Variant
from training.plan import TrainingPlan
from training.progress import PLAIN_S, note


def serve_spec(
    plan: TrainingPlan, target: Path, context: int, variant: Variant = "baseline"
) -> ServeSpec:
    """The target alone, `context` tokens of prompt and answer, as `variant` is started.

    Raises `UsageError` where it would take several machines.
    """
    if plan.engine.nodes > 1:
        raise UsageError(
            f"engine.nodes = {plan.engine.nodes}: several machines are started by hand; give the "
            "server's URL"
        )
    spec = ServeSpec(
        target=target,
        served_name=plan.target.served_name or target.name,
        port=plan.engine.port or free_port(),
        max_model_len=context,
        max_num_seqs=plan.generate.concurrency,
        seed=plan.seed,
        temperature=plan.sampling.temperature,
    )
    return as_engine_says(spec, plan.engine, variant)


def start_teller(stage: str, engine: str) -> Callable[[str, float], None]:
    """Tells each phase of a start as it begins, and that it still goes on every so often."""
    shown: list[tuple[str, float]] = []

    def on_phase(phase: str, elapsed_s: float) -> None:
        if not shown or shown[-1][0] != phase or elapsed_s - shown[-1][1] >= PLAIN_S:
            shown.append((phase, elapsed_s))
            note(f"{stage}: starting {engine}: {phase} ({elapsed_s:.0f} s)")

    return on_phase
