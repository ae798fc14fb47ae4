"""The story of a run: for each start of an engine launch, warm, drive, measure, save; then tell."""

from __future__ import annotations

import errno
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from engines.base import EngineError, EngineFailed
from harness.announce import title_of
from harness.attach import prepare_all
from harness.doctoring.storage import takes_a_folder
from harness.errors import UsageError, VoidRun
from harness.findings import Summary
from harness.floor import ask_again
from harness.load.drive import Driven, drive
from harness.load.interrupt import held, signal_of
from harness.load.prompts.datasets import Prompt, allot
from harness.measure.counters import CounterWindow
from harness.measure.environment import clock_anchor
from harness.measure.metrics import window_ns
from harness.measure.store import RunFolder, to_json
from harness.measure.table import RequestTable
from harness.pace import announced
from harness.plan.expand import launches_of
from harness.plan.recorded import recorded_command, recorded_plan
from harness.plan.schema import as_dict
from harness.precision import by_engine, check_precision, further, grow, grown
from harness.prepare import Prepared, Request
from harness.probes import (
    ask_parity,
    ask_ties,
    beside_the_load,
    golden_of,
    keep_golden,
)
from harness.progress import Progress
from harness.records import SCHEMA_VERSION, Cell, Manifest, Timeline
from harness.resume import Made, check_same, made_with
from harness.serving import (
    Server,
    acceptance_reader,
    asking_of,
    counter_reader,
    launched,
    warm_up,
)
from harness.stored import analyse, read_run, report

NOT_WRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
)


class Told(Protocol):
    """What a run or a sweep found, as far as its end depends on it."""

    @property
    def void(self) -> str | None:
        """Why nothing may be concluded."""


Found = TypeVar("Found", bound=Told)


class Outcome(msgspec.Struct, Generic[Found], frozen=True, kw_only=True):
    """How a run, or a sweep, ended: what it found, and the errors it ended with, in order."""

    folder: Path
    summary: Found
    errors: tuple[EngineFailed, ...]
    stopped_by: int | None = None

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run before its end."""
        return self.stopped_by is not None

    @property
    def exit_code(self) -> int:
        """3 an engine failed, 4 void, 0 done; 128 and the signal's number where one ended it."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.errors:
            return 3
        return 4 if self.summary.void is not None else 0


def run(request: Request, progress: Progress) -> Outcome[Summary]:
    """Do the whole run. Mistakes of the user are raised before anything is written."""
    check_out(request.out)
    prepared = prepare_all(request)
    for engine in prepared:
        check_precision(engine)
        golden_of(engine)  # a broken file is told before anything is written
    folder = begin(request, prepared)
    tell_plan(prepared, folder, progress)
    return measure(prepared, folder, progress)


def measure(prepared: list[Prepared], folder: RunFolder, progress: Progress) -> Outcome[Summary]:
    """Measure every cell that the folder lacks, then analyse and report what there is.

    An engine that fails ends its own part; the others still have their turn. After a Ctrl-C the
    cells that are done are kept and summed up.
    """
    with folder.claimed(), telling_how_to_go_on(folder):
        return _measure(prepared, folder, progress)


@contextmanager
def telling_how_to_go_on(folder: RunFolder) -> Iterator[None]:
    """What ended a run from without, such as a full disk, is told in one line; cells stay."""
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        raise UsageError(
            f"{error.filename or folder.path}: cannot be written: {error.strerror}; make room, "
            f"then go on with `python -m harness resume {folder.path}`"
        ) from None
    except VoidRun as error:  # a load generating process died
        raise VoidRun(f"{error}; go on with `python -m harness resume {folder.path}`") from None


def _measure(prepared: list[Prepared], folder: RunFolder, progress: Progress) -> Outcome[Summary]:
    errors: list[EngineFailed] = []
    stopped_by: int | None = None
    progress.expect(sum(len(p.cells) for p in prepared))
    try:
        for engine in prepared:
            try:
                measure_engine(engine, folder, progress)
            except EngineFailed as error:
                errors.append(error)
    except KeyboardInterrupt as stop:
        stopped_by = signal_of(stop)
    try:
        progress.stage("analysing")
        summary = analyse(folder.path)
        report(folder.path, progress)
    except KeyboardInterrupt:
        again = "analyse" if stopped_by is None else "resume"
        progress.say(f"what was measured is kept: `python -m harness {again} {folder.path}`")
        raise
    return Outcome(folder=folder.path, summary=summary, errors=tuple(errors), stopped_by=stopped_by)


