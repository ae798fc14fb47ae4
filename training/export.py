"""The stage `export`: the best checkpoint in every engine's format, each validated and loaded.

A format's folder appears whole. It is read back and compared with the checkpoint tensor by tensor,
validated against the target, and where its engine is installed really served for a few prompts:
what is accepted of it there must be what was expected of the checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from drafters.convert import convert
from drafters.engines import ENGINES, Engine
from drafters.formats import Destination
from drafters.headers import read_headers, read_json
from drafters.reading import neutral_name
from drafters.spec import DrafterError
from drafters.validate import validate
from engines.base import EngineUsageError
from harness.errors import UsageError
from harness.measure.metrics import acceptance_rate, pool
from training.evaluation.online import Serving, ask_engine, check_engine
from training.evaluation.prompts import context_of
from training.evaluation.records import SERVED, HeldOut, Offline
from training.files import file_digest, locked, read_record, write_record
from training.folders import Stage, best_checkpoint, stage_folder
from training.gate import Check, Gate, passed_gate, require, write_gate
from training.heads import read_facts
from training.kept import begin_stage
from training.plan import TrainingPlan
from training.progress import note
from training.targets import target_folder
from training.unchanged import unchanged_best

STAGE: Stage = "export"
MANIFEST = "manifest.json"
LARGEST_GAP = 0.1
"""Of so few prompts, in acceptance rate: what is broken loses far more."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """One format's folder: its files by SHA-256 and size, and the layer ids written in it."""

    format: Destination
    folder: str
    files: dict[str, str]
    bytes: int
    layer_ids: tuple[int, ...] | None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`: what was exported, from which checkpoint, for which target."""

    checkpoint: str
    checkpoint_digest: str
    target: str
    exports: tuple[Exported, ...]


def run(plan: TrainingPlan, work: Path) -> Gate:
    """Export the training's best checkpoint. Raises `GateFailed` where a format is not right."""
    trained = unchanged_best(work)
    evaluated = passed_gate(stage_folder(work, "evaluate"), "evaluate")
    inputs = {"train": trained.output, "evaluate": evaluated.output}
    with locked(stage_folder(work, STAGE)):
        return _run(plan, work, inputs)


def _run(plan: TrainingPlan, work: Path, inputs: dict[str, str]) -> Gate:
    folder, source = stage_folder(work, STAGE), best_checkpoint(work)
    target = target_folder(plan)
    done = begin_stage(folder, STAGE, {"export": plan.export}, inputs)
    if done is not None:
        note(f"export: finished already in {folder}")
        return done
    exports, checks = _written(plan, source, target, folder)
    loaded = list(_loaded(plan, work, target, exports)) if plan.export.load else []
    manifest = Manifest(
        checkpoint=str(source),
        checkpoint_digest=inputs["train"],
        target=str(target),
        exports=tuple(exports),
    )
    write_record(folder / MANIFEST, manifest)
    gate = Gate.of(STAGE, (*loaded, *checks), output=file_digest(folder / MANIFEST), inputs=inputs)
    write_gate(folder, gate)
    return require(gate, folder)


def _written(
    plan: TrainingPlan, source: Path, target: Path, folder: Path
) -> tuple[list[Exported], list[Check]]:
    """Every format that can hold the drafter, and what was found of each."""
    exports: list[Exported] = []
    checks: list[Check] = []
    for name in plan.export.formats:
        note(f"export: {name}")
        out = folder / name
        try:
            write_format(source, name, target, out)
        except DrafterError as error:
            checks.append(_refused(name, error))
            continue
        exports.append(describe(name, out))
        checks += check_format(source, name, target, out)
    return exports, checks


def write_format(source: Path, to: Destination, target: Path, out: Path) -> None:
    """Write the drafter in `source` to `out` in the form that `to` reads, whole or not at all.

    Raises `DrafterError` where the form cannot hold the drafter.
    """
    shutil.rmtree(out, ignore_errors=True)  # what an interrupted export left
    for note_ in convert(source.resolve(), to, out, target_path=target).notes:
        note(f"export: {to}: {note_}")


def describe(name: Destination, out: Path) -> Exported:
    """The manifest's entry of a written format."""
    files = sorted(path for path in out.iterdir() if path.is_file())
    return Exported(
        format=name,
        folder=str(out),
        files={path.name: file_digest(path) for path in files},
        bytes=sum(path.stat().st_size for path in files),
        layer_ids=_layer_ids(out),
    )


def _layer_ids(folder: Path) -> tuple[int, ...] | None:
    config = read_json(folder / "config.json")
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or (config.get("eagle_config") or {}).get(key)
    return tuple(int(i) for i in ids) if ids else None


def check_format(source: Path, name: Destination, target: Path, out: Path) -> list[Check]:
    """Whether the folder holds the checkpoint's very tensors and fits the target."""
    engine: Engine | None = name if name in ENGINES else None
    found = validate(out, target, engine=engine)
    errors = [finding for finding in found if finding.severity == "error"]
    warnings = [finding for finding in found if finding.severity == "warning"]
    differing = list(different_tensors(source, out))
    return [
        Check(
            name=f"{name}: errors against the target",
            passed=not errors,
            value=len(errors),
            limit=0,
            relation="==",
            reason=errors[0].line() if errors else "",
            advice=f"run `python -m drafters validate {out} --target {target}`",
        ),
        Check(
            name=f"{name}: warnings",
            passed=True,
            value=len(warnings),
            reason=warnings[0].line() if warnings else "",
        ),
        Check(
            name=f"{name}: tensors that are not the checkpoint's",
            passed=not differing,
            value=len(differing),
            limit=0,
            relation="==",
            reason=differing[0] if differing else "",
            advice="the disk changed them: remove the folder and export again",
        ),
    ]


def different_tensors(source: Path, out: Path) -> Iterator[str]:
    """Names of tensors that differ in a bit, or that one folder alone holds."""
    ours, theirs = _tensors(source), _tensors(out)
    optional = {"t2d", "d2t"}  # one is derived from the other
    yield from sorted((set(ours) ^ set(theirs)) - optional)
    for name in sorted(set(ours) & set(theirs)):
        if not _equal(ours[name], theirs[name]):
            yield name


Place = tuple[Path, str]


def _tensors(folder: Path) -> dict[str, Place]:
    """Where each tensor lies, by its neutral name."""
    return {
        neutral_name(name): (header.file, name)
        for name, header in read_headers(folder).items()
        if not name.startswith("verifier_")
    }


def _equal(ours: Place, theirs: Place) -> bool:
    import torch
    from safetensors import safe_open

    with safe_open(ours[0], "pt") as a, safe_open(theirs[0], "pt") as b:
        one, other = a.get_tensor(ours[1]), b.get_tensor(theirs[1])
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _refused(name: Destination, error: DrafterError) -> Check:
    return Check(
        name=f"{name}: written",
        passed=False,
        value="refused",
        reason=str(error),
        advice="take it out of export.formats, or train what it can hold",
    )


def _loaded(
    plan: TrainingPlan, work: Path, target: Path, exports: Sequence[Exported]
) -> Iterator[Check]:
    """Each export in its engine: the first prompts of the evaluation, against what they expect."""
    served = [export for export in exports if export.format in ENGINES]
    if not served:
        return
    context = context_of(plan, read_facts(target).max_positions)
    offline = _offline(work)
    held, expected = evaluated_prompts(plan, work, offline, context)
    for export in served:
        serving = Serving(
            plan=plan,
            target=target,
            drafter=Path(export.folder),
            k=plan.evaluate.k,
            context=context,
            greedy=offline.greedy,
        )
        yield _asked(export.format, serving, held, expected)


def _asked(name: Destination, serving: Serving, held: Sequence[HeldOut], expected: float) -> Check:
    """An export's acceptance in its engine, on `held`."""
    what = f"{name}: acceptance rate of the loaded export"
    try:
        check_engine(name, serving)
    except EngineUsageError as error:
        return Check(name=what, passed=True, reason=f"not loaded: {error}")
    online = ask_engine(name, serving, held, serving.drafter.parent / f"loaded-{name}")
    rate = None if online.counts is None else acceptance_rate(online.counts)
    failed = sum(a.error is not None for a in online.answers)
    return Check(
        name=what,
        passed=rate is not None and not failed and rate >= expected - LARGEST_GAP,
        value=rate,
        limit=expected - LARGEST_GAP,
        relation=">=",
        reason=f"{failed} of {len(held)} requests failed" if failed else "",
        advice="the engine reads this folder otherwise than it was trained",
    )


def _offline(work: Path) -> Offline:
    """What the evaluation expects. Raises `UsageError`."""
    path = stage_folder(work, "evaluate") / "offline.json"
    found = read_record(path, Offline, "evaluate again")
    if found is None:
        raise UsageError(f"{path}: missing; remove {path.parent} and evaluate again")
    return found


def evaluated_prompts(
    plan: TrainingPlan, work: Path, offline: Offline, context: int
) -> tuple[list[HeldOut], float]:
    """The first of the evaluation's prompts, and the acceptance rate expected on them."""
    from training.evaluation.prompts import of_samples, of_states
    from training.states import open_source

    if offline.walked_from == "engine":
        held = of_samples(plan, work, context)[:SERVED]
    else:
        with closing(open_source(plan, work)) as source:
            held = [each for each, _ in of_states(plan, work, source, context)[:SERVED]]
    counts: dict[str, Any] = {w.prompt_id: w.counts for w in offline.answers}
    if not all(h.prompt_id in counts for h in held):
        raise UsageError(
            f"{stage_folder(work, 'evaluate')}: evaluated other prompts than the plan's "
            "evaluate.prompts and evaluate.k ask for; remove that folder and evaluate again"
        )
    total = pool([counts[h.prompt_id] for h in held])
    assert total is not None
    return held, acceptance_rate(total) or 0.0
