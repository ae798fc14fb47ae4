"""An engine as a plan's `[engine]` says, and what its start tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines.base import ServeSpec
from engines.process import free_port
from training.plan import TrainingPlan
from training.progress import PLAIN_S, note


def serve_spec(plan: TrainingPlan, target: Path, context: int) -> ServeSpec:
    """The target alone, `context` tokens of prompt and answer."""
    engine = plan.engine
    return ServeSpec(
        target=target,
        served_name=plan.target.served_name or target.name,
        port=engine.port or free_port(),
        dtype=engine.dtype,
        max_model_len=context,
        max_num_seqs=engine.max_num_seqs or plan.generate.concurrency,
        kv_cache_gib=engine.kv_cache_gib,
        tensor_parallel=engine.tensor_parallel,
        device=engine.device,
        seed=plan.seed,
        temperature=plan.sampling.temperature,
        threads=engine.threads,
        trust_remote_code=engine.trust_remote_code,
        reasoning_parser=engine.reasoning_parser,
        extra_args=engine.extra_args,
        extra_env=engine.extra_env,
    )


def start_teller(stage: str, engine: str) -> Callable[[str, float], None]:
    """Tells each phase of a start as it begins, and that it still goes on every so often."""
    shown: list[tuple[str, float]] = []

    def on_phase(phase: str, elapsed_s: float) -> None:
        if not shown or shown[-1][0] != phase or elapsed_s - shown[-1][1] >= PLAIN_S:
            shown.append((phase, elapsed_s))
            note(f"{stage}: starting {engine}: {phase} ({elapsed_s:.0f} s)")

    return on_phase
