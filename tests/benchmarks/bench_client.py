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


def test_one_process(benchmark: Any) -> None:
    ours: list[Once] = []
    bare: list[Once] = []

    def both() -> None:
        ours.append(one_round(LOAD, 200, "ours"))
        bare.append(one_round(LOAD, 200, "bare"))

    benchmark.pedantic(both, rounds=3, iterations=1)
    mine = told(benchmark, "ours", result(ours, 200))
    least = told(benchmark, "bare protocol", result(bare, 200))
    # What reading HTTP and JSON and keeping records costs, over noting arrivals alone.
    assert mine <= 3 * least


def test_two_processes(benchmark: Any) -> None:
    rounds: dict[int, list[Once]] = {1: [], 2: []}

    def both() -> None:
        for workers, done in rounds.items():
            load = msgspec.structs.replace(FAST, workers=workers)
            done.append(one_round(load, 200, "ours"))

    benchmark.pedantic(both, rounds=2, iterations=1)
    one = told(benchmark, "1 process", result(rounds[1], 200))
    two = told(benchmark, "2 processes", result(rounds[2], 200))
    # A second process costs its own start, and nothing for each chunk.
    assert two <= 1.5 * one
