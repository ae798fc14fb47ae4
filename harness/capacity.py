"""The story of a capacity search: the highest load at which the service levels still hold.

Each variant is started once. Every look is a cell like any other, so that nothing is lost when
the search is cut short, and what comes next follows from the cells alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engines.base import EngineFailed
from harness.analyse.bracket import SPAN, By, Look, Search, next_value, points, requests_needed
from harness.analyse.data import SEARCH
from harness.analyse.frontier import SEARCHED, Capacity, at_load, capacity_of, look_of
from harness.attach import prepare_all
from harness.errors import UsageError
from harness.findings import Summary
from harness.load.interrupt import signal_of
from harness.load.prompts.datasets import Prompt, allot
from harness.load.schedule.conversations import opening
from harness.measure.slo import Slo, slo_of, uncounted
from harness.measure.store import RunFolder, read_json, to_json, write_atomic
from harness.plan.expand import cell_id, load_points
from harness.plan.schema import as_dict
from harness.plan.secret import hidden
from harness.prepare import Prepared, Request
from harness.progress import Progress
from harness.records import VARIANTS, Cell, LoadPoint, Manifest, Variant
from harness.resume import check_same, made_with
from harness.run import (
    Outcome,
    begin,
    check_out,
    measure_cell,
    request_in,
    tell_damaged,
    tell_engine,
    telling_how_to_go_on,
)
from harness.serving import Server, asking_of, launched, warm_up
from harness.stored import conclude, read_cell, read_run, report

CAPACITY = "capacity.json"
SPARE = 1.25
"""So many more are sent in an open loop than counted: the steady window leaves some out."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The search as the command line asks for it; None: not said."""

    by: By = "rate"
    attain: float = 0.9
    confidence: float = 0.95
    resolution: float = 0.1
    start: float | None = None
    most: float | None = None
    requests: int | None = None
    seconds: float = 10.0


def search_of(wanted: Wanted) -> Search:
    """The search that is wanted, checked. Raises `UsageError`."""
    for name, value in (("attain", wanted.attain), ("confidence", wanted.confidence)):
        if not 0.5 <= value < 1:
            raise UsageError(f"--{name} {value:g}: a share from 0.5 to below 1 is wanted")
    if not 0.005 <= wanted.resolution <= 1:
        raise UsageError(f"--resolution {wanted.resolution:g}: a share from 0.005 to 1 is wanted")
    start = 1.0 if wanted.start is None else wanted.start
    if not (math.isfinite(start) and 1e-3 <= start <= 1e5):
        raise UsageError(f"--start {start:g}: a load from 0.001 to 100000 is wanted")
    whole = wanted.by == "concurrency"
    start = max(1.0, round(start)) if whole else float(f"{start:.4g}")
    most = start * SPAN if wanted.most is None else wanted.most
    if not (math.isfinite(most) and start <= most <= 1e6):
        raise UsageError(f"--most {most:g}: a load from --start, {start:g}, to 1000000 is wanted")
    if not 0 <= wanted.seconds <= 1e5:
        raise UsageError(f"--seconds {wanted.seconds:g}: a time from 0 to 100000 is wanted")
    search = Search(
        by=wanted.by,
        attain=wanted.attain,
        confidence=wanted.confidence,
        resolution=1 + wanted.resolution,
        start=start,
        highest=float(int(most)) if whole else float(f"{most:.4g}"),
        lowest=1.0 if whole else float(f"{start / SPAN:.4g}"),
        seconds=wanted.seconds,
    )
    least = requests_needed(search.attain, search.z)
    requests = least if wanted.requests is None else wanted.requests
    if requests * search.looks < least:
        raise UsageError(
            f"--requests {requests}: {search.looks} looks of it are too few to show that "
            f"{search.attain:.0%} hold; give {math.ceil(least / search.looks)} or more"
        )
    return msgspec.structs.replace(search, requests=requests)


def capacity(request: Request, wanted: Wanted, progress: Progress) -> Outcome[Summary]:
    """Search from the beginning. Mistakes of the user are raised before anything is written."""
    search = search_of(wanted)
    check_out(request.out)
    prepared = _prepare(request)
    for engine in prepared:
        if not slo_of(as_dict(engine.plan)).said:
            raise UsageError("capacity: no service level is set; give --slo ttft=0.2,tpot=0.05")
        load_at(engine, search, search.start)  # keys that do not go with a search are told now
    folder = begin(request, [msgspec.structs.replace(p, cells=[]) for p in prepared])
    manifest = folder.manifest()
    searched = {engine.name: variants_of(engine) for engine in prepared}
    plan = {**manifest.plan, SEARCH: msgspec.to_builtins(search), SEARCHED: searched}
    folder.write_manifest(msgspec.structs.replace(manifest, plan=plan))
    return _go_on(prepared, search, folder, progress)


