"""`python -m training train`: from states and a plan to checkpoints that passed their checks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness.errors import GateFailed, HarnessError, UsageError
from training.errors import TrainingError
from training.files import file_digest, folder_digest, locked
from training.folders import VOCAB_FILE, Stage, stage_folder
from training.gate import Check, Gate, passed_gate, read_gate, require, said, write_gate
from training.plan import TrainingPlan

if TYPE_CHECKING:
    from torch import Tensor

    from training.states import StateSource
    from training.train.console import Console
    from training.train.job import Asked, Job
    from training.train.parallel import World
    from training.train.validation import HeldOut

STAGE: Stage = "train"
STOPPED = 130
FREE = (
    "keep_checkpoints",
    "validate_every",
    "checkpoint_every",
    "serve_check",
    "parallel",
    "restart_optimizer",
)
"""Keys of `train` that do not change what is learnt: they may differ from run to run."""


def run(plan: TrainingPlan, work: Path) -> Gate:
    """Train the drafter of `plan` on the states in `work`, or go on where it stopped.

    Raises `GateFailed` (exit 1) after its gate is written, `UsageError` for a plan or inputs that
    do not fit, `TrainingError` (exit 3) where it cannot go on, KeyboardInterrupt after a signal.
    """
    from training.train.console import Console

    console = Console(speaks=os.environ.get("RANK", "0") == "0")
    with console.speaking():
        console.doing("loading torch")
        from training.train.parallel import enter

        with enter() as world, one_voice(world):
            return _run(plan, work, world, console)


@contextmanager
def one_voice(world: World) -> Iterator[None]:
    """What all processes end with alike is told by the first alone; the others only end."""
    try:
        yield
    except KeyboardInterrupt:
        if world.first:
            raise
        raise SystemExit(STOPPED) from None
    except GateFailed as error:
        if world.first:
            raise
        raise SystemExit(error.exit_code) from None


def _run(plan: TrainingPlan, work: Path, world: World, console: Console) -> Gate:
    from training.targets import target_folder
    from training.train.parallel import barrier

    inputs, asked = _inputs(plan, work)
    folder = stage_folder(work, STAGE)
    with ExitStack() as held:
        done = _begin(folder, plan, inputs, world, held)
        if done is not None:
            console.say(f"train: nothing to do, {folder} is finished and passed its gate")
            return done
        many = f", process {world.rank + 1} of {world.size}" if world.size > 1 else ""
        console.doing(f"reading samples and states in {work} (device {world.device}{many})")
        with _source(plan, work) as source:
            if not plan.capture.online:
                _check_sums(source, world, console)
            job = read_job(plan, work, target_folder(plan), source, asked)
            return train_job(job, inputs, world, console, barrier=barrier)


def train_job(
    job: Job, inputs: dict[str, str], world: World, console: Console, *, barrier: Any
) -> Gate:
    """Train a job to its end and write the stage's gate. Raises `GateFailed`."""
    from training.train.loop import train
    from training.train.serving import check_servable
    from training.train.stopping import Stop

    if job.plan.train.serve_check:
        check_servable(job.facts.folder, job.plan.engine.device)
    train(job, world, console, Stop(console.soon))
    if world.first:
        write_gate(job.folder, judged(job, inputs))
    barrier(world)
    gate = read_gate(job.folder)
    assert gate is not None
    require(gate, job.folder)
    console.say(f"train: {said(gate.checks[1])}; best: {job.folder / 'best'}")
    return gate


def _inputs(plan: TrainingPlan, work: Path) -> tuple[dict[str, str], dict[str, Asked]]:
    """Digests of what the stage is made from, every one of which passed its gate, and what each
    sample answers: the samples are read but once."""
    from training.heads import read_facts
    from training.targets import target_folder
    from training.train.job import Asked
    from training.unchanged import check_same_samples, unchanged_samples, unchanged_vocabulary

    check_same_samples(work, "capture")
    generated, samples = unchanged_samples(work)
    asked = {s.id: Asked(prompt_id=s.prompt_id, greedy=s.greedy) for s in samples}
    gates: dict[Stage, Gate] = {
        "generate": generated,
        "capture": passed_gate(stage_folder(work, "capture"), "capture"),
        "vocab": unchanged_vocabulary(work, read_facts(target_folder(plan)).vocab_size),
    }
    found: dict[str, str] = {stage: gate.output for stage, gate in gates.items()}
    if plan.drafter.finetune is not None:
        found["finetune"] = folder_digest(Path(plan.drafter.finetune).expanduser())
    return found, asked


def sections(plan: TrainingPlan) -> dict[str, Any]:
    """The parts of the plan that decide the weights."""
    train = msgspec.to_builtins(plan.train)
    for key in FREE:
        train.pop(key)
    drafter = msgspec.to_builtins(plan.drafter)
    drafter.pop("finetune")  # its content counts, not its place
    return {"train": train, "drafter": drafter}


def _check_sums(source: StateSource, world: World, console: Console) -> None:
    """Raise `TrainingError` where a shard is no longer what capture's gate spoke of.

    Each process reads its part: a damaged row would be learnt without a word.
    """
    from training.states import StoredStates
    from training.train.parallel import total

    assert isinstance(source, StoredStates)
    shards = source.index.shards[world.rank :: world.size]
    size = sum(shard.bytes for shard in source.index.shards)
    console.doing(f"checking the sums of {len(source.index.shards)} shards, {size / 1e9:,.2f} GB")
    damaged = source.damaged(shards)
    if total([float(damaged is not None)], world)[0]:
        raise damaged or SystemExit(TrainingError.exit_code)


