"""One cell driven to its end: in this process, or spread over several.

In each a client, an executor and a watch on the engine share an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns

import msgspec

from harness.errors import VoidRun, one_line
from harness.load.fidelity import CpuClock, LagSampler, few_collections
from harness.load.interrupt import run_interruptible
from harness.load.limits import raise_file_limit
from harness.load.prompts.datasets import Prompt
from harness.load.schedule.arrivals import offsets
from harness.load.schedule.conversations import Share
from harness.load.schedule.executors import Stop, execute
from harness.load.slices import Board, Slice, Tally, Yield, read_yield, write
from harness.load.streaming.client import Asking, Client, ReadAcceptance, with_acceptance
from harness.records import ClientFigures, LoadPoint, RequestRecord

WATCH_EVERY_S = 0.25
START_IN_NS = 20_000_000
"""From when all workers are ready to the common start."""
STREAMS_PER_WORKER = 500
RATE_PER_WORKER = 500.0
ROOT = Path(__file__).resolve().parents[2]
EngineGone = Callable[[], str | None]
OnTally = Callable[[Tally], None]


class Driven(msgspec.Struct, frozen=True, kw_only=True):
    """A driven cell: its records by index, how each process fared, and what stopped it.

    `interrupted`, `given_up`: see `Timeline`.
    """

    records: tuple[RequestRecord, ...]
    client: tuple[ClientFigures, ...]
    interrupted: str | None
    given_up: bool = False

    @property
    def client_cpu_share(self) -> float:
        """The largest share of a core that one process used."""
        return max(figures.cpu_share for figures in self.client)


def workers_for(load: LoadPoint, cores: int | None = None) -> int:
    """How many processes a load is spread over where the plan does not say."""
    at_once = load.concurrency or (load.num_requests if load.arrival == "burst" else 0) or 0
    wanted = max(at_once / STREAMS_PER_WORKER, _peak_rate(load) / RATE_PER_WORKER)
    # The server has a right to the other cores.
    spare = max(1, (cores or len(os.sched_getaffinity(0))) // 2)
    return max(1, min(math.ceil(wanted), spare))


def _peak_rate(load: LoadPoint) -> float:
    """The most requests per second that an open loop asks for; a trace's busiest second."""
    if load.schedule is not None:
        return max(max(first, last) for _, first, last in load.schedule)
    if load.arrival == "trace":
        due = offsets(load, seed=0)
        return float(max(due.searchsorted(due + 1.0) - due.searchsorted(due), default=0))
    return load.request_rate or 0.0


def drive(
    asking: Asking,
    prompts: Sequence[Prompt],
    load: LoadPoint,
    *,
    cell_id: str,
    seed: int,
    engine_gone: EngineGone,
    on_tally: OnTally | None = None,
    workers: int | None = None,
    read_acceptance: ReadAcceptance | None = None,
) -> Driven:
    """Drive `load` and return when all its requests have ended.

    `engine_gone` is asked a few times a second; once it gives a reason the cell ends early.
    `workers` None: as many processes as `workers_for` finds right; one is this process.
    `read_acceptance` reads an engine's own figures out of an answer's last payloads.
    """
    taken = Share(workers=workers or workers_for(load)).within(load)
    assert taken is not None  # the first worker always has something to do
    count = taken.workers
    slices = [
        Slice(
            asking=asking,
            prompts=tuple(prompts),
            load=load,
            cell_id=cell_id,
            seed=seed,
            share=Share(worker=w, workers=count),
        )
        for w in range(count)
    ]
    tell = on_tally or (lambda tally: None)
    if count == 1:
        yields = [_drive_here(slices[0], engine_gone, tell)]
    else:
        yields = _drive_apart(slices, engine_gone, tell)
    records = [
        record for y in yields for record in with_acceptance(y.records, y.tails, read_acceptance)
    ]
    stopped = next((y for y in yields if y.interrupted is not None), yields[0])
    return Driven(
        records=tuple(sorted(records, key=lambda record: record.index)),
        client=tuple(y.figures for y in yields),
        interrupted=stopped.interrupted,
        given_up=stopped.given_up,
    )


