"""The whole training from one plan: every stage in order, finished ones kept.

A stage that was interrupted goes on where it stopped; one whose gate does not pass ends the
pipeline. The table at the end tells what each took (`took`), however often it was begun.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from engines.base import ServeSpec
from engines.catalog import adapter as adapter_named
from harness.errors import GateFailed, HarnessError, UsageError
from training.files import record_bytes
from training.folders import MODULES, STAGES, Stage, best_checkpoint, stage_folder
from training.gate import Check, Gate, read_gate, said
from training.plan import TrainingPlan
from training.progress import clock, note
from training.took import Took, read_times, timed, tokens_of

Run = Callable[[TrainingPlan, Path], Gate]


class StageEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table: `gate` None: not reached; `tokens` that it worked through, if any."""

    stage: Stage
    seconds: float
    gate: Gate | None
    figures: str
    tokens: int | None = None
    tokens_per_s: float | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the pipeline tells when it ends. `next`: the command that measures the drafter."""

    folder: str
    stages: tuple[StageEnd, ...]
    next: str | None


def run(plan: TrainingPlan, out: Path, *, runs: dict[Stage, Run] | None = None) -> Outcome:
    """Run every stage that has not ended; returns the whole table.

    `runs`: the stages' functions (the package's own by default). Raises what a stage raises.
    """
    check_beforehand(plan, out)
    for stage in STAGES:
        done = timed(out, stage, partial(_run_of(stage, runs), plan, out))
        how = "kept" if done.kept else f"passed in {elapsed(done.seconds)}"
        note(f"pipeline: {stage} {how}: {key_figures(done.gate)}")
    return outcome(plan, out)


def _run_of(stage: Stage, runs: dict[Stage, Run] | None) -> Run:
    if runs is not None:
        return runs[stage]
    found: Run = importlib.import_module(MODULES[stage]).run
    return found


def check_beforehand(plan: TrainingPlan, out: Path) -> None:
    """Raise now what would end a late stage: a target or an engine that is not there.

    A disk that is smaller than the estimate is told, not refused: the lengths are assumed.
    """
    from training.targets import target_folder

    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: not a folder; give a new one, or a training's own")
    target = target_folder(plan)
    if plan.drafter.finetune is not None:
        check_finetuned(plan, target)
    _check_offline(plan, target, out)
    for name in plan.evaluate.engines:
        if name == "openai":
            raise UsageError(
                "evaluate.engines: openai is a server that runs already: leave it out here, and "
                "run `evaluate --engine openai --url URL` for itself"
            )
        adapter_named(name).check(
            ServeSpec(
                target=target, served_name="target", port=1, device=plan.engine.device,
                max_model_len=plan.engine.max_model_len or 2,
                tensor_parallel=plan.engine.tensor_parallel,
            )
        )  # fmt: skip
    _tell_small_disk(plan, out)


def _check_offline(plan: TrainingPlan, target: Path, out: Path) -> None:
    """Raise now where the evaluation could not be made the way that the plan says."""
    from training.evaluation.way import way_of

    if plan.evaluate.offline != "auto":
        way_of(plan, target, stage_folder(out, "evaluate"))


def check_finetuned(plan: TrainingPlan, target: Path) -> None:
    """Raise now what would end the training after days of samples and states."""
    from drafters.checkpoint import load_spec
    from drafters.spec import DrafterError
    from drafters.validate import check_fit, check_numbers

    path = Path(plan.drafter.finetune or "").expanduser()
    try:
        check_fit(path, target)
        check_numbers(path, target)
        own = load_spec(path, target).aux_layers
    except DrafterError as error:
        raise UsageError(f"drafter.finetune: {error}") from None
    asked = plan.capture.aux_layers
    if asked is not None and asked != own:
        raise UsageError(
            f"capture.aux_layers: {list(asked)}, but drafter.finetune {path} takes the hidden "
            f"states {list(own)}; leave capture.aux_layers out"
        )


def _tell_small_disk(plan: TrainingPlan, out: Path) -> None:
    from drafters.spec import DrafterError
    from training.estimate import estimate

    try:
        wanted = estimate(plan).value("disk in all")
    except (HarnessError, DrafterError):  # its sizes are checked where they are used
        return
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if wanted > free and not stage_folder(out, "capture").exists():
        note(
            f"pipeline: the plan is estimated at {wanted / 1e9:,.0f} GB and {place} has "
            f"{free / 1e9:,.0f} GB: capture.dtype=fp8 takes half of the states, capture.online "
            "stores none"
        )


def outcome(plan: TrainingPlan, out: Path) -> Outcome:
    """The table of a training's folder as it stands."""
    times = read_times(out)
    stages = []
    for stage in STAGES:
        gate = read_gate(stage_folder(out, stage))
        seconds = times.stages.get(stage, Took()).seconds
        tokens = None if gate is None else tokens_of(out, stage)
        stages.append(
            StageEnd(
                stage=stage,
                seconds=seconds,
                gate=gate,
                figures="" if gate is None else key_figures(gate),
                tokens=tokens,
                tokens_per_s=tokens / seconds if tokens is not None and seconds else None,
            )
        )
    whole = all(each.gate is not None and each.gate.passed for each in stages)
    return Outcome(
        folder=str(out), stages=tuple(stages), next=next_command(plan, out) if whole else None
    )


