"""The server's own counters around a measured window: before, after, and their difference."""

from __future__ import annotations

import time
from dataclasses import asdict

import httpx

from engines.base import Adapter, SpecCounters
from harness.errors import one_line
from harness.measure.fetch import FetchError, fetch
from harness.records import CounterProblem, DraftCounts, EngineCounters

SETTLE_S = 5.0
POLL_S = 0.15
TIMEOUT_S = 5.0
TRIES = 12
"""Readings that may fail one after another: a page that is gone shall not cost 5 s a cell."""
LEAST = 4
"""So many readings are taken of a page that answers, however long this process was held up."""
RESTART_S = 0.5
"""Start times of one process, or of one counter, that differ by more are of two."""


class CounterReader:
    """Reads one server's counters. Never raises: counters that cannot be read are None.

    `http` reaches the server, and is closed with the reader. `failure` says why the last reading
    brought nothing though the server may publish counters; None: it came, or there are none.
    """

    def __init__(self, adapter: Adapter, base_url: str, http: httpx.Client) -> None:
        self._adapter = adapter
        self._url = f"{base_url}{adapter.metrics_path}" if adapter.metrics_path else None
        self._http = http
        self.failure: str | None = None

    def close(self) -> None:
        """Close the connection kept alive."""
        self._http.close()

    def read(self) -> SpecCounters | None:
        """The counters now, or None where the server publishes none."""
        self.failure = None
        if self._url is None:
            return None
        try:
            status, body = fetch(self._http, self._url, deadline_s=TIMEOUT_S)
            if status != 200:
                # 4xx: there is no such page for us, and there will be none; the rest may pass
                self.failure = f"HTTP {status}" if status >= 500 or status in (408, 429) else None
                return None
            return self._adapter.counters(body.decode("utf-8", "replace"))
        except FetchError as error:
            self.failure = one_line(str(error))
            return None
        except (LookupError, TypeError, ValueError, ArithmeticError):
            return None

    def settled(self, deadline_s: float = SETTLE_S) -> tuple[SpecCounters | None, bool]:
        """Read until nothing runs and two readings agree; False where that did not come about.

        A reading that fails is tried again. If the last one failed the answer is None: earlier ones
        may have been taken before the server had counted everything.
        """
        end = time.monotonic() + deadline_s
        last = self.read()
        failed = taken = 0
        while last is not None or self.failure is not None:
            taken += 1
            failed = 0 if self.failure is None else failed + 1
            late = time.monotonic() > end
            if failed >= TRIES or (late and (failed > 1 or (not failed and taken >= LEAST))):
                break
            time.sleep(POLL_S)
            now = self.read()
            idle = now is not None and not now.running and not now.waiting
            if now == last and idle:
                return now, True
            last = now
        return last, False


class CounterWindow:
    """One reader's counters from when this is made, drained, to `close`, drained again."""

    def __init__(self, reader: CounterReader) -> None:
        self._reader = reader
        self._before, self._settled_before = reader.settled()
        self._unread_before = reader.failure
        self._after: SpecCounters | None = None
        self._settled = False
        self._unread_after: str | None = None

    def close(self) -> None:
        """Read again; a load that was given up has nothing to wait for, and is not read again."""
        self._after, self._settled = self._reader.settled()
        self._unread_after = self._reader.failure

    def difference(self, *, cut_short: str | None = None) -> EngineCounters:
        """What was counted between; see `difference`."""
        return difference(
            self._before,
            self._after,
            self._settled,
            cut_short=cut_short,
            settled_before=self._settled_before or self._before is None,
            unread=(self._unread_before, self._unread_after),
        )


