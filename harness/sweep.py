"""The story of a sweep: every setting is a run's folder of its own, baselines are measured once.

The starts of all settings are interleaved, so that they can be compared with each other and with
the baseline they share. A shared baseline's cells are linked into every folder that needs them:
each folder is a whole run, to be analysed, reported and resumed like any other.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engines.base import EngineFailed
from harness.analyse.sweep import (
    Measurement,
    Sweep,
    best_of,
    outlooks_of,
    points_of,
)
from harness.attach import prepare_all
from harness.errors import UsageError
from harness.load.interrupt import signal_of
from harness.measure.store import RunFolder, check_version, read_json, to_json, write_atomic
from harness.plan.axes import CHOICE, POINTS, Step, axes_of, settings_of, steps_of
from harness.plan.expand import launches_of
from harness.plan.recorded import recorded_plan, recorded_request, recorded_set
from harness.plan.schema import as_dict
from harness.prepare import Prepared, Request
from harness.progress import Progress
from harness.records import SCHEMA_VERSION, Axis, Cell, Setting, Variant
from harness.resume import Made, all_made_with, check_same
from harness.run import (
    Outcome,
    begin,
    check_out,
    measure_launch,
    plan_of,
    telling_how_to_go_on,
)
from harness.stored import analyse as analyse_run
from harness.stored import read_run, report

SWEEP = "sweep.json"
OWN = ("load.", "workload.", "sampling.", "client.", "slo.", "compare.", "seed")
"""Keys that say how requests are sent: they can be swept against a running server too."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One setting made ready: its request, its engines, and its folder once there is one."""

    setting: Setting
    request: Request
    prepared: list[Prepared]


def sweep(request: Request, over: Sequence[str], progress: Progress) -> Outcome[Sweep]:
    """Do the whole sweep. Mistakes of the user are raised before anything is written."""
    axes = axes_of(over)
    _check_attached(request, axes)
    _check_swept(request, axes)
    check_out(request.out)
    parts = _parts(request, axes)
    _check_plans(parts, axes)
    now = datetime.now(UTC)
    sweep_id = f"sweep-{now:%Y%m%d-%H%M%S}-{'-'.join(request.engines)}-{secrets.token_hex(2)}"
    folder = (request.out / sweep_id).resolve()
    try:
        (folder / "runs").mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--out {request.out}: cannot be written: {error.strerror}") from None
    for part, made in zip(parts, all_made_with([p.prepared for p in parts]), strict=True):
        _begin(part, made, folder)
    told = Sweep(
        schema_version=SCHEMA_VERSION,
        sweep_id=sweep_id,
        request=recorded_request(msgspec.to_builtins(request, enc_hook=str)),
        axes=axes,
        settings=tuple(p.setting for p in parts),
    )
    write_atomic(folder / SWEEP, to_json(told))
    return _measure(folder, told, parts, progress)


def resume(path: Path, progress: Progress, *, anyway: bool = False) -> Outcome[Sweep]:
    """Measure what a sweep lacks; `anyway` as of a run. Raises `UsageError`."""
    folder = path.resolve()
    told = read_sweep(folder)
    try:
        request = msgspec.convert(told.request, Request, dec_hook=lambda t, v: t(v))
    except (TypeError, msgspec.ValidationError) as error:
        raise UsageError(
            f"{folder / SWEEP}: request cannot be read ({error}); start a new sweep"
        ) from None
    parts = _parts(request, told.axes)
    for part in parts:
        manifest = RunFolder(folder / part.setting.run).manifest()
        then = recorded_plan(manifest.plan)
        same = to_json(plan_of(part.request, part.prepared)) == to_json(then)
        if part.setting not in told.settings or not same or _cells(part) != manifest.cells:
            raise UsageError(
                f"{folder / part.setting.run}: what it was run with has changed since; start a new "
                "sweep"
            )
    lacking = [part for part in parts if _lacks(folder, part, parts)]
    now = all_made_with([part.prepared for part in lacking]) if lacking else []
    for part, made in zip(lacking, now, strict=True):
        check_same(RunFolder(folder / part.setting.run), made, progress, anyway=anyway)
    return _measure(folder, told, parts, progress)


def _lacks(folder: Path, part: Part, parts: Sequence[Part]) -> bool:
    """Whether a cell is still to be measured for the setting; a shared baseline's is linked."""
    runs = {p.setting.name: RunFolder(folder / p.setting.run) for p in parts}
    own, shared = runs[part.setting.name], runs[part.setting.baseline]
    return not all(
        (shared if cell.variant == "baseline" else own).has_cell(cell.cell_id)
        for cell in _cells(part)
    )


