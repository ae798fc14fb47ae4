"""From a plan to what an engine is asked to serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engines.base import ServeSpec
from harness.plan.points import load_points
from harness.plan.schema import EngineSection, Flag, Plan
from harness.records import Variant


def serve_spec(
    plan: Plan,
    variant: Variant,
    *,
    target: Path,
    drafter: Path | None,
    port: int,
    max_model_len: int,
    max_num_seqs: int | None,
) -> ServeSpec:
    """What to serve for `variant`; `max_num_seqs` is used where the plan says none."""
    spec = ServeSpec(
        target=target,
        served_name=served_name(plan, target),
        port=port,
        drafter=drafter if variant == "speculative" else None,
        pair_drafter=drafter,
        k=plan.speculative.k,
        forced_length=plan.speculative.forced_length,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        seed=plan.seed,
        temperature=plan.sampling.temperature,
    )
    return as_engine_says(spec, plan.engine, variant)


def as_engine_says(spec: ServeSpec, engine: EngineSection, variant: Variant) -> ServeSpec:
    """`spec` with all that a plan's `[engine]` says, but for port and context.

    `max_num_seqs` of `spec` stays where `engine` has none.
    """
    return replace(
        spec,
        dtype=engine.dtype,
        max_num_seqs=engine.max_num_seqs or spec.max_num_seqs,
        kv_cache_gib=engine.kv_cache_gib,
        tensor_parallel=engine.tensor_parallel,
        device=engine.device,
        host=engine.host,
        command_prefix=engine.command_prefix,
        reach=engine.reach,
        threads=engine.threads,
        trust_remote_code=engine.trust_remote_code,
        reasoning_parser=engine.reasoning_parser,
        extra_args=(*flag_arguments(engine.flags, variant), *engine.extra_args),
        extra_env={**variables(engine.env, variant), **engine.extra_env},
        nodes=engine.nodes,
        head=engine.head,
    )


def served_name(plan: Plan, target: Path) -> str:
    """The model's name on the wire."""
    return plan.target.served_name or target.name


def most_sequences(plan: Plan) -> int | None:
    """How many requests the engine is to run at once; None: as many as it would by itself.

    Of an open loop nobody knows beforehand how many will be under way: a limit of ours would
    be measured as the engine's.
    """
    if any(p.mode == "open" for p in load_points(plan.load)):
        return None
    return max([16, *(plan.load.concurrency or ())])


def chosen(flags: Mapping[str, Flag], variant: Variant) -> dict[str, Flag]:
    """Those that `variant` is started with."""
    return {
        name: flag
        for name, flag in flags.items()
        if flag.value is not False and flag.variant in (None, variant)
    }


def flag_arguments(flags: Mapping[str, Flag], variant: Variant) -> list[str]:
    """The flags as arguments; a switch has no value."""
    arguments: list[str] = []
    for name, flag in chosen(flags, variant).items():
        arguments += [name] if flag.value is True else [name, str(flag.value)]
    return arguments


def variables(env: Mapping[str, Flag], variant: Variant) -> dict[str, str]:
    """The variables of the engine's environment."""
    return {name: str(variable.value) for name, variable in chosen(env, variant).items()}