async def drive_slice(
    work: Slice, stop: Stop, on_tally: OnTally, *, start_ns: int | None = None
) -> Yield:
    """Drive one process's part of a load, in the running event loop."""
    client = Client(work.asking, work.cell_id, worker=work.share.worker)
    tally = Tally()

    def count(record: RequestRecord) -> None:
        nonlocal tally
        tally = tally.plus(record)
        on_tally(tally)

    with few_collections():
        clock, lag = CpuClock(), LagSampler()
        listening = asyncio.create_task(_listen(client, work.asking.quiet_s, stop))
        try:
            records = await execute(
                client.ask,
                work.prompts,
                work.load,
                seed=work.seed,
                stop=stop,
                on_done=count,
                share=work.share,
                start_ns=start_ns,
                cell_id=work.cell_id,
            )
        finally:
            listening.cancel()
            lags = lag.stop()
            await client.aclose()
        figures = clock.figures(work.share.worker, lags)
    return Yield(
        records=tuple(records),
        tails=client.tails,
        figures=figures,
        interrupted=stop.reason,
        given_up=stop.given_up,
    )


def _drive_here(work: Slice, engine_gone: EngineGone, on_tally: OnTally) -> Yield:
    raise_file_limit()

    async def go() -> Yield:
        stop = Stop()
        watch = asyncio.create_task(_watch(engine_gone, stop))
        try:
            return await drive_slice(work, stop, on_tally)
        finally:
            watch.cancel()

    return run_interruptible(go())


async def _listen(client: Client, quiet_s: float | None, stop: Stop) -> None:
    """Ends a load whose server hangs: see `Asking.quiet_s`."""
    if quiet_s is None:
        return
    while client.silent_s() < quiet_s:
        await asyncio.sleep(WATCH_EVERY_S)
    stop.set(f"nothing came from the server for {quiet_s:.0f} s")


async def _watch(engine_gone: EngineGone, stop: Stop) -> None:
    while True:
        reason = engine_gone()
        if reason is not None:
            stop.set(reason)
            return
        await asyncio.sleep(WATCH_EVERY_S)


def _drive_apart(slices: list[Slice], engine_gone: EngineGone, on_tally: OnTally) -> list[Yield]:
    """One process a slice; they begin together, and none outlives this call."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spec-harness-")))
        board = Board(folder / "board", len(slices), create=True)
        stack.callback(board.close)
        processes = []
        for work in slices:
            process = _start(folder, work)
            stack.callback(_end, process)
            processes.append(process)
        _wait(processes, board.all_ready, folder)
        board.start_ns = perf_counter_ns() + START_IN_NS
        told = False

        def over() -> bool:
            nonlocal told
            on_tally(board.tally())
            reason = None if told else engine_gone()
            if reason is not None:
                told = True
                for process in processes:
                    _order(process, reason)
            return all(process.poll() is not None for process in processes)

        _wait(processes, over, folder)
        return [read_yield(folder / f"{work.share.worker}.records") for work in slices]


def _start(folder: Path, work: Slice) -> subprocess.Popen[bytes]:
    worker = work.share.worker
    paths = [folder / f"{worker}.slice", folder / f"{worker}.records", folder / "board"]
    write(paths[0], work)
    with open(folder / f"{worker}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "harness.load.worker", *map(str, paths)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )


def _wait(
    processes: list[subprocess.Popen[bytes]], until: Callable[[], bool], folder: Path
) -> None:
    """Until `until` holds. Raises `VoidRun` where a worker ended without its records."""
    while not until():
        _check(processes, folder)
        time.sleep(0.02)
    _check(processes, folder)


def _check(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for worker, process in enumerate(processes):
        if process.poll() is not None and not (folder / f"{worker}.records").exists():
            said = (folder / f"{worker}.log").read_text("utf-8", "replace").strip().splitlines()
            code = process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
            raise VoidRun(
                f"load generating process {worker} {how}: "
                f"{one_line(said[-1]) if said else 'it said nothing'}"
            )


def _order(process: subprocess.Popen[bytes], reason: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended already
        process.stdin.write(one_line(reason).encode() + b"\n")
        process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    if process.poll() is None:
        process.kill()
    process.wait()
