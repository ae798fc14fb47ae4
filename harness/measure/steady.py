"""The steady window: the stretch of a phase in which the load was what the plan says.

At the start of a closed loop all senders ask at once, and at its end the load falls; an open loop
begins with an empty server. Latencies of either belong to no load that was asked for. The rule is
stated in words with each window, and uses when requests were sent and how many, never how long
their answers were: a rule that left out long answers would flatter the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from harness.measure.columns import Bools, Integers, Ints
from harness.measure.table import RequestTable
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
    members: Integers
    growing: bool = False

    def has(self, records: Sequence[RequestRecord]) -> Bools:
        """Which requests belong to the window."""
        if self.level == "whole":
            return np.ones(len(records), bool)
        return np.isin(RequestTable.of(records).ints("index").values, self.members)

    def holds(self, ns: Integers) -> Bools:
        """Which moments lie within."""
        return (self.begin_ns <= ns) & (ns <= self.end_ns)


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that have a place in the phase, in the order of their places `at_ns`."""

    table: RequestTable
    at_ns: Integers
    ended: Ints


def steady_window(
    records: Sequence[RequestRecord], load: LoadPoint | None, least: Level = "steady"
) -> Window | None:
    """The steady window of one phase; None where no request was sent.

    `least` asks for a wider window than could be had: two cells that are compared take the wider
    of their two levels. Without a load the whole phase is taken.
    """
    placed = _placed(RequestTable.of(records))
    if not placed.table.ints("sent_ns").known.any():
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
        if found.requests >= max(FEWEST, FEWEST_SHARE * len(placed.at_ns)):
            return found
    found = _whole(placed, "the whole phase: too few requests lie between ramp-up and drain")
    if load.mode == "closed":
        return found
    growing = _even(load) and _grows(placed, found.begin_ns, int(placed.at_ns[-1]))
    return msgspec.structs.replace(found, growing=growing)


def _placed(table: RequestTable) -> Placed:
    at = placed_ns(table)
    order = np.argsort(at.values, kind="stable")
    order = order[at.known[order]]
    own = table.take(order)
    return Placed(table=own, at_ns=at.values[order], ended=ended_ns(own))


def _even(load: LoadPoint) -> bool:
    """Whether arrivals keep one rate; where they do not, what is under way may well grow."""
    return load.arrival not in ("schedule", "trace")


def placed_ns(records: Sequence[RequestRecord]) -> Ints:
    """The moment that places a request in a phase: when it was due, else when it was sent."""
    table = RequestTable.of(records)
    return first_known(table.ints("due_ns"), table.ints("sent_ns"))


def ended_ns(records: Sequence[RequestRecord]) -> Ints:
    """When each request's answer ended."""
    table = RequestTable.of(records)
    return first_known(table.ints("end_ns"), table.lists("chunk_ns").last())


def first_known(one: Ints, other: Ints) -> Ints:
    """The first where it is known, else the other."""
    return Ints(np.where(one.known, one.values, other.values), one.known | other.known)


def _opened_closed(placed: Placed, load: LoadPoint) -> int | None:
    """When the first answer ended after the load had reached its full concurrency."""
    size = load.concurrency or 1
    if len(placed.at_ns) <= size:
        return None
    full_ns = placed.at_ns[size - 1]
    ends = placed.ended.values[placed.table.answered & placed.ended.known]
    ends = ends[ends >= full_ns]
    return int(ends.min()) if len(ends) else None


def _opened_open(placed: Placed) -> int | None:
    """When the answer to the request that was sent first had ended."""
    answered = np.flatnonzero(placed.table.answered)[:1]
    known = answered[placed.ended.known[answered]]
    return int(placed.ended.values[known[0]]) if len(known) else None


def _window(placed: Placed, load: LoadPoint, opened_ns: int, level: Level) -> Window:
    # A conversation's later turns go on when nobody begins one any more: the load falls then.
    firsts = placed.at_ns[placed.table.ints("turn").values == 0]
    end_ns = int(firsts[-1] if len(firsts) else placed.at_ns[-1])
    inside = np.flatnonzero((opened_ns <= placed.at_ns) & (placed.at_ns <= end_ns))
    before = len(placed.at_ns) - len(inside)
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
        members=placed.table.ints("index").values[inside],
        growing=not closed and _even(load) and _grows(placed, opened_ns, end_ns),
    )


def _whole(placed: Placed, rule: str) -> Window:
    sent, arrived = placed.table.ints("sent_ns"), placed.table.lists("chunk_ns").last()
    first = int(sent.values[sent.known].min())
    arrivals = arrived.values[arrived.known].max(initial=first)
    return Window(
        begin_ns=first,
        end_ns=max(int(placed.at_ns[-1]), int(arrivals)),
        level="whole",
        rule=rule,
        requests=len(placed.at_ns),
        members=placed.table.ints("index").values,
    )


def _grows(placed: Placed, begin_ns: int, end_ns: int) -> bool:
    """Whether requests under way grew through all thirds of the window, beyond chance.

    Without an overload arrivals and ends differ by chance alone, by about the root of the arrivals.
    """
    if end_ns <= begin_ns:
        return False
    known = placed.table.ints("sent_ns").known
    sent = np.sort(placed.table.ints("sent_ns").values[known])
    ends = np.sort(placed.ended.values[known & placed.ended.known])

    def until(times: Integers, ns: float) -> int:
        return int(times.searchsorted(math.floor(ns), side="right"))  # whole ns: no rounding

    span = end_ns - begin_ns
    moments = [begin_ns + span * i / 30 for i in range(31)]
    marks = [until(sent, ns) - until(ends, ns) for ns in moments]
    thirds = [sum(marks[i : i + 10]) / 10 for i in (0, 10, 21)]
    arrived = until(sent, end_ns) - until(sent, begin_ns)
    growth = marks[-1] - marks[0]
    return thirds[0] < thirds[1] < thirds[2] and growth > GROWTH_SIGMAS * arrived**0.5