def resume(path: Path, progress: Progress, *, anyway: bool = False) -> Outcome[Summary]:
    """Go on with a search that was cut short; `anyway` as of a run. Raises `UsageError`."""
    folder = RunFolder(path.resolve())
    manifest = folder.manifest()
    request = request_in(folder, manifest)
    prepared = _prepare(request)
    for engine in prepared:
        now, then = as_dict(engine.plan), manifest.plan["engines"].get(engine.name, {})
        if to_json(hidden(now)) != to_json(hidden(then)):
            raise UsageError(
                f"{folder.path / 'manifest.json'}: the plan of {engine.name} has changed since; "
                "start anew"
            )
    search = _search_in(manifest, folder)
    tell_damaged(folder, progress)
    if any(hunt.wants() for hunt in _hunts(prepared, search, folder, progress)):
        check_same(folder, made_with(prepared), progress, anyway=anyway)
    return _go_on(prepared, search, folder, progress)


def is_capacity(path: Path) -> bool:
    """Whether a run's folder holds a capacity search. Raises `UsageError`: it holds no run."""
    return SEARCH in RunFolder(path).manifest().plan


def analyse(path: Path) -> Capacity:
    """Compute `summary.json` and `capacity.json` anew. Raises `UsageError`."""
    folder = RunFolder(path)
    run = read_run(folder)
    conclude(folder, run)
    found = capacity_of(run, _search_in(run.manifest, folder))
    write_atomic(path / CAPACITY, to_json(found))
    return found


def read_capacity(path: Path) -> Capacity:
    """A folder's `capacity.json`. Raises `UsageError`."""
    return read_json(path / CAPACITY, Capacity)


def _search_in(manifest: Manifest, folder: RunFolder) -> Search:
    try:
        return msgspec.convert(manifest.plan[SEARCH], Search)
    except (KeyError, msgspec.ValidationError) as error:
        raise UsageError(
            f"{folder.path / 'manifest.json'}: plan.{SEARCH} cannot be read ({error})"
        ) from None


def _prepare(request: Request) -> list[Prepared]:
    """The engines. Of conversations the first turn alone is asked: a rate is one of requests."""
    return [
        msgspec.structs.replace(
            p, searching=True, prompts=[opening(prompt) for prompt in p.prompts]
        )
        for p in prepare_all(request)
    ]


def _saved(folder: RunFolder, cell: Cell) -> bool:
    return bool(folder.saved_cells([cell.cell_id]))


def _go_on(
    prepared: list[Prepared], search: Search, folder: RunFolder, progress: Progress
) -> Outcome[Summary]:
    errors: list[EngineFailed] = []
    stopped_by: int | None = None
    slo = slo_of(as_dict(prepared[0].plan))
    for engine in prepared:
        tell_engine(engine, "one start a variant", progress)
    progress.say(
        f"the highest {search.by} at which {search.attain:.0%} of the requests meet "
        f"{slo.words()}; {search.requests} requests a look"
    )
    progress.say(f"writing to {folder.path}")
    for _ in folder.manifest().cells:
        progress.skip()
    with folder.claimed(), telling_how_to_go_on(folder):
        try:
            for hunt in _hunts(prepared, search, folder, progress):
                try:
                    hunt.run()
                except EngineFailed as error:
                    errors.append(error)
        except KeyboardInterrupt as stop:
            stopped_by = signal_of(stop)
        progress.stage("analysing")
        analyse(folder.path)
        report(folder.path, progress)
    summary = folder.summary()
    return Outcome(folder=folder.path, summary=summary, errors=tuple(errors), stopped_by=stopped_by)


def variants_of(prepared: Prepared) -> list[Variant]:
    """What can be measured: the attached servers' variants, or those that were asked for."""
    if prepared.attached:
        return [v for v in VARIANTS if v in prepared.urls]
    return list(dict.fromkeys(c.variant for c in prepared.cells))


def _hunts(
    prepared: list[Prepared], search: Search, folder: RunFolder, progress: Progress
) -> Iterator[Hunt]:
    for engine in prepared:
        for variant in variants_of(engine):
            yield Hunt(engine, variant, search, folder, progress)


def load_at(prepared: Prepared, search: Search, value: float) -> LoadPoint:
    """The load of one look: the plan's own but for how much, and how many requests."""
    closed = search.by == "concurrency"
    size = int(value) if closed else 0
    section = msgspec.structs.replace(
        prepared.plan.load,
        concurrency=(size,) if closed else None,
        request_rate=None if closed else (value,),
        schedule=None,
        trace=None,
        num_requests=sent_in_a_look(search, value),
        duration_s=None,
        num_output_tokens=None,
    )
    return load_points(section)[0]


