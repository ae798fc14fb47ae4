"""What the benchmarks of the parsers read: whole answers of the scripted server, as bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

import httptools

from harness.load.scripted.script import HEAD, Answers, Script, Wanted

WANTED = Wanted(
    stream=True,
    return_token_ids=True,
    stream_options={"include_usage": True, "continuous_usage_stats": True},
)


class _Bodies:
    """Takes a body out of its chunked encoding."""

    def __init__(self) -> None:
        self.read: list[bytes] = []

    def on_body(self, body: bytes) -> None:
        self.read.append(body)


def reads(chunks: int = 1000, tokens: tuple[int, ...] = (1, 2, 3)) -> list[bytes]:
    """The body of one streamed chat answer, one read a chunk."""
    bodies = _Bodies()
    parser = httptools.HttpResponseParser(bodies)
    parser.feed_data(HEAD)
    for write in Answers(Script(chunks=chunks, tokens=tokens)).stream(chat=True, wanted=WANTED):
        parser.feed_data(write)
    return bodies.read


def side_by_side(
    ours: Callable[[], object], reference: Callable[[], object], rounds: int = 15
) -> float:
    """The time of `ours` over the time of `reference`, the best of rounds taken in turn.

    In turn and the best of many: what else the machine does then spoils neither.
    """
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for i, call in enumerate((ours, reference)):
            begun = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - begun)
    return best[0] / best[1]
