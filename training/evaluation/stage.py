"""The stage `evaluate`: what the drafter should be accepted, and what each engine accepts of it.

In a training's folder it takes the best checkpoint and the held-out prompts; given a drafter and
a target it takes any drafter, whoever trained it, and the workload's prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from drafters.validate import check_fit
from engines.checkpoint import check_named
from harness.plan.schema import SamplingSection
from training.evaluation.captured import walk_captured
from training.evaluation.compare import checks, offline_row, online_row, table
from training.evaluation.offline import walk_offline
from training.evaluation.online import Serving, ask_engine, check_engine
from training.evaluation.prompts import context_of, of_samples, of_states, of_workload
from training.evaluation.records import Evaluation, HeldOut, Offline, Online, WalkedFrom
from training.evaluation.way import KEY, Way, way_of
from training.files import (
    file_digest,
    folder_digest,
    locked,
    read_record,
    write_record,
    write_whole,
)
from training.folders import best_checkpoint, stage_folder
from training.gate import Gate, passed_gate, require, write_gate
from training.heads import read_facts
from training.kept import begin_stage
from training.plan import TrainingPlan
from training.progress import note
from training.shown import REPORT
from training.states import open_source
from training.targets import demo_prompts, target_digest, target_folder, target_identity
from training.unchanged import check_same_samples, unchanged_best

STAGE = "evaluate"
RESULT = "evaluation.json"
TABLE = REPORT
FROM: dict[WalkedFrom, str] = {
    "engine": "the reference engine's answers and states",
    "states": "the captured states of the held-out samples",
}


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, the held-out prompts, and how the offline walk over them is made."""

    serving: Serving
    held: list[HeldOut]
    way: Way
    walk: Callable[[], Offline]


def run(plan: TrainingPlan, work: Path, *, url: str | None = None) -> Gate:
    """Evaluate the training's best checkpoint on its held-out prompts.

    Raises `GateFailed` where an engine accepts more than `evaluate.largest_gap` less, or more,
    than is expected.
    """
    trained = unchanged_best(work)
    check_same_samples(work, "train")
    target, drafter = target_folder(plan), best_checkpoint(work)
    folder = stage_folder(work, "evaluate")
    way = way_of(plan, target, folder)
    context = context_of(plan, read_facts(target).max_positions)
    serving = Serving(
        plan=plan, target=target, drafter=drafter, k=plan.evaluate.k, context=context, url=url
    )
    inputs = {"train": trained.output}
    if way.walked_from == "engine":
        held = of_samples(plan, work, context)
        return _run(_by_engine(serving, held, way), folder, inputs)
    check_same_samples(work, "capture")
    inputs["capture"] = passed_gate(stage_folder(work, "capture"), "capture").output
    serving = msgspec.structs.replace(serving, greedy=plan.sampling.temperature == 0)
    source = open_source(plan, work)
    found = of_states(plan, work, source, context)

    def walk() -> Offline:
        with closing(source):  # with capture.online an engine, in the room of those that are asked
            return walk_captured(serving, found, source, way)

    held = [each for each, _ in found]
    return _run(Expectation(serving=serving, held=held, way=way, walk=walk), folder, inputs)


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
    way = way_of(plan, place, out, states=False)
    context = context_of(plan, read_facts(place).max_positions)
    held = of_workload(plan, place, demo_prompts(plan), context)
    serving = Serving(
        plan=plan, target=place, drafter=drafter, k=plan.evaluate.k, context=context, url=url
    )
    return _run(_by_engine(serving, held, way), out, {"drafter": folder_digest(drafter)})


def _by_engine(serving: Serving, held: list[HeldOut], way: Way) -> Expectation:
    def walk() -> Offline:
        found = walk_offline(
            serving.target,
            serving.drafter,
            held,
            k=serving.k,
            dtype=serving.plan.engine.dtype,
            context=serving.context,
        )
        return msgspec.structs.replace(found, why=way.why)

    return Expectation(serving=serving, held=held, way=way, walk=walk)


def _run(expected: Expectation, folder: Path, inputs: dict[str, str]) -> Gate:
    serving, held = expected.serving, expected.held
    plan = serving.plan
    check_fit(serving.drafter, serving.target)
    for name in plan.evaluate.engines:
        check_engine(name, serving)
    of_target = target_digest(target_identity(serving.target))
    inputs = {**inputs, "prompts": _digest(held), "target": of_target}
    with locked(folder):
        done = begin_stage(folder, STAGE, _sections(serving, expected.way), inputs)
        if done is not None:
            note(f"evaluate: finished already in {folder}")
            return done
        offline = read_record(folder / "offline.json", Offline, "remove it")
        if offline is None:
            note(f"evaluate: offline from {FROM[expected.way.walked_from]}: {expected.way.why}")
            offline = expected.walk()
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
    text = _head(serving, offline) + table(rows, k)
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


def _head(serving: Serving, offline: Offline) -> str:
    """What the table shows, and what its first line was walked over."""
    how = "greedy" if offline.greedy else _sampled(serving.sampling)
    text = f"acceptance at k = {serving.k}, {len(offline.answers)} held-out prompts, {how}\n"
    why = f": {offline.why}" if offline.why else ""
    return text + f"offline: {FROM[offline.walked_from]}{why}\n"


def _sampled(sampling: SamplingSection) -> str:
    told = {"top_p": sampling.top_p, "top_k": sampling.top_k}
    more = [f"{name} {value:g}" for name, value in told.items() if value is not None]
    return ", ".join([f"sampled at temperature {sampling.temperature:g}", *more])


def _sections(serving: Serving, way: Way) -> dict[str, object]:
    """What of the plan decides the figures: how an engine is started decides none of them."""
    plan = serving.plan
    evaluate = msgspec.to_builtins(plan.evaluate)
    del evaluate["offline"]  # the way that was taken counts
    found = {
        "evaluate": evaluate,
        "generate.max_tokens": plan.generate.max_tokens,
        "engine.dtype": plan.engine.dtype,
        "engine.max_model_len": plan.engine.max_model_len,
    }
    if way.walked_from == "states":
        found[KEY] = "states"
    return found if serving.greedy else {**found, "sampling": plan.sampling}


def _digest(held: list[HeldOut]) -> str:
    return hashlib.sha256(msgspec.json.encode(held)).hexdigest()
