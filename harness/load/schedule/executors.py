"""Who sends when: closed loop by concurrency, open loop by due times. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from time import perf_counter_ns

import msgspec

from harness.load.prompts.datasets import Prompt
from harness.load.schedule.alarm import Alarm
from harness.load.schedule.arrivals import offsets, think_times
from harness.load.schedule.conversations import (
    Conversations,
    Share,
    dropped,
    following,
    opening,
    stamped,
)
from harness.records import LoadPoint, RequestRecord

Send = Callable[[int, Prompt, int | None], Awaitable[RequestRecord]]
OnDone = Callable[[RequestRecord], None]
GIVE_UP_AFTER = 10
"""Failures in a row after which a cell is given up (and at least twice its concurrency)."""
DRAIN_S = 2.0
LOOK_UP_NS = 250_000_000
"""How often a sleeping sender looks whether the cell must end."""
AT_ONCE = 32
"""So many requests are begun before those begun get their turn to be sent."""


class Stop:
    """Why a cell must end early; set once, by whoever notices first.

    `given_up`: because nothing but failures came.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.given_up = False
        self._event = asyncio.Event()

    def set(self, reason: str, *, given_up: bool = False) -> None:
        """End the cell; only the first reason is kept."""
        if self.reason is None:
            self.reason, self.given_up = reason, given_up
        self._event.set()

    async def wait(self) -> None:
        """Until the cell must end."""
        await self._event.wait()


class Ledger:
    """Collects records as they come, and gives the cell up when nothing but failures come."""

    def __init__(
        self, stop: Stop, patience: int, on_done: OnDone | None, most_tokens: int | None = None
    ) -> None:
        self.records: list[RequestRecord] = []
        self.output_tokens = 0
        self.failed_in_a_row = 0
        self._stop = stop
        self._patience = patience
        self._on_done = on_done
        self._most_tokens = most_tokens

    @property
    def full(self) -> bool:
        """Whether the ended requests brought as many output tokens as the load wants."""
        return self._most_tokens is not None and self.output_tokens >= self._most_tokens

    def add(self, record: RequestRecord) -> None:
        """Keep one finished request."""
        self.records.append(record)
        self.output_tokens += record.output_tokens or 0
        if record.status == "failed":
            self.failed_in_a_row += 1
        elif record.status == "ok":  # a dropped arrival says nothing of the server
            self.failed_in_a_row = 0
            if self._most_tokens is not None and record.output_tokens is None:
                self._stop.set(
                    "the server does not say how many tokens it sends; load.num_output_tokens "
                    "cannot end the cell: use load.num_requests or load.duration_s"
                )
        if self.failed_in_a_row >= self._patience:
            self._stop.set(
                f"{self.failed_in_a_row} requests in a row failed, the last with: {record.error}",
                given_up=True,
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
    share: Share = Share(),
    start_ns: int | None = None,
    cell_id: str = "",
) -> list[RequestRecord]:
    """Drive one worker's share of a cell's load to its end and return its records, by index.

    Prompts are asked in order, from the first again when they run out. `start_ns` is when the
    load starts, for all workers alike; None: now. `cell_id` goes into dropped arrivals' records.
    """
    taken = share.within(load)
    if taken is None:
        return []
    patience = max(GIVE_UP_AFTER, 2 * (taken.of(load.concurrency) or 0))
    ledger = Ledger(stop, patience, on_done, taken.of(load.num_output_tokens))
    due = _due(load, taken, seed)  # before the start: a million take some tens of milliseconds
    job = _Job(
        send=send,
        conversations=Conversations(prompts),
        load=load,
        share=taken,
        stop=stop,
        ledger=ledger,
        thinks_s=think_times(load.think_time, load.think_time_s, seed=seed),
        start_ns=perf_counter_ns() if start_ns is None else start_ns,
    )
    if load.mode == "closed":
        senders = _closed(job)
    else:
        senders = [asyncio.create_task(_open(job, due, cell_id))]
    await _until_done(senders, stop)
    return sorted(ledger.records, key=lambda record: record.index)


def _due(load: LoadPoint, share: Share, seed: int) -> list[int]:
    """When this worker's arrivals are due, in nanoseconds after the start; empty: closed loop."""
    if load.mode == "closed":
        return []
    own = offsets(load, seed=seed)[share.worker :: share.workers]
    nanoseconds: list[int] = (own * 1e9).round().astype("int64").tolist()
    return nanoseconds


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