def sent_in_a_look(search: Search, value: float) -> int:
    """So many that the steady window holds about `search.requests`, and lasts long enough.

    A queue needs time to grow: an overload that is looked at for a second shows nothing.
    """
    if search.by == "concurrency":
        # The opening wave and the drain beside them, and a fifth of all in the window.
        return math.ceil(max(search.requests + 2 * value, 2.5 * value + 1))
    return math.ceil(max(SPARE * search.requests, value * search.seconds))


class Hunt:
    """The search of one engine's variant: one start, then look after look."""

    def __init__(
        self,
        prepared: Prepared,
        variant: Variant,
        search: Search,
        folder: RunFolder,
        progress: Progress,
    ) -> None:
        self.prepared, self.variant, self.search = prepared, variant, search
        self.folder, self.progress = folder, progress
        self.slo: Slo = slo_of(as_dict(prepared.plan))
        known = [
            read_cell(folder, c)
            for c in folder.manifest().cells
            if (c.engine, c.variant) == (prepared.name, variant) and _saved(folder, c)
        ]
        self.looks: list[Look] = [look_of(data, self.slo, search) for data in known]
        self.asked = sum(len(data.records) for data in known)

    def wants(self) -> bool:
        """Whether a look is still to be taken."""
        return next_value(self.looks, self.search) is not None

    def run(self) -> None:
        """Search to the end. Raises `EngineFailed`."""
        if not self.wants():
            return
        name = f"{self.prepared.name}-{self.variant}-r0"
        launch_dir = self.folder.new_launch(name)
        with launched(self.prepared, self.variant, 0, launch_dir, self.progress) as server:
            self._measure(server)

    def _measure(self, server: Server) -> None:
        self.progress.stage(f"warming up {self.prepared.name} {self.variant}")
        warm, pool = self._prompts()
        warm_up(asking_of(self.prepared, server, self.variant), warm, [], server)
        while (value := next_value(self.looks, self.search)) is not None:
            self._look(server, value, pool)

    def _prompts(self) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        warm = self.prepared.plan.load.warmup_requests
        size = max(1, len(self.prepared.prompts) - warm)
        dealt = allot(
            self.prepared.prompts, warmup=warm, needs=[size], seed=self.prepared.plan.seed
        )
        return dealt.warmup, dealt.cells[0]

    def _look(self, server: Server, value: float, pool: tuple[Prompt, ...]) -> None:
        cell = self._cell(value)
        need = cell.load.num_requests or 1
        self.progress.expect(len(self.folder.manifest().cells) + 1)
        prompts = [pool[(self.asked + i) % len(pool)] for i in range(need)]
        try:
            measure_cell(self.prepared, server, cell, prompts, self.folder, self.progress)
        except EngineFailed:
            # A server that refuses an overload is alive: the load is missed, and that is told.
            given_up = self.folder.timeline(cell.cell_id).given_up
            refused = given_up and any(look.met for look in self.looks)
            if not refused or server.lost() is not None:
                raise
        manifest = self.folder.manifest()
        if cell not in manifest.cells:  # one that was damaged is there already
            cells = (*manifest.cells, cell)
            self.folder.write_manifest(msgspec.structs.replace(manifest, cells=cells))
        self.asked += need
        data = read_cell(self.folder, cell)
        if self.slo.tpot_s is not None and data.ok and uncounted(data.ok).all():
            raise UsageError(
                "--slo tpot: the server does not say how many tokens each chunk of an answer "
                "brings, so the time per token is unknown; give ttft and e2el alone"
            )
        self.looks.append(look_of(data, self.slo, self.search))
        self._tell(value)

    def _cell(self, value: float) -> Cell:
        load = load_at(self.prepared, self.search, value)
        name, seed = self.prepared.name, self.prepared.plan.seed
        # The first block that is not there: one between others may have been damaged.
        known = self.folder.saved_cells([c.cell_id for c in self.folder.manifest().cells])
        names = (cell_id(name, self.variant, load, 0, block) for block in itertools.count())
        block, own = next((i, n) for i, n in enumerate(names) if n not in known)
        return Cell(
            cell_id=own,
            engine=name,
            variant=self.variant,
            repeat=0,
            block=block,
            load=load,
            # The same arrivals for both variants at an equal load, others in each block.
            seed=(seed * 1_000_003 + round(value * 1000) * 31 + block) % 2**31,
        )

    def _tell(self, value: float) -> None:
        (point,) = [p for p in points(self.looks, self.search) if p.value == value]
        again = point.judged == "undecided" and point.looks < self.search.looks
        self.progress.say(
            f"{self.prepared.name} {self.variant} at {at_load(self.search.by, value)}: "
            f"{point.met} of {point.of} met the levels "
            f"({point.low:.1%} to {point.high:.1%}): {point.judged}"
            + (", there was no steady state" if point.overloaded else "")
            + (", once more" if again else "")
        )
