"""The steady window: the stretch of a phase in which the load was what the plan says.

At the start of a closed loop all senders ask at once, and at its end the load falls; an open loop
begins with an empty server. Latencies of either belong to no load that was asked for. The rule is
stated in words with each window, and uses when requests were sent and how many, never how long
their answers were: a rule that left out long answers would flatter the server.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

import msgspec

from harness.records import LoadPoint, RequestRecord

FEWEST = 8
FEWEST_SHARE = 0.2
"""A window with fewer requests than both say is too small; a wider one is taken."""
GROWTH_SIGMAS = 3.0
"""Requests under way that grow by more than this times the root of the arrivals do so for good."""

Level = Literal["steady", "started", "whole"]
LEVELS: tuple[Level, ...] = ("steady", "started", "whole")
"""From the strictest: without ramp-up and drain; without ramp-up; the whole phase."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A window on the client's clock, both ends included; the indices of its requests.

    `growing`: under way grew through the whole window, so that no steady state exists.
    """

    begin_ns: int
    end_ns: int
    level: Level
    rule: str
    requests: int
    members: frozenset[int]
    growing: bool = False

    def has(self, r: RequestRecord) -> bool:
        """Whether a request belongs to the window."""
        return self.level == "whole" or r.index in self.members

    def holds(self, ns: int) -> bool:
        """Whether a moment lies within."""
        return self.begin_ns <= ns <= self.end_ns


def steady_window(
    records: Sequence[RequestRecord], load: LoadPoint | None, least: Level = "steady"
) -> Window | None:
    """The steady window of one phase; None where no request was sent.

    `least` asks for a wider window than could be had: two cells that are compared take the wider
    of their two levels. Without a load the whole phase is taken.
    """
    placed = sorted(
        ((at, r) for r in records if (at := placed_ns(r)) is not None), key=lambda pair: pair[0]
    )
    if not any(r.sent_ns is not None for _, r in placed):
        return None
    if load is None:
        return _whole(placed, "the whole phase")
    if load.mode == "closed" and (load.concurrency or 1) == 1:
        return _whole(placed, "the whole phase: one request at a time has no ramp-up and no drain")
    opened_ns = _opened_closed(placed, load) if load.mode == "closed" else _opened_open(placed)
    if opened_ns is None:
        return _whole(placed, "the whole phase: the load never was reached")
    for level in LEVELS[LEVELS.index(least) : -1]:
        found = _window(placed, load, opened_ns, level)
        if found.requests >= max(FEWEST, FEWEST_SHARE * len(placed)):
            return found
    found = _whole(placed, "the whole phase: too few requests lie between ramp-up and drain")
    if load.mode == "closed":
        return found
    growing = _even(load) and _grows([r for _, r in placed], found.begin_ns, placed[-1][0])
    return msgspec.structs.replace(found, growing=growing)


def _even(load: LoadPoint) -> bool:
    """Whether arrivals keep one rate; where they do not, what is under way may well grow."""
    return load.arrival not in ("schedule", "trace")


def placed_ns(r: RequestRecord) -> int | None:
    """The moment that places a request in a phase: when it was due, else when it was sent."""
    return r.due_ns if r.due_ns is not None else r.sent_ns


def ended_ns(r: RequestRecord) -> int | None:
    """When a request's answer ended."""
    if r.end_ns is not None:
        return r.end_ns
    return r.chunk_ns[-1] if r.chunk_ns else None


def _opened_closed(placed: Sequence[tuple[int, RequestRecord]], load: LoadPoint) -> int | None:
    """When the first answer ended after the load had reached its full concurrency."""
    size = load.concurrency or 1
    if len(placed) <= size:
        return None
    full_ns = placed[size - 1][0]
    ends = (e for _, r in placed if r.status == "ok" and (e := ended_ns(r)) is not None)
    return min((e for e in ends if e >= full_ns), default=None)


def _opened_open(placed: Sequence[tuple[int, RequestRecord]]) -> int | None:
    """When the answer to the request that was sent first had ended."""
    return next((ended_ns(r) for _, r in placed if r.status == "ok"), None)


def _window(
    placed: Sequence[tuple[int, RequestRecord]], load: LoadPoint, opened_ns: int, level: Level
) -> Window:
    # A conversation's later turns go on when nobody begins one any more: the load falls then.
    end_ns = max((at for at, r in placed if r.turn == 0), default=placed[-1][0])
    inside = [r for at, r in placed if opened_ns <= at <= end_ns]
    before = len(placed) - len(inside)
    closed = load.mode == "closed"
    tail = (load.concurrency or 1) if closed else before
    if level == "steady":
        inside = inside[: max(0, len(inside) - tail)]
    opens = "the first answer at full concurrency" if closed else "the answer to the first request"
    tail_words = "the concurrency" if closed else "came before it"
    drain = f"without its last requests, as many as {tail_words}: their answers run into the drain"
    if level == "started":
        drain = "answers that run into the drain included, as too few would be left"
    return Window(
        begin_ns=opened_ns,
        end_ns=max(opened_ns, end_ns),
        level=level,
        rule=f"opens when {opens} has ended, closes when the last request is "
        f"{'sent' if closed else 'due'}; {drain}",
        requests=len(inside),
        members=frozenset(r.index for r in inside),
        growing=not closed and _even(load) and _grows([r for _, r in placed], opened_ns, end_ns),
    )


def _whole(placed: Sequence[tuple[int, RequestRecord]], rule: str) -> Window:
    first = min(r.sent_ns for _, r in placed if r.sent_ns is not None)
    arrivals = [r.chunk_ns[-1] for _, r in placed if r.chunk_ns]
    return Window(
        begin_ns=first,
        end_ns=max([placed[-1][0], first, *arrivals]),
        level="whole",
        rule=rule,
        requests=len(placed),
        members=frozenset(r.index for _, r in placed),
    )


def _grows(records: Sequence[RequestRecord], begin_ns: int, end_ns: int) -> bool:
    """Whether requests under way grew through all thirds of the window, beyond chance.

    Without an overload arrivals and ends differ by chance alone, by about the root of the arrivals.
    """
    if end_ns <= begin_ns:
        return False
    sent = sorted(r.sent_ns for r in records if r.sent_ns is not None)
    ends = sorted(e for r in records if r.sent_ns is not None and (e := ended_ns(r)) is not None)

    def under_way(ns: float) -> int:
        return bisect_right(sent, ns) - bisect_right(ends, ns)

    span = end_ns - begin_ns
    marks = [under_way(begin_ns + span * i / 30) for i in range(31)]
    thirds = [sum(marks[i : i + 10]) / 10 for i in (0, 10, 21)]
    arrived = bisect_right(sent, end_ns) - bisect_right(sent, begin_ns)
    growth = marks[-1] - marks[0]
    return thirds[0] < thirds[1] < thirds[2] and growth > GROWTH_SIGMAS * arrived**0.5
