"""Simulated servers: records of a closed or an open loop, without a clock or a network."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

from harness_records import MS, request

from harness.records import RequestRecord

STEP = 10 * MS


def answer(
    index: int, sent_ns: int, tokens: int, *, wait_ns: int = STEP, due_ns: int | None = None
) -> RequestRecord:
    """One token a chunk, one chunk a step, the first `wait_ns` after the request was sent."""
    chunks = tuple(sent_ns + wait_ns + STEP * i for i in range(tokens))
    return request(
        index=index,
        prompt_id=f"p{index}",
        due_ns=due_ns,
        sent_ns=sent_ns,
        chunk_ns=chunks,
        chunk_tokens=(1,) * tokens,
        token_ids=None,
        output_tokens=tokens,
        end_ns=chunks[-1],
    )


def closed_loop(
    concurrency: int,
    lengths: Sequence[int],
    wait_ns: Callable[[int], int] = lambda index: STEP,
) -> list[RequestRecord]:
    """`concurrency` senders that ask at once, and again when their answer has ended."""
    free = [0] * concurrency
    heapq.heapify(free)
    records = []
    for index, tokens in enumerate(lengths):
        record = answer(index, heapq.heappop(free), tokens, wait_ns=wait_ns(index))
        heapq.heappush(free, record.end_ns or 0)
        records.append(record)
    return records


def open_loop(
    rate_per_s: float, n: int, *, seed: int, slots: int = 4, tokens: int = 10
) -> list[RequestRecord]:
    """Poisson arrivals to a server of `slots` that queues; its capacity: slots / (tokens steps)."""
    random_ = random.Random(seed)
    free = [0] * slots
    now = 0.0
    records = []
    for index in range(n):
        now += random_.expovariate(rate_per_s)
        due = int(now * 1e9)
        begun = max(due, heapq.heappop(free))
        record = answer(index, due, tokens, wait_ns=begun - due + STEP, due_ns=due)
        heapq.heappush(free, record.end_ns or 0)
        records.append(record)
    return records
