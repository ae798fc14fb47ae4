"""What a capture is made from: the samples' tokens, the target, the layers, the engine."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec

from drafters.ids import default_layers
from engines.capture.base import CaptureSpec
from engines.capture.target import CaptureTarget, capture_target, check_layers
from harness.errors import UsageError
from training.capture.store import Layout
from training.folders import stage_folder
from training.launch import start_teller
from training.plan import TrainingPlan
from training.targets import target_digest, target_folder, target_identity
from training.unchanged import unchanged_samples


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as it is captured: at most `capture.max_length` tokens, the end cut off.

    `token_ids` in 4 bytes each: a large training has tens of millions.
    """

    id: str
    category: str | None
    token_ids: array[int]
    loss_from: int
    greedy: bool


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """`digest`: of the samples, as their gate says. `cut`: rows that lost tokens at the end;
    `left_out`: samples of which nothing that carries loss was left, which are not captured."""

    rows: list[Row]
    digest: str
    cut: int
    left_out: int
    target: CaptureTarget
    layout: Layout


def read_inputs(plan: TrainingPlan, work: Path) -> Inputs:
    """Everything the stage is made from. Raises `UsageError`, and `GateFailed` where the samples'
    own gate did not pass."""
    folder = stage_folder(work, "generate")
    gate, samples = unchanged_samples(work)
    facts = capture_target(target_folder(plan))
    aux_layers = chosen_layers(plan, facts)
    check_layers(aux_layers, facts)
    rows: list[Row] = []
    cut = left_out = 0
    most = plan.capture.max_length
    for sample in samples:
        if sample.loss_from >= min(most, len(sample.token_ids)):
            left_out += 1
            continue
        cut += len(sample.token_ids) > most
        _check_ids(sample.id, sample.token_ids, facts)
        rows.append(
            Row(
                id=sample.id,
                category=sample.category,
                token_ids=array("i", sample.token_ids[:most]),
                loss_from=sample.loss_from,
                greedy=sample.greedy,
            )
        )
    if not rows:
        raise UsageError(
            f"{folder}: no sample has a token that carries loss within {most} tokens; raise "
            "capture.max_length, or generate samples"
        )
    layout = Layout(
        aux_layers=aux_layers,
        hidden_size=facts.hidden_size,
        dtype=plan.capture.dtype,
        choice=True,
    )
    return Inputs(
        rows=rows, digest=gate.output, cut=cut, left_out=left_out, target=facts, layout=layout
    )


def _check_ids(sample: str, token_ids: tuple[int, ...], facts: CaptureTarget) -> None:
    if max(token_ids) >= facts.vocab_size or min(token_ids) < 0:
        raise UsageError(
            f"sample {sample}: token id {max(token_ids)}, but {facts.folder} has a vocabulary of "
            f"{facts.vocab_size}: the samples are of another target"
        )


def chosen_layers(plan: TrainingPlan, facts: CaptureTarget) -> tuple[int, ...]:
    """The plan's aux layers; else of a drafter that is finetuned its own, else (2, L/2, L - 3)."""
    if plan.capture.aux_layers is not None:
        if not plan.capture.aux_layers:
            raise UsageError("capture.aux_layers: name at least one layer")
        if len(set(plan.capture.aux_layers)) < len(plan.capture.aux_layers):
            raise UsageError(
                f"capture.aux_layers: {list(plan.capture.aux_layers)} names a layer twice, and "
                "engines give each once"
            )
        return plan.capture.aux_layers
    if plan.drafter.finetune is not None:
        from drafters.checkpoint import load_spec

        return load_spec(Path(plan.drafter.finetune).expanduser(), facts.folder).aux_layers
    layers = default_layers(facts.layers)
    if len(set(layers)) < 3 or min(layers) < 1:
        raise UsageError(
            f"{facts.folder} has {facts.layers} layers, too few for the usual aux layers "
            f"{list(layers)}: say which in capture.aux_layers"
        )
    return layers


def made_from(plan: TrainingPlan, inputs: Inputs) -> dict[str, str]:
    """What decides the states, by name; limits and buffers are left out, for they do not."""
    capture, engine = plan.capture, plan.engine
    return {
        "samples": inputs.digest,
        "target": target_digest(target_identity(inputs.target.folder)),
        "capture.aux_layers": str(list(inputs.layout.aux_layers)),
        "capture.engine": capture.engine,
        "capture.dtype": capture.dtype,
        "capture.max_length": str(capture.max_length),
        "capture.batch": str(capture.batch),
        "capture.shard_tokens": str(capture.shard_tokens),
        "capture.online": str(capture.online),
        "engine.dtype": engine.dtype,
        "engine.device": engine.device,
    }


def capture_spec(plan: TrainingPlan, inputs: Inputs, workdir: Path) -> CaptureSpec:
    """How the source of the plan is opened for these samples."""
    engine = plan.engine

    return CaptureSpec(
        target=inputs.target.folder,
        aux_layers=inputs.layout.aux_layers,
        max_length=max(len(row.token_ids) for row in inputs.rows),
        batch=plan.capture.batch,
        workdir=workdir,
        dtype=engine.dtype,
        device=engine.device,
        threads=engine.threads,
        tensor_parallel=engine.tensor_parallel,
        kv_cache_gib=engine.kv_cache_gib,
        trust_remote_code=engine.trust_remote_code,
        startup_deadline_s=engine.startup_deadline_s,
        extra_args=engine.extra_args,
        extra_env=engine.extra_env,
        on_phase=start_teller("capture", plan.capture.engine),
    )


def reference_spec(inputs: Inputs, aux_layers: tuple[int, ...], workdir: Path) -> CaptureSpec:
    """The reference engine in float32, for the gate's comparison."""
    return CaptureSpec(
        target=inputs.target.folder,
        aux_layers=aux_layers,
        max_length=max(len(row.token_ids) for row in inputs.rows),
        batch=1,
        workdir=workdir,
        dtype="float32",
    )