def is_sweep(path: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (path / SWEEP).is_file()


def read_sweep(folder: Path) -> Sweep:
    """A folder's `sweep.json`. Raises `UsageError`."""
    told = read_json(folder / SWEEP, Sweep)
    check_version(folder / SWEEP, told.schema_version)
    return told


def _check_attached(request: Request, axes: Sequence[Axis]) -> None:
    for axis in axes:
        if request.urls and not axis.key.startswith(OWN):
            raise UsageError(
                f"--over {axis.key}: a running server cannot be changed from here; start one for "
                "each value, run each with --url, and compare the runs"
            )


def _check_swept(request: Request, axes: Sequence[Axis]) -> None:
    """What is swept must not be given a value beside: one of the two would go unheard."""
    for item in request.sets:
        key = item.partition("=")[0].strip()
        if any(axis.key == key for axis in axes):
            raise UsageError(f"--set {item}: {key} is swept with --over; leave one of the two out")
    for axis in axes:
        items = [f"{axis.key}={value}" for value in axis.values]
        if any(recorded_set(item) != item for item in items):
            raise UsageError(
                f"--over {axis.key}: holds a secret, which no record of a sweep may; give it with "
                "--set"
            )


def _check_plans(parts: Sequence[Part], axes: Sequence[Axis]) -> None:
    if any(p.plan.compare.precision is not None for part in parts for p in part.prepared):
        raise UsageError(
            "compare.precision: a sweep makes compare.launches starts of every setting and stops "
            "at none; leave it out"
        )
    drafting = [axis.key for axis in axes if axis.key.startswith(CHOICE)]
    measured = {c.variant for part in parts for p in part.prepared for c in p.cells}
    if drafting and "speculative" not in measured:
        raise UsageError(
            f"--over {drafting[0]}: it changes the speculative variant alone, which --variants "
            "leaves out"
        )


def _parts(request: Request, axes: Sequence[Axis]) -> list[Part]:
    """Every setting made ready, and who shares whose baseline. Raises the user's mistakes."""
    points = tuple(f"{a.key}={','.join(a.values)}" for a in axes if a.key in POINTS)
    owners: dict[bytes, str] = {}
    parts = []
    for setting in settings_of(axes):
        own = msgspec.structs.replace(request, sets=(*request.sets, *points, *setting.sets))
        prepared = prepare_all(own)
        owner = owners.setdefault(baseline_key(prepared), setting.name)
        parts.append(
            Part(
                setting=msgspec.structs.replace(setting, baseline=owner),
                request=own,
                prepared=prepared,
            )
        )
    return parts


def baseline_key(prepared: Sequence[Prepared]) -> bytes:
    """Equal where the baselines are: the plan but for the drafting, and the engine's command.

    An engine may serve the baseline in another way beside another drafter, so that the command
    itself is asked for; the number of draft tokens moves no more than the room set aside for them.
    """
    told = []
    for p in prepared:
        plan = as_dict(p.plan)
        del plan["speculative"], plan["drafter"]
        command: object = p.urls
        if not p.attached and any(c.variant == "baseline" for c in p.cells):
            spec = replace(p.spec("baseline"), port=1, k=1, forced_length=None)
            launch = p.adapter.launch(spec, Path("unused"))
            command = [launch.argv, dict(launch.env)]
        told.append([p.name, plan, command])
    return msgspec.json.encode(told, enc_hook=str, order="deterministic")


def _begin(part: Part, made: Made, folder: Path) -> None:
    """The setting's own run folder, under the setting's name."""
    request = msgspec.structs.replace(part.request, out=folder / "runs")
    begun = begin(request, part.prepared, made)
    place = folder / part.setting.run
    begun.path.rename(place)
    run = RunFolder(place)
    run_id = f"{folder.name}-{place.name}"
    run.write_manifest(msgspec.structs.replace(run.manifest(), run_id=run_id))


def _cells(part: Part) -> tuple[Cell, ...]:
    return tuple(c for p in part.prepared for c in p.cells)


def _measure(folder: Path, told: Sweep, parts: list[Part], progress: Progress) -> Outcome[Sweep]:
    errors: list[EngineFailed] = []
    stopped_by: int | None = None
    _tell(parts, folder, progress)
    with RunFolder(folder).claimed(), telling_how_to_go_on(RunFolder(folder)):
        try:
            for number in range(len(parts[0].prepared)):
                errors.extend(_measure_engine(folder, parts, number, progress))
        except KeyboardInterrupt as stop:
            stopped_by = signal_of(stop)
        progress.stage("analysing")
        _share(folder, parts)
        summary = analyse(folder)
        for part in parts:
            report(folder / part.setting.run, progress)
        _report(folder, progress)
    return Outcome(folder=folder, summary=summary, errors=tuple(errors), stopped_by=stopped_by)


def _tell(parts: list[Part], folder: Path, progress: Progress) -> None:
    """What will be done, before it takes time."""
    starts = cells = 0
    for part in parts:
        for group in (g for p in part.prepared for g in launches_of(p.cells)):
            if group[0].variant == "speculative" or part.setting.baseline == part.setting.name:
                starts, cells = starts + 1, cells + len(group)
    shared = len({p.setting.baseline for p in parts})
    one = "the baseline is" if shared == 1 else f"{shared} baselines, each"
    progress.say(f"{parts[0].prepared[0].name}: {parts[0].prepared[0].why}")
    progress.say(
        f"{len(parts)} settings, {starts} starts, {cells} cells; {one} measured once for the "
        "settings that share it"
    )
    progress.say(f"writing to {folder}")
    progress.expect(cells)


def _measure_engine(
    folder: Path, parts: list[Part], number: int, progress: Progress
) -> list[EngineFailed]:
    """One engine's starts over all settings. A setting that fails ends, the others go on."""
    by_name = {p.setting.name: p for p in parts}
    cells = parts[0].prepared[number].cells
    variants = tuple(dict.fromkeys(c.variant for c in cells))
    errors: list[EngineFailed] = []
    ended: set[tuple[str, Variant]] = set()
    repeats = 1 + max((c.repeat for c in cells), default=0)
    for step in steps_of([p.setting for p in parts], repeats, variants):
        part = by_name[step.setting]
        needed = {(part.setting.baseline, "baseline"), (step.setting, step.variant)}
        if not needed & ended:
            try:
                _start(folder, part, number, step, progress)
            except EngineFailed as error:
                errors.append(error)
                ended.add((step.setting, step.variant))
    return errors


def _start(folder: Path, part: Part, number: int, step: Step, progress: Progress) -> None:
    """One start of one setting's engine. Raises `EngineFailed`."""
    prepared = part.prepared[number]
    run = RunFolder(folder / part.setting.run)
    for cells in launches_of(prepared.cells):
        if (cells[0].variant, cells[0].repeat) != (step.variant, step.repeat):
            continue
        if all(run.has_cell(c.cell_id) for c in cells):
            for _ in cells:
                progress.skip()
            continue
        progress.say(f"{step.setting}: {step.variant}, start {step.repeat + 1}")
        measure_launch(prepared, cells, run, progress)


def _share(folder: Path, parts: list[Part]) -> None:
    """Link every baseline into the folders of the settings that share it."""
    places = {p.setting.name: folder / p.setting.run for p in parts}
    for part in parts:
        source, target = places[part.setting.baseline], places[part.setting.name]
        if source == target:
            continue
        for cell in _cells(part):
            if cell.variant == "baseline" and not RunFolder(target).has_cell(cell.cell_id):
                shutil.rmtree(target / "cells" / cell.cell_id, ignore_errors=True)  # cut short
                _link(source / "cells" / cell.cell_id, target / "cells" / cell.cell_id)
        for start in sorted((source / "launches").glob("*-baseline-*")):
            _link(start, target / "launches" / start.name)


def _link(source: Path, target: Path) -> None:
    """A folder's files under a second name, put in place together; nothing where it is there."""
    if not source.is_dir() or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        shutil.copytree(source, work, copy_function=_link_file)
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def analyse(folder: Path) -> Sweep:
    """Compute every setting's summary and `sweep.json` anew. Raises `UsageError`."""
    told = read_sweep(folder)
    measured = []
    for setting in told.settings:
        run = RunFolder(folder / setting.run)
        summary = analyse_run(run.path)
        measured.append(Measurement(setting=setting, run=read_run(run), summary=summary))
    void = [f"{m.setting.name}: {m.summary.void}" for m in measured if m.summary.void is not None]
    failures = [f"{m.setting.name}: {text}" for m in measured for text in m.summary.failures]
    found = msgspec.structs.replace(
        told,
        points=tuple(p for m in measured for p in points_of(m)),
        best=tuple(best_of(measured)),
        outlooks=tuple(outlooks_of(measured)),
        failures=tuple(failures),
        void="; ".join(void) or None,
    )
    write_atomic(folder / SWEEP, to_json(found))
    return found


def _report(folder: Path, progress: Progress) -> None:
    """The sweep's page. One that fails must not cost a sweep that was measured."""
    try:
        from harness.report.sweep import write_report

        write_report(folder)
    except Exception as error:  # whatever it is, the figures are safe
        progress.say(
            f"the report could not be written ({type(error).__name__}: {error}); the figures are "
            f"in {SWEEP}, try `python -m harness report {folder}`"
        )