def difference(
    before: SpecCounters | None,
    after: SpecCounters | None,
    settled: bool,
    *,
    cut_short: str | None = None,
    settled_before: bool = True,
    unread: tuple[str | None, str | None] = (None, None),
) -> EngineCounters:
    """What was counted in the window. A counter that ran backwards voids the difference.

    `cut_short` says why the load was given up, such as the engine's death, where it was; `unread`
    why the readings before and after failed, where they did.
    """
    found = _problem(before, after, cut_short, unread)
    problem, note = found or (None, None)
    whole = found is None and before is not None and after is not None
    if whole and not settled:
        note = "the counters were still moving when they were read"
    elif whole and not settled_before:
        note = "the counters were still moving when the window began"
    return EngineCounters(
        before=None if before is None else asdict(before),
        after=None if after is None else asdict(after),
        delta=_drafts(before, after) if before and after and whole else None,
        generation_tokens=_grown(before, after, "generation_tokens") if whole else None,
        settled=settled,
        note=note,
        problem=problem,
        settled_before=settled_before,
        requests_finished=_grown(before, after, "requests_finished") if whole else None,
    )


def _problem(
    before: SpecCounters | None,
    after: SpecCounters | None,
    cut_short: str | None,
    unread: tuple[str | None, str | None],
) -> tuple[CounterProblem, str] | None:
    """Why the two readings have no difference, or None where they have one."""
    if after is None and cut_short is not None:
        why = one_line(cut_short)
        return "cut_short", f"they were not read again, as the load was cut short: {why}"
    if before is None or after is None:
        missing = [
            f"{when} the load ({why or 'no counters on the page'})"
            for when, found, why in zip(("before", "after"), (before, after), unread, strict=True)
            if found is None
        ]
        if not any(unread) and before is after:
            return "unpublished", "the server publishes no counters, or they could not be read"
        return "unread", f"they could not be read {' and '.join(missing)}"
    restarted = _restarted(before, after)
    if restarted is not None:
        return "reset", f"{restarted}: the server was restarted or reset within the window"
    lost = [r.rank for r in before.ranks if r.rank not in {a.rank for a in after.ranks}]
    if lost:
        return "rank_missing", (
            f"{len(lost)} of {len(before.ranks)} ranks read before the load are missing after it "
            f"({', '.join(lost[:8])})"
        )
    backwards = _ran_backwards(before, after)
    if backwards is not None:
        return "reset", (
            f"a counter ran backwards ({backwards}): the server was restarted or reset within "
            "the window"
        )
    return None


def _restarted(before: SpecCounters, after: SpecCounters) -> str | None:
    """What shows that the counters after are not those before gone on, or None."""
    old, new = before.process_start_s, after.process_start_s
    if old is not None and new is not None and abs(new - old) > RESTART_S:
        return f"the server's process began {new - old:+.0f} s from the one read before"
    ranks = {r.rank: r for r in before.ranks}
    for rank in after.ranks:
        was = ranks.get(rank.rank)
        if was is None:
            continue
        made, anew = was.created_s, rank.created_s
        if made is not None and anew is not None and abs(anew - made) > RESTART_S:
            return f"the counters of {rank.rank} were made anew"
        for name in ("drafts", "accepted", "generation_tokens"):
            then, now = getattr(was, name), getattr(rank, name)
            if then is not None and (now is None or now < then):
                return f"{name} of {rank.rank} ran backwards, from {then} to {now}"
    return None


def _less(after: int | None, before: int | None) -> int | None:
    """`after - before`; a counter that appeared in the window began at zero."""
    return None if after is None else after - (before or 0)


def _grown(before: SpecCounters | None, after: SpecCounters | None, name: str) -> int | None:
    return _less(getattr(after, name), getattr(before, name))


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
        past_end=_less(after.accepted_past_end, before.accepted_past_end),
    )


COUNTED = (
    "drafts",
    "drafted",
    "accepted",
    "accepted_past_end",
    "generation_tokens",
    "requests_finished",
)


def _ran_backwards(before: SpecCounters, after: SpecCounters) -> str | None:
    """The first counter that is smaller after than before, with both its values."""
    for name in COUNTED:
        then, now = getattr(before, name), getattr(after, name)
        if then is not None and (now is None or now < then):
            return f"{name} from {then} to {now}"
    old, new = before.accepted_per_position or (), after.accepted_per_position or ()
    for i, (then, now) in enumerate(zip(old, new, strict=False)):
        if now < then:
            return f"accepted at position {i} from {then} to {now}"
    return None