class _Job(msgspec.Struct, kw_only=True):
    """What all senders of a worker have in common: what to send, and when to end."""

    send: Send
    conversations: Conversations
    load: LoadPoint
    share: Share
    stop: Stop
    ledger: Ledger
    thinks_s: list[float]
    start_ns: int
    next_slot_ns: int = 0

    def halted(self) -> bool:
        """Whether no request at all may begin any more."""
        return self.stop.reason is not None or self.ledger.full

    def over(self, at_ns: int | None = None) -> bool:
        """Whether nothing may begin at `at_ns` (None: now) but what was due before."""
        if self.halted():
            return True
        if self.load.duration_s is None:
            return False
        at_ns = perf_counter_ns() if at_ns is None else at_ns
        return at_ns - self.start_ns >= self.load.duration_s * 1e9

    def counted_out(self, index: int) -> bool:
        """Whether the index lies beyond the load's number of requests."""
        return self.load.num_requests is not None and index >= self.load.num_requests

    async def pause(self, until_ns: int) -> bool:
        """Sleep until then; False at once where the load is over by then, or as soon as it is."""
        while not self.over(max(until_ns, now := perf_counter_ns())):
            if now >= until_ns:
                return True
            await asyncio.sleep(min(until_ns - now, LOOK_UP_NS) / 1e9)
        return False

    async def think(self, index: int) -> bool:
        """Let the think time after request `index` pass."""
        think_s = self.thinks_s[index % len(self.thinks_s)]
        if think_s == 0.0:
            return not self.over()
        return await self.pause(perf_counter_ns() + round(think_s * 1e9))

    async def slot(self) -> bool:
        """Wait for the next moment at which `max_request_rate` lets this worker send.

        The moments are spaced evenly and never made up for; the workers' lie between each other.
        """
        rate = self.load.max_request_rate
        if rate is None:
            return True
        if self.next_slot_ns == 0:
            self.next_slot_ns = self.start_ns + round(self.share.worker * 1e9 / rate)
        slot_ns = max(self.next_slot_ns, perf_counter_ns())
        self.next_slot_ns = slot_ns + round(self.share.workers * 1e9 / rate)
        return await self.pause(slot_ns)

    async def converse(self, number: int, due_ns: int | None) -> int:
        """Ask conversation `number` to its end, or until a turn fails; the last index it came to.

        The first turn is sent whatever the time is: it was due, or it was taken in time.
        """
        prompt = self.conversations.prompt(number)
        index, said = self.conversations.first_index(number), opening(prompt)
        for turn in range(1 + len(prompt.turns)):
            record = await self.send(index, said, due_ns if turn == 0 else None)
            self.ledger.add(stamped(record, prompt, turn))
            last = turn == len(prompt.turns) or self.counted_out(index + 1)
            if last or record.status != "ok":
                break
            if not await self.think(index) or not await self.slot():
                break
            said = following(prompt, said, turn + 1, record)
            index += 1
        return index


def _closed(job: _Job) -> list[asyncio.Task[None]]:
    """`concurrency` senders that each ask the next prompt when the last answer is whole."""
    numbers = count(job.share.worker, job.share.workers)
    left = True

    def take() -> int | None:
        nonlocal left
        number = next(numbers) if left and not job.over() else None
        if number is None or job.counted_out(job.conversations.first_index(number)):
            left = False
            return None
        return number

    async def sender() -> None:
        going_on = await job.pause(job.start_ns)
        while going_on and (number := take()) is not None:
            if not await job.slot():
                return
            index = await job.converse(number, None)
            row = job.ledger.failed_in_a_row
            if row:
                going_on = await job.pause(perf_counter_ns() + min(50, row) * 20_000_000)
            going_on = going_on and left and await job.think(index)

    return [asyncio.create_task(sender()) for _ in range(job.share.of(job.load.concurrency) or 0)]


async def _open(job: _Job, due: Sequence[int], cell_id: str) -> None:
    """Begin each conversation when it is due, whatever became of those before it."""
    most = job.share.of(job.load.max_concurrency)
    under_way: set[asyncio.Task[int]] = set()
    broken: list[BaseException] = []
    alarm = Alarm()

    def ended(task: asyncio.Task[int]) -> None:
        under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            broken.append(error)  # a defect of ours: a failed request is a record

    try:
        for place, offset_ns in enumerate(due):
            due_ns = job.start_ns + offset_ns
            number = job.share.worker + place * job.share.workers
            index = job.conversations.first_index(number)
            if job.counted_out(index) or not await _until_due(job, alarm, due_ns, place):
                break
            if broken:
                break
            if most is not None and len(under_way) >= most:
                await asyncio.sleep(0)  # what has just ended is taken note of first
            if most is not None and len(under_way) >= most:
                prompt = job.conversations.prompt(number)
                job.ledger.add(dropped(prompt, index, due_ns, len(under_way), cell_id))
                continue
            task = asyncio.create_task(job.converse(number, due_ns))
            under_way.add(task)
            task.add_done_callback(ended)
        while under_way and not broken:
            await asyncio.wait(under_way, return_when=asyncio.FIRST_EXCEPTION)
            await asyncio.sleep(0)  # the callbacks of what has ended
    except asyncio.CancelledError:
        await _end(under_way, job.stop.reason)
        if job.stop.reason is None:
            raise
    finally:
        alarm.close()
    if broken:
        await _end(under_way, "given up")
        raise broken[0]


async def _until_due(job: _Job, alarm: Alarm, due_ns: int, place: int) -> bool:
    """Sleep until then. False where the load is halted; a request that is late goes at once."""
    if place % AT_ONCE == 0:
        await asyncio.sleep(0)
    while not job.halted():
        now = perf_counter_ns()
        if now >= due_ns:
            return True
        await alarm.until(min(due_ns, now + LOOK_UP_NS))
    return False


async def _end(tasks: set[asyncio.Task[int]], reason: str | None) -> None:
    """Cancel what is under way: with a reason its requests become records."""
    still = list(tasks)
    for task in still:
        task.cancel(reason)
    await asyncio.gather(*still, return_exceptions=True)
