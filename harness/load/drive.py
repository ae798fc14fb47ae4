"""One cell driven to its end: an event loop, a client, an executor, a watch on the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from harness.load.client import Asking, Client
from harness.load.datasets import Prompt
from harness.load.executors import OnDone, Stop, execute
from harness.records import LoadPoint, RequestRecord

WATCH_EVERY_S = 0.25


class Driven(msgspec.Struct, frozen=True, kw_only=True):
    """A driven cell: its records, the share of a core this process used, and what stopped it."""

    records: tuple[RequestRecord, ...]
    client_cpu_share: float
    interrupted: str | None


def drive(
    asking: Asking,
    prompts: Sequence[Prompt],
    load: LoadPoint,
    *,
    cell_id: str,
    seed: int,
    engine_gone: Callable[[], str | None],
    on_done: OnDone | None = None,
) -> Driven:
    """Drive `load` and return when all its requests have ended.

    `engine_gone` is asked a few times a second; once it gives a reason the cell ends early.
    """
    import uvloop

    begun, cpu = time.perf_counter(), time.process_time()
    records, interrupted = uvloop.run(
        _drive(asking, prompts, load, cell_id, seed, engine_gone, on_done)
    )
    wall = time.perf_counter() - begun
    return Driven(
        records=tuple(records),
        client_cpu_share=(time.process_time() - cpu) / wall if wall > 0 else 0.0,
        interrupted=interrupted,
    )


async def _drive(
    asking: Asking,
    prompts: Sequence[Prompt],
    load: LoadPoint,
    cell_id: str,
    seed: int,
    engine_gone: Callable[[], str | None],
    on_done: OnDone | None,
) -> tuple[list[RequestRecord], str | None]:
    stop = Stop()
    client = Client(asking, cell_id)
    watch = asyncio.create_task(_watch(engine_gone, stop))
    try:
        records = await execute(client.ask, prompts, load, seed=seed, stop=stop, on_done=on_done)
    finally:
        watch.cancel()
        client.close()
    return records, stop.reason


async def _watch(engine_gone: Callable[[], str | None], stop: Stop) -> None:
    while True:
        reason = engine_gone()
        if reason is not None:
            stop.set(reason)
            return
        await asyncio.sleep(WATCH_EVERY_S)