def key_figures(gate: Gate, most: int = 3) -> str:
    """What failed, or else the gate's first figures."""
    if not gate.passed:
        return said(gate.failed[0])
    told = [check for check in gate.checks if check.value is not None]
    return "; ".join(_short(check) for check in told[:most])


def _short(check: Check) -> str:
    value = f"{check.value:.4g}" if isinstance(check.value, float) else str(check.value)
    return f"{check.name} {value}"


def next_command(plan: TrainingPlan, out: Path) -> str:
    """How the drafter is measured: the harness's own command, with its paths filled in."""
    from training.targets import target_folder

    flat = stage_folder(out, "export") / "vllm"
    drafter = flat if flat.is_dir() else best_checkpoint(out)
    named = [name for name in plan.evaluate.engines if name != "openai"]
    words = ["python", "-m", "harness", "run"]
    words += [word for name in named for word in ("--engine", name)]
    words += ["--set", f"target.path={target_folder(plan)}"]
    words += ["--set", f"drafter.path={drafter.absolute()}"]
    words += ["--set", f"speculative.k={plan.evaluate.k}"]
    return shlex.join(words)


def show(found: Outcome, *, as_json: bool) -> None:
    """The table on standard output, its last line the training's folder."""
    if as_json:
        sys.stdout.write(record_bytes(found).decode())
        print(found.folder, file=sys.stderr, flush=True)
    else:
        sys.stdout.write(table(found))
        print(found.folder)
    sys.stdout.flush()


def table(found: Outcome) -> str:
    """Stage, time, tokens, their rate, gate and key figures, one line each; then what is next."""
    rows = [("stage", "time", "tokens", "tokens/s", "gate", "figures")]
    for each in found.stages:
        gate = "not reached" if each.gate is None else "passed" if each.gate.passed else "FAILED"
        took = elapsed(each.seconds) if each.seconds else ""
        tokens = "" if each.tokens is None else f"{each.tokens:,}"
        rate = "" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}"
        rows.append((each.stage, took, tokens, rate, gate, each.figures))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = []
    for row in rows:
        figures = [cell.rjust(width) for cell, width in zip(row[1:4], widths[1:4], strict=True)]
        head = [row[0].ljust(widths[0]), *figures, row[4].ljust(widths[4])]
        lines.append("  ".join([*head, row[5]]).rstrip())
    if found.next is not None:
        lines += ["", "next, measure it:", f"  {found.next}"]
    return "\n".join(lines) + "\n"


def elapsed(seconds: float) -> str:
    """1:02:03, 2:03, or 4.5 s."""
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def run_and_show(plan: TrainingPlan, out: Path, *, as_json: bool) -> None:
    """The command `pipeline`: the table is shown however far it came. Raises what `run` does."""
    try:
        found = run(plan, out)
    except GateFailed:
        show(outcome(plan, out), as_json=as_json)
        raise
    show(found, as_json=as_json)


def show_estimate(plan: TrainingPlan, *, as_json: bool) -> None:
    """The command `pipeline --dry-run`: nothing is started, nothing is written."""
    from training.estimate import estimate, sizes_of
    from training.estimate_text import estimate_json, estimate_text
    from training.original_run import compared, is_kimi

    facts = sizes_of(plan).facts
    original = compared() if is_kimi(facts.hidden_size, facts.layers) else ()
    found = estimate(plan)
    if as_json:
        sys.stdout.write(estimate_json(found, original).decode())
    else:
        sys.stdout.write(estimate_text(found, original))
    sys.stdout.flush()