def measure_engine(prepared: Prepared, folder: RunFolder, progress: Progress) -> None:
    """One engine's starts in their order; more of them where the plan asks for a precision."""
    keep_golden(prepared, folder)
    begun = time.monotonic()
    cells = list(prepared.cells)
    while cells:
        for start in launches_of(cells):
            if not all(folder.has_cell(c.cell_id) for c in start):
                measure_launch(prepared, start, folder, progress)
            else:
                for _ in start:
                    progress.skip()
        cells = []
        if prepared.plan.compare.precision is not None:
            cells = further(prepared, read_run(folder), time.monotonic() - begun, progress)
            grow(prepared, cells, folder, progress)


def measure_launch(
    prepared: Prepared, cells: list[Cell], folder: RunFolder, progress: Progress
) -> None:
    """One start: serve, warm up, and measure each of its cells. Raises `EngineFailed`."""
    first = cells[0]
    variant = first.variant
    warm, shares = deal(prepared, cells)
    launch_dir = folder.new_launch(f"{first.engine}-{variant}-r{first.repeat}")
    with launched(prepared, variant, first.repeat, launch_dir, progress) as server:
        progress.stage(f"warming up {prepared.name} {variant}")
        ask = asking_of(prepared, server, variant)
        warm_up(ask, warm, cells, server)
        with beside_the_load(progress):
            ask_parity(prepared, server, first, folder, launch_dir)
        for cell, prompts in zip(cells, shares, strict=True):
            if folder.has_cell(cell.cell_id):
                progress.skip()
            else:
                measure_cell(prepared, server, cell, prompts, folder, progress)
        with beside_the_load(progress):
            ask_ties(prepared, server, cells, folder)
            ask_again(prepared, server, cells, folder, progress)


def measure_cell(
    prepared: Prepared,
    server: Server,
    cell: Cell,
    prompts: Sequence[Prompt],
    folder: RunFolder,
    progress: Progress,
) -> None:
    """One cell: counters, load, counters, save. Raises `EngineFailed` after saving what came."""
    title = title_of(cell, prepared.cells, searching=prepared.searching)
    reader = counter_reader(prepared, server)
    try:
        counted = CounterWindow(reader)
        progress.cell(title, cell.load.num_requests)
        watch = server.watch
        if watch is not None:
            watch.begin()
        driven = drive(
            asking_of(prepared, server, cell.variant),
            prompts,
            cell.load,
            cell_id=cell.cell_id,
            seed=cell.seed,
            engine_gone=server.gone,
            on_tally=progress.tally,
            workers=prepared.plan.load.workers,
            read_acceptance=acceptance_reader(prepared.adapter, cell.variant),
        )
        if watch is not None:
            watch.end()
        reason = driven.interrupted
        records = RequestTable.of(driven.records)
        if reason is None and not records.answered.all():
            reason = server.lost()
        if reason is None:
            counted.close()
    finally:
        reader.close()
    error = server.failed(reason) if reason else None
    timeline = _timeline(server, driven, records, error)
    counters = counted.difference(cut_short=timeline.interrupted)
    series = None if watch is None else watch.series()
    with held():  # a measured cell is kept, whatever comes in between
        folder.save_cell(cell.cell_id, records, counters, timeline, server.log_path, series)
    if error is not None:
        raise error
    progress.cell_done()


def _timeline(
    server: Server, driven: Driven, records: RequestTable, error: EngineError | None
) -> Timeline:
    begun_ns, ended_ns = window_ns(records)
    return Timeline(
        startup=server.phases,
        ready_s=server.ready_s,
        window_start_ns=begun_ns,
        window_end_ns=ended_ns,
        client_cpu_share=driven.client_cpu_share,
        client=driven.client,
        interrupted=None if error is None else str(error),
        given_up=driven.given_up and server.gone() is None,  # a dead engine refuses nothing
    )


def deal(
    prepared: Prepared, cells: list[Cell]
) -> tuple[tuple[Prompt, ...], tuple[tuple[Prompt, ...], ...]]:
    """The prompts of one start, the same for both variants of a repeat."""
    size = len(prepared.prompts)
    allotment = allot(
        prepared.prompts,
        warmup=prepared.plan.load.warmup_requests,
        needs=[c.load.num_requests or size for c in cells],
        seed=cells[0].seed,
    )
    return allotment.warmup, allotment.cells


def check_out(out: Path, option: str = "--out") -> None:
    """Raise `UsageError` where no folder can be made in `out`, before minutes are spent."""
    try:
        nearest = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
        folder = nearest.is_dir()
    except OSError as error:
        raise UsageError(f"{option} {str(out)[:200]}: {error.strerror}") from None
    if not folder or not takes_a_folder(nearest):
        why = "may not be written to" if folder else "is not a folder"
        raise UsageError(f"{option} {out}: {nearest} {why}; choose another")


