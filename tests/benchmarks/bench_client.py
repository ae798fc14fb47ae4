"""The client against the scripted server: chunks a CPU second, and what more processes bring."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.calibrate import Calibration, one_round
from harness.load.scripted.client_error import ClientResult, Once, pooled
from harness.load.scripted.script import Script

LOAD = Calibration(
    streams=(200,), requests_per_stream=2, script=Script(first_ms=50, gap_ms=10, tokens=(1, 2, 3))
)
FAST = Calibration(
    streams=(200,), requests_per_stream=2, script=Script(first_ms=50, gap_ms=5, chunks=400)
)


def result(rounds: list[Once], streams: int) -> ClientResult:
    """All rounds as one, with nothing lost and nothing counted wrong."""
    one = pooled("ours", streams, rounds)
    assert one.lost == 0, one.first_error
    assert not one.miscounted
    return one


def told(benchmark: Any, name: str, one: ClientResult) -> float:
    """Write a result into the benchmark's JSON; returns CPU in µs a chunk."""
    assert one.cpu_us_per_chunk is not None and one.chunks_per_s is not None
    benchmark.extra_info[f"{name}: CPU µs a chunk"] = round(one.cpu_us_per_chunk, 2)
    benchmark.extra_info[f"{name}: chunks a CPU second"] = round(1e6 / one.cpu_us_per_chunk)
    benchmark.extra_info[f"{name}: chunks/s"] = round(one.chunks_per_s)
    return one.cpu_us_per_chunk


def least_us(rounds: list[Once], starts: list[Once] | None = None) -> float:
    """The least CPU of any round, in µs a chunk; `starts`: rounds whose least is taken off.

    The least, since what else the machine does can only add to it.
    """
    cost, chunks = min((o.cpu_s, sum(len(n.chunk_ns) for n in o.noted)) for o in rounds)
    if starts is not None:
        begun, few = min((o.cpu_s, sum(len(n.chunk_ns) for n in o.noted)) for o in starts)
        cost, chunks = cost - begun, chunks - few
    return 1e6 * cost / chunks


def test_one_worker(benchmark: Any) -> None:
    ours: list[Once] = []
    bare: list[Once] = []

    def both() -> None:
        ours.append(one_round(LOAD, 200, "ours"))
        bare.append(one_round(LOAD, 200, "bare"))

    benchmark.pedantic(both, rounds=3, iterations=1)
    told(benchmark, "ours", result(ours, 200))
    told(benchmark, "bare protocol", result(bare, 200))
    # What reading HTTP and JSON and keeping records costs, over noting arrivals alone.
    assert least_us(ours) <= 3 * least_us(bare)


def test_two_workers(benchmark: Any) -> None:
    rounds: dict[int, list[Once]] = {1: [], 2: []}
    starts: dict[int, list[Once]] = {1: [], 2: []}
    start = msgspec.structs.replace(FAST, script=msgspec.structs.replace(FAST.script, chunks=2))

    def both() -> None:
        for workers in rounds:
            for load, done in ((FAST, rounds), (start, starts)):
                one = msgspec.structs.replace(load, workers=workers)
                done[workers].append(one_round(one, 200, "ours"))

    benchmark.pedantic(both, rounds=3, iterations=1)
    told(benchmark, "1 worker", result(rounds[1], 200))
    told(benchmark, "2 workers", result(rounds[2], 200))
    one, two = (least_us(rounds[n], starts[n]) for n in (1, 2))
    benchmark.extra_info["CPU a chunk, 2 workers over 1"] = round(two / one, 2)
    # A second worker costs its own start and set-up, which both loads have, and each of the two
    # wakes for fewer chunks at a time; what a chunk costs otherwise stays what it is.
    assert two <= 2 * one
