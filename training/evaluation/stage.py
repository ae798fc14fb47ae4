"""The stage `evaluate`: what the drafter should be accepted, and what each engine accepts of it.

In a training's folder it takes the best checkpoint and the held-out prompts; given a drafter and
a target it takes any drafter, whoever trained it, and the workload's prompts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from drafters.validate import check_fit
from engines.checkpoint import check_named
from engines.reference.config import read_config
from training.evaluation.compare import checks, offline_row, online_row, table
from training.evaluation.offline import walk_offline
from training.evaluation.online import Serving, ask_engine, check_engine
from training.evaluation.prompts import context_of, of_samples, of_workload
from training.evaluation.records import Evaluation, HeldOut, Offline, Online
from training.files import (
    file_digest,
    folder_digest,
    locked,
    read_record,
    write_record,
    write_whole,
)
from training.folders import best_checkpoint, stage_folder
from training.gate import Gate, require, write_gate
from training.kept import begin_stage
from training.plan import TrainingPlan
from training.progress import note
from training.shown import REPORT
from training.targets import demo_prompts, target_digest, target_folder, target_identity
from training.unchanged import unchanged_best

STAGE = "evaluate"
RESULT = "evaluation.json"
TABLE = REPORT


def run(plan: TrainingPlan, work: Path, *, url: str | None = None) -> Gate:
    """Evaluate the training's best checkpoint on its held-out prompts.

    Raises `GateFailed` where an engine accepts more than `evaluate.largest_gap` less, or more,
    than is expected.
    """
    trained = unchanged_best(work)
    target, drafter = target_folder(plan), best_checkpoint(work)
    context = context_of(plan, read_config(target).max_positions)
    held = of_samples(plan, work, context)
    return _run(
        plan,
        Serving(
            plan=plan, target=target, drafter=drafter, k=plan.evaluate.k, context=context, url=url
        ),
        held,
        stage_folder(work, "evaluate"),
        {"train": trained.output},
    )


def run_drafter(
    plan: TrainingPlan,
    out: Path,
    *,
    drafter: Path,
    target: Path | None = None,
    url: str | None = None,
) -> Gate:
    """Evaluate any drafter on the workload's prompts; everything goes into `out`.

    `target` goes before the plan's. Raises as `run` does.
    """
    if target is not None:
        section = msgspec.structs.replace(plan.target, path=str(target))
        plan = msgspec.structs.replace(plan, target=section)
    drafter = drafter.expanduser().resolve()
    check_named(drafter, "drafter")
    place = target_folder(plan)
    context = context_of(plan, read_config(place).max_positions)
    held = of_workload(plan, place, demo_prompts(plan), context)
    serving = Serving(
        plan=plan, target=place, drafter=drafter, k=plan.evaluate.k, context=context, url=url
    )
    return _run(plan, serving, held, out, {"drafter": folder_digest(drafter)})


def _run(
    plan: TrainingPlan,
    serving: Serving,
    held: list[HeldOut],
    folder: Path,
    inputs: dict[str, str],
) -> Gate:
    check_fit(serving.drafter, serving.target)
    for name in plan.evaluate.engines:
        check_engine(name, serving)
    of_target = target_digest(target_identity(serving.target))
    inputs = {**inputs, "prompts": _digest(held), "target": of_target}
    with locked(folder):
        done = begin_stage(folder, STAGE, _sections(plan), inputs)
        if done is not None:
            note(f"evaluate: finished already in {folder}")
            return done
        offline = read_record(folder / "offline.json", Offline, "remove it")
        if offline is None:
            offline = walk_offline(
                serving.target,
                serving.drafter,
                held,
                k=serving.k,
                dtype=plan.engine.dtype,
                context=serving.context,
            )
            write_record(folder / "offline.json", offline)
        online = [_asked(name, serving, held, folder) for name in plan.evaluate.engines]
        return _conclude(plan, serving, folder, offline, online, inputs)


def _asked(name: str, serving: Serving, held: list[HeldOut], folder: Path) -> Online:
    """What an engine that was asked before the stage was interrupted said then, else now."""
    path = folder / name / "online.json"
    found = read_record(path, Online, "remove it")
    if found is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = ask_engine(name, serving, held, path.parent)
        write_record(path, found)
    return found


def _conclude(
    plan: TrainingPlan,
    serving: Serving,
    folder: Path,
    offline: Offline,
    online: list[Online],
    inputs: dict[str, str],
) -> Gate:
    k, largest = serving.k, plan.evaluate.largest_gap
    rows = (offline_row(offline), *(online_row(each, offline, k, largest) for each in online))
    result = Evaluation(
        drafter=str(serving.drafter),
        drafter_digest=inputs.get("train") or inputs["drafter"],
        target=str(serving.target),
        k=k,
        prompts=len(offline.answers),
        largest_gap=largest,
        rows=rows,
        offline=offline,
        online=tuple(online),
    )
    text = f"acceptance at k = {k}, {len(offline.answers)} held-out prompts, greedy\n"
    text += table(rows, k)
    write_record(folder / RESULT, result)
    write_whole(folder / TABLE, text.encode())
    gate = Gate.of(
        STAGE,
        checks(rows, offline, online, largest),
        output=file_digest(folder / RESULT),
        inputs=inputs,
    )
    write_gate(folder, gate)
    return require(gate, folder)


def _sections(plan: TrainingPlan) -> dict[str, object]:
    """What of the plan decides the figures: how an engine is started decides none of them."""
    return {
        "evaluate": plan.evaluate,
        "generate.max_tokens": plan.generate.max_tokens,
        "engine.dtype": plan.engine.dtype,
        "engine.max_model_len": plan.engine.max_model_len,
    }


def _digest(held: list[HeldOut]) -> str:
    return hashlib.sha256(msgspec.json.encode(held)).hexdigest()