def begin(request: Request, prepared: list[Prepared], made: Made | None = None) -> RunFolder:
    """Make the run's folder and write its manifest, the first thing in it.

    `made`: what it is made with, where the caller has looked already.
    """
    now = datetime.now(UTC)
    names = "-".join(p.name for p in prepared)
    run_id = f"{now:%Y%m%d-%H%M%S}-{names}-{secrets.token_hex(2)}"
    folder = RunFolder((request.out / run_id).resolve())
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        run_id=run_id,
        created=now.isoformat(timespec="seconds"),
        command=recorded_command(request.command),
        plan=plan_of(request, prepared),
        clock_anchor=clock_anchor(),
        cells=tuple(c for p in prepared for c in p.cells),
        **msgspec.structs.asdict(made or made_with(prepared)),
    )
    try:
        folder.path.mkdir(parents=True)
        folder.write_manifest(manifest)
    except OSError as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise UsageError(f"--out {request.out}: cannot be written: {error.strerror}") from None
    return folder


def plan_of(request: Request, prepared: list[Prepared]) -> dict[str, Any]:
    """What was asked for, what is served, and each engine's whole plan, for the manifest.

    Secrets are left out.
    """
    asked = msgspec.structs.replace(request, out=Path())
    return recorded_plan(
        {
            "request": msgspec.to_builtins(asked, enc_hook=str),
            "models": {p.name: p.models() for p in prepared},
            "engines": {p.name: as_dict(p.plan) for p in prepared},
        }
    )


def tell_plan(prepared: list[Prepared], folder: RunFolder, progress: Progress) -> None:
    """Say what will be done and why, before it takes time."""
    for p in prepared:
        for line in announced(p, folder.path.parent):
            progress.say(line)
        tell_notes(p, progress)
    progress.say(f"writing to {folder.path}")


def tell_engine(prepared: Prepared, what: str, progress: Progress) -> None:
    """Say what one engine serves and what will be done with it."""
    progress.say(f"{prepared.name}: {prepared.why}; {prepared.served_words()}; {what}")
    tell_notes(prepared, progress)


def tell_notes(prepared: Prepared, progress: Progress) -> None:
    """What was found out about a server, and what of the plan was changed for it."""
    if prepared.label is not None:
        progress.say(f"{prepared.name}: the server is {prepared.label}")
    for note in prepared.notes:
        progress.say(f"{prepared.name}: {note}")


def request_in(folder: RunFolder, manifest: Manifest) -> Request:
    """What the command line asked for when the folder was begun. Raises `UsageError`."""
    try:
        return msgspec.convert(manifest.plan["request"], Request, dec_hook=lambda t, v: t(v))
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise UsageError(
            f"{folder.path / 'manifest.json'}: plan.request cannot be read ({error}); "
            "start a new run"
        ) from None


def resume(path: Path, progress: Progress, *, anyway: bool = False) -> Outcome[Summary]:
    """Measure the cells that a run lacks, by its own plan and seeds. Raises `UsageError`.

    `anyway`: also where the machine, the code or the checkpoints are not those it was begun with.
    """
    folder = RunFolder(path.resolve())
    manifest = folder.manifest()
    request = request_in(folder, manifest)
    prepared = [grown(p, manifest) for p in prepare_all(request)]
    cells = [c for p in prepared for c in p.cells]
    now, then = plan_of(request, prepared), recorded_plan(manifest.plan)
    if cells != by_engine(manifest.cells, prepared) or to_json(now) != to_json(then):
        changed = [key for key in now if to_json(now[key]) != to_json(then.get(key))]
        raise UsageError(
            f"{folder.path / 'manifest.json'}: what it was run with has changed since "
            f"({', '.join(changed) or 'cells'}); start a new run"
        )
    tell_damaged(folder, progress)
    missing = [c for c in cells if not folder.has_cell(c.cell_id)]
    if missing:
        check_same(folder, made_with(prepared), progress, anyway=anyway)
    progress.say(f"{len(missing)} of {len(cells)} cells are missing")
    return measure(prepared, folder, progress)


def tell_damaged(folder: RunFolder, progress: Progress) -> None:
    """Set cells aside that cannot be read, and say that they are measured anew."""
    for cell_id in folder.set_damaged_aside([c.cell_id for c in folder.manifest().cells]):
        progress.say(f"{cell_id}: its files cannot be read, it is measured anew")
