"""Who sends when: closed loop by concurrency, open loop by due times. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter_ns

from harness.load.arrivals import poisson
from harness.load.datasets import Prompt
from harness.records import LoadPoint, RequestRecord

Send = Callable[[int, Prompt, int | None], Awaitable[RequestRecord]]
OnDone = Callable[[RequestRecord], None]
GIVE_UP_AFTER = 10
"""Failures in a row after which a cell is given up (and at least twice its concurrency)."""
DRAIN_S = 2.0


class Stop:
    """Why a cell must end early; set once, by whoever notices first."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._event = asyncio.Event()

    def set(self, reason: str) -> None:
        """End the cell; only the first reason is kept."""
        self.reason = self.reason or reason
        self._event.set()

    async def wait(self) -> None:
        """Until the cell must end."""
        await self._event.wait()


class Ledger:
    """Collects records as they come, and gives the cell up when nothing but failures come."""

    def __init__(self, stop: Stop, patience: int, on_done: OnDone | None) -> None:
        self.records: list[RequestRecord] = []
        self._stop = stop
        self._patience = patience
        self._on_done = on_done
        self.failed_in_a_row = 0

    def add(self, record: RequestRecord) -> None:
        """Keep one finished request."""
        self.records.append(record)
        self.failed_in_a_row = self.failed_in_a_row + 1 if record.status == "failed" else 0
        if self.failed_in_a_row >= self._patience:
            self._stop.set(
                f"{self.failed_in_a_row} requests in a row failed, the last with: {record.error}"
            )
        if self._on_done is not None:
            self._on_done(record)


async def execute(
    send: Send,
    prompts: Sequence[Prompt],
    load: LoadPoint,
    *,
    seed: int,
    stop: Stop,
    on_done: OnDone | None = None,
) -> list[RequestRecord]:
    """Drive one cell's load to its end and return its records, by index.

    Prompts are asked in order, from the first again when they run out.
    """
    patience = max(GIVE_UP_AFTER, 2 * (load.concurrency or 0))
    ledger = Ledger(stop, patience, on_done)
    if load.mode == "closed":
        senders = _closed(send, prompts, load, stop, ledger)
    else:
        senders = [asyncio.create_task(_open(send, prompts, load, seed, stop, ledger))]
    await _until_done(senders, stop)
    return sorted(ledger.records, key=lambda record: record.index)


async def _until_done(senders: list[asyncio.Task[None]], stop: Stop) -> None:
    """Wait for all senders; after a stop give the requests under way a moment, then end them."""
    all_done = asyncio.create_task(asyncio.wait(senders))
    stopper = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({all_done, stopper}, return_when=asyncio.FIRST_COMPLETED)
        if not all_done.done():
            await asyncio.wait(senders, timeout=DRAIN_S)
        for sender in senders:
            sender.cancel(stop.reason)
        await asyncio.wait(senders)
    except asyncio.CancelledError:
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        raise
    finally:
        all_done.cancel()
        stopper.cancel()
    for sender in senders:
        if not sender.cancelled():
            sender.result()


def _closed(
    send: Send, prompts: Sequence[Prompt], load: LoadPoint, stop: Stop, ledger: Ledger
) -> list[asyncio.Task[None]]:
    """`concurrency` senders that each ask the next prompt when the last answer is whole."""
    assert load.concurrency is not None
    begun_ns = perf_counter_ns()
    next_index = 0

    def take() -> int | None:
        nonlocal next_index
        over = load.num_requests is not None and next_index >= load.num_requests
        if load.duration_s is not None:
            over = over or (perf_counter_ns() - begun_ns) / 1e9 >= load.duration_s
        if over or stop.reason is not None:
            return None
        next_index += 1
        return next_index - 1

    async def sender() -> None:
        while (index := take()) is not None:
            ledger.add(await send(index, prompts[index % len(prompts)], None))
            if ledger.failed_in_a_row:
                await asyncio.sleep(min(1.0, 0.02 * ledger.failed_in_a_row))

    return [asyncio.create_task(sender()) for _ in range(load.concurrency)]


async def _open(
    send: Send,
    prompts: Sequence[Prompt],
    load: LoadPoint,
    seed: int,
    stop: Stop,
    ledger: Ledger,
) -> None:
    """Send each request when it is due, whatever became of those before it."""
    assert load.request_rate is not None
    offsets = poisson(
        load.request_rate, seed=seed, count=load.num_requests, duration_s=load.duration_s
    )
    begun_ns = perf_counter_ns()
    under_way: set[asyncio.Task[None]] = set()
    broken: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            broken.append(error)  # a defect of ours: a failed request is a record

    async def one(index: int, due_ns: int) -> None:
        ledger.add(await send(index, prompts[index % len(prompts)], due_ns))

    try:
        for index, offset in enumerate(offsets):
            due_ns = begun_ns + int(offset * 1e9)
            while (left_s := (due_ns - perf_counter_ns()) / 1e9) > 0 and stop.reason is None:
                await asyncio.sleep(min(left_s, 0.25))
            if stop.reason is not None:
                break
            task = asyncio.create_task(one(index, due_ns))
            under_way.add(task)
            task.add_done_callback(ended)
        while under_way:
            await asyncio.wait(under_way)
    except asyncio.CancelledError:
        for task in list(under_way):
            task.cancel(stop.reason)
        await asyncio.gather(*list(under_way))
        if stop.reason is None:
            raise
    if broken:
        raise broken[0]
