"""The server's own counters around a measured window: before, after, and their difference."""

from __future__ import annotations

import time
from dataclasses import asdict

import httpx

from engines.base import Adapter, SpecCounters
from harness.errors import one_line
from harness.measure.fetch import FetchError, fetch
from harness.records import DraftCounts, EngineCounters

SETTLE_S = 5.0
POLL_S = 0.15
TIMEOUT_S = 5.0


class CounterReader:
    """Reads one server's counters. Never raises: counters that cannot be read are None.

    `http` reaches the server, and is closed with the reader.
    """

    def __init__(self, adapter: Adapter, base_url: str, http: httpx.Client) -> None:
        self._adapter = adapter
        self._url = f"{base_url}{adapter.metrics_path}" if adapter.metrics_path else None
        self._http = http

    def close(self) -> None:
        """Close the connection kept alive."""
        self._http.close()

    def read(self) -> SpecCounters | None:
        """The counters now, or None where the server publishes none."""
        if self._url is None:
            return None
        try:
            status, body = fetch(self._http, self._url, deadline_s=TIMEOUT_S)
            return (
                self._adapter.counters(body.decode("utf-8", "replace")) if status == 200 else None
            )
        except (FetchError, LookupError, TypeError, ValueError, ArithmeticError):
            return None

    def settled(self, deadline_s: float = SETTLE_S) -> tuple[SpecCounters | None, bool]:
        """Read until nothing runs and two readings agree; False where that did not come about."""
        end = time.monotonic() + deadline_s
        last = self.read()
        while last is not None and time.monotonic() < end:
            time.sleep(POLL_S)
            now = self.read()
            idle = now is not None and not now.running and not now.waiting
            if now == last and idle:
                return now, True
            last = now
        return last, False


def difference(
    before: SpecCounters | None,
    after: SpecCounters | None,
    settled: bool,
    *,
    cut_short: str | None = None,
) -> EngineCounters:
    """What was counted in the window. A counter that ran backwards voids the difference.

    `cut_short` says why the load was given up, such as the engine's death, where it was.
    """
    note: str | None = None
    delta: DraftCounts | None = None
    tokens: int | None = None
    if after is None and cut_short is not None:
        note = f"they were not read again, as the load was cut short: {one_line(cut_short)}"
    elif before is None or after is None:
        note = "the server publishes no counters, or they could not be read"
    elif _ran_backwards(before, after):
        note = "a counter ran backwards: the server was restarted or reset within the window"
    else:
        tokens = _less(after.generation_tokens, before.generation_tokens)
        delta = _drafts(before, after)
        if not settled:
            note = "the counters were still moving when they were read"
    return EngineCounters(
        before=None if before is None else asdict(before),
        after=None if after is None else asdict(after),
        delta=delta,
        generation_tokens=tokens,
        settled=settled,
        note=note,
    )


def _less(after: int | None, before: int | None) -> int | None:
    """`after - before`; a counter that appeared in the window began at zero."""
    return None if after is None else after - (before or 0)


def _drafts(before: SpecCounters, after: SpecCounters) -> DraftCounts | None:
    drafts = _less(after.drafts, before.drafts)
    accepted = _less(after.accepted, before.accepted)
    if drafts is None or accepted is None:
        return None
    positions = after.accepted_per_position
    if positions is not None:
        old = (before.accepted_per_position or ()) + (0,) * len(positions)
        positions = tuple(n - o for n, o in zip(positions, old, strict=False))
    return DraftCounts(
        drafts=drafts,
        drafted=_less(after.drafted, before.drafted),
        accepted=accepted,
        per_position=positions,
    )


def _ran_backwards(before: SpecCounters, after: SpecCounters) -> bool:
    pairs = [
        (before.drafts, after.drafts),
        (before.drafted, after.drafted),
        (before.accepted, after.accepted),
        (before.generation_tokens, after.generation_tokens),
        (before.requests_finished, after.requests_finished),
    ]
    return any(b is not None and (a is None or a < b) for b, a in pairs)