def _begin(
    folder: Path, plan: TrainingPlan, inputs: dict[str, str], world: World, held: ExitStack
) -> Gate | None:
    """The gate where the stage has ended; one process asks for all, and its error ends all.

    It holds the folder for all of them, as long as `held` does.
    """
    from training.kept import begin_stage
    from training.train.parallel import from_first

    done: Gate | HarnessError | None = None
    if world.first:
        try:
            held.enter_context(locked(folder))
            done = begin_stage(folder, STAGE, sections(plan), inputs)
        except HarnessError as error:
            done = error
    done = from_first(done, world)
    if isinstance(done, HarnessError):
        if world.first:
            raise done
        raise SystemExit(done.exit_code)
    return done


@contextmanager
def _source(plan: TrainingPlan, work: Path) -> Iterator[StateSource]:
    """Stored states, or an engine that computes them; the engine ends with the block."""
    from training.states import open_source

    source = open_source(plan, work)
    try:
        yield source
    finally:
        source.close()


def read_job(
    plan: TrainingPlan,
    work: Path,
    target: Path,
    source: StateSource,
    asked: Mapping[str, Asked],
) -> Job:
    """Everything to train on, from the folders of the stages before. Raises `UsageError`."""
    from training.heads import read_facts
    from training.train.job import make_job

    facts = read_facts(target)
    return make_job(
        plan,
        stage_folder(work, STAGE),
        facts,
        source,
        asked=asked,
        vocabulary=read_vocabulary(stage_folder(work, "vocab") / VOCAB_FILE, facts.vocab_size),
    )


def read_vocabulary(path: Path, vocab_size: int) -> Tensor | None:
    """The target ids that can be drafted [D]; None where all can: then there is no file.

    Raises `UsageError` for a table that is none of offsets into the target's vocabulary.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from training.vocab import kept_ids

    if not path.is_file():
        return None
    try:
        table = load_file(path)["d2t"]
    except (SafetensorError, OSError, KeyError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); run vocab again") from None
    kept = kept_ids(table, vocab_size)
    if kept is None:
        raise UsageError(
            f"{path}: d2t is no table of offsets into {vocab_size} tokens; run vocab again"
        )
    return None if len(kept) == vocab_size else torch.from_numpy(kept)


def judged(job: Job, inputs: dict[str, str]) -> Gate:
    """The gate of a training that has ended."""
    from training.train.checkpoints import best_of
    from training.train.examine import read_examination
    from training.train.metrics import read_metrics

    best = best_of(job.folder)
    found = read_examination(best) if best is not None else None
    losses = [r.get("loss") for r in read_metrics(job.folder) if r["kind"] == "update"]
    bad = sum(loss is None or not math.isfinite(loss) for loss in losses)
    checks = (
        Check(
            name="checkpoint that passed its checks",
            passed=found is not None,
            value=best.name if best is not None else None,
            reason="" if found is not None else _why_none(job),
        ),
        _above_trivial(job, found.held_out if found is not None else None),
        Check(
            name="updates without a finite loss",
            passed=bool(losses) and bad == 0,
            value=bad if losses else None,
            limit=0,
            relation="==",
        ),
        Check(
            name="prompts both trained on and held out",
            passed=job.split.shared_prompts == 0,
            value=job.split.shared_prompts,
            limit=0,
            relation="==",
        ),
    )
    output = file_digest(best / "model.safetensors") if best is not None else ""
    return Gate.of(STAGE, checks, output=output, inputs=inputs)


def _above_trivial(job: Job, best: HeldOut | None) -> Check:
    """The best checkpoint against the drafter before its first update.

    A new drafter must be better. One that was gone on from may be good already: it must not have
    become worse by more than chance.
    """
    from training.train.job import BASELINE
    from training.train.validation import HeldOut

    path = job.folder / BASELINE
    before = msgspec.json.decode(path.read_bytes(), type=HeldOut) if path.is_file() else None
    limit = before.acceptance_length if before is not None else None
    finetuned = job.plan.drafter.finetune is not None
    if finetuned and before is not None and limit is not None:
        limit -= 2 * (before.standard_error or 0.0)
    value = best.acceptance_length if best is not None else None
    passed = value is not None and limit is not None
    if value is not None and limit is not None:
        passed = value >= limit if finetuned else value > limit
    less = ", less two standard errors" if finetuned else ""
    return Check(
        name="held-out acceptance length",
        passed=passed,
        value=value,
        limit=limit,
        relation=">=" if finetuned else ">",
        reason=f"the limit is that before the first update{less}",
        advice="nothing was learnt: look at the states, the learning rate and the epochs",
    )


def _why_none(job: Job) -> str:
    """The first failed check of the last checkpoint."""
    from training.train.checkpoints import all_checkpoints
    from training.train.examine import read_examination

    for path in reversed(all_checkpoints(job.folder)):
        found = read_examination(path)
        if found is not None:
            failed = [check for check in found.checks if not check.passed]
            return f"{path.name}: {said(failed[0])}" if failed else "nothing could be walked"
    return "no checkpoint was examined"
