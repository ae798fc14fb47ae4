"""What is wrong with a cell's counts of draft tokens: each way they can lie has its own caution.

Three facts hold of an engine that counts right, and each check holds the counts against one:

- all tokens that it counted in the window arrived here, and no others;
- no more draft tokens were accepted than drafted, nor more drafts at a position than were made;
- a verify step gives what it accepted and one token more (the bonus token), so that drafts and
  accepted tokens add up to the output after each answer's first token, but for what was cut off
  at its end (at most k tokens a request).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import msgspec

from harness.analyse.data import CellData
from harness.analyse.requests import drafted_a_step
from harness.findings import Caution
from harness.records import DraftCounts

TRAFFIC = 0.01
"""A larger difference between the server's tokens and ours is no rounding: both count tokens."""
ABOUT_ALL = 0.02

Sources = Mapping[str, DraftCounts | None]


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The server's tokens and finished requests in the window against this client's."""

    server: int | None
    client: int | None
    finished: int | None
    sent: int
    whole: bool
    new_ranks: tuple[str, ...]

    @property
    def more_tokens(self) -> bool:
        """Whether the server made more tokens than can have come here."""
        if self.server is None or not self.client or not self.whole:
            return False
        return self.server > self.client * (1 + TRAFFIC)

    @property
    def more_requests(self) -> bool:
        """Whether the server ended more requests than were sent from here."""
        return self.finished is not None and self.finished > self.sent

    @property
    def fewer_tokens(self) -> bool:
        """Whether the server counted fewer tokens than came here."""
        if self.server is None or not self.client:
            return False
        return self.server < self.client * (1 - TRAFFIC)


def traffic(data: CellData) -> Traffic:
    """What the server counted of the window, and what this client sent and got."""
    sent = data.records.ints("sent_ns").known
    counters = data.counters
    return Traffic(
        server=counters.generation_tokens,
        client=data.ok.ints("output_tokens").total(),
        finished=counters.requests_finished,
        sent=int(data.records.ints("tries").values[sent].sum()),
        whole=data.whole,
        new_ranks=new_ranks(data),
    )


def new_ranks(data: CellData) -> tuple[str, ...]:
    """Ranks read after the load that were not there before it, where there were any."""
    before, after = (_ranks(reading) for reading in (data.counters.before, data.counters.after))
    return tuple(sorted(after - before)) if before else ()


def _ranks(reading: dict[str, object] | None) -> set[str]:
    ranks = (reading or {}).get("ranks") or ()
    if not isinstance(ranks, list | tuple):
        return set()
    return {str(r["rank"]) for r in ranks if isinstance(r, dict) and "rank" in r}


def bonus_counted(data: CellData, counts: DraftCounts | None) -> str | None:
    """What shows that the bonus token was counted as an accepted draft token, or None."""
    if counts is None or not counts.drafts:
        return None
    if counts.drafted is not None and counts.accepted > counts.drafted:
        return f"{counts.accepted} of {counts.drafted} draft tokens were accepted"
    if counts.per_position and max(counts.per_position) > counts.drafts:
        most = max(counts.per_position)
        return f"{most} of {counts.drafts} drafts were accepted at one position"
    k = drafted_a_step(counts)
    if k and counts.accepted > k * counts.drafts:
        return f"{counts.accepted / counts.drafts:.2f} of {k} draft tokens a step were accepted"
    found = traffic(data)
    if not k or found.client is None or not found.whole:
        return None
    if found.more_tokens or found.fewer_tokens or found.more_requests:
        return None
    after_first = found.client - len(data.ok)
    # Cut tokens cannot explain it where there are more drafts than they could be.
    if counts.drafts > k * len(data.ok) and counts.accepted >= after_first:
        return (
            f"{counts.accepted} draft tokens are told as accepted in {counts.drafts} drafts, but "
            f"only {after_first} tokens came after the answers' first, so that no step would have "
            "given a token of the target's own"
        )
    return None


def _one_more_a_step(sources: Sources) -> str | None:
    """Whether the counters tell one accepted token a draft more than the requests do."""
    counted, told = sources.get("counters"), sources.get("per_request")
    if counted is None or told is None or not told.drafts or counted.drafts != told.drafts:
        return None
    more = counted.accepted - told.accepted
    if abs(more - told.drafts) > ABOUT_ALL * told.drafts:
        return None
    return (
        f"the counters tell {counted.accepted} accepted tokens and the requests' own figures "
        f"{told.accepted}, about one more for each of {told.drafts} drafts"
    )


def counters_doubted(data: CellData, sources: Sources) -> bool:
    """Whether the counters' draft counts are of other steps than ours, or count otherwise."""
    found = traffic(data)
    wrong_traffic = found.more_tokens or found.fewer_tokens or found.more_requests
    bonus = bonus_counted(data, sources.get("counters")) or _one_more_a_step(sources)
    return wrong_traffic or bonus is not None


def per_request_doubted(data: CellData, sources: Sources) -> bool:
    """Whether the requests' own figures count otherwise than they should."""
    return bonus_counted(data, sources.get("per_request")) is not None


def counter_cautions(data: CellData, sources: Sources) -> list[Caution]:
    """Everything odd about the counters. Of a baseline, whose counters count no drafts, only what
    tells of the server itself: a restart, and others' traffic."""
    speculative = data.cell.variant == "speculative"
    found = [_unreadable(data, speculative), *_traffic(data, speculative)]
    if speculative:
        bonus = [_bonus(data, sources), _bonus_of_requests(data, sources)]
        found += [_unsettled(data), *bonus]
        found += [] if any(bonus) else [_positions(sources)]
    return [c for c in found if c is not None]


UNREADABLE = {
    "unread": "counters_unread",
    "reset": "counters_reset",
    "rank_missing": "counters_rank_missing",
}
NEXT_SOURCE = "Acceptance comes from the next best source, which is named beside it."


def _unreadable(data: CellData, speculative: bool) -> Caution | None:
    counters = data.counters
    read = counters.before is not None and counters.after is not None
    rested = counters.settled and counters.settled_before
    if counters.note is None or (counters.problem is None and read and not rested):
        return None  # read, though still moving: see `_unsettled`
    if counters.problem == "cut_short" and not speculative:
        return None
    code = UNREADABLE.get(counters.problem or "", "counters")
    if not speculative and code != "counters_reset":
        return None
    advice = {
        "counters_unread": "See whether the server's metrics page answers under load. ",
        "counters_reset": "What was measured is two servers' lives, one of them cold: run again. ",
        "counters_rank_missing": "Find out why that rank's series are gone: it may have died. ",
    }.get(code, "")
    return Caution(
        code=code,
        text=f"the server's counters are of no use here: {counters.note}",
        advice=f"{advice}{NEXT_SOURCE}",
    )


def _traffic(data: CellData, speculative: bool) -> list[Caution | None]:
    found = traffic(data)
    if found.new_ranks and found.more_tokens:
        return [
            Caution(
                code="counters_rank_missing",
                text=(
                    f"{', '.join(found.new_ranks[:8])} was read after the load and not before it, "
                    f"and the server counted {found.server} output tokens, this client "
                    f"{found.client}: what the rank had counted before is in the difference"
                ),
                advice=f"The counters' figures are of more than this load. {NEXT_SOURCE}",
            )
        ]
    return [_others(found), _short(found) if speculative else None]


def _others(found: Traffic) -> Caution | None:
    if not found.more_tokens and not found.more_requests:
        return None
    said = []
    if found.server is not None and found.client is not None and found.whole:
        said.append(f"{found.server} output tokens in the window, this client {found.client}")
    if found.more_requests:
        said.append(f"{found.finished} finished requests, this client sent {found.sent}")
    return Caution(
        code="other_traffic",
        text=f"the server counted {'; and '.join(said)}",
        advice=(
            "Another client used the server: its drafts are in the counters too, and it slowed "
            "this one. Measure on a server of your own."
        ),
    )


def _short(found: Traffic) -> Caution | None:
    if not found.fewer_tokens:
        return None
    return Caution(
        code="counters_short",
        text=(
            f"the server counted {found.server} output tokens in the window, but {found.client} "
            "came here: part of the traffic is not in the counters"
        ),
        advice=(
            "A rank whose metrics are not scraped, or counters that were reset within the window. "
            + NEXT_SOURCE
        ),
    )


def _unsettled(data: CellData) -> Caution | None:
    counters = data.counters
    if counters.problem is not None or counters.before is None or counters.after is None:
        return None
    if counters.settled and counters.settled_before:
        return None
    when = "when the window began" if counters.settled else "when they were read after the load"
    return Caution(
        code="counters_unsettled",
        text=f"the server's counters were still moving {when}",
        advice=(
            "Requests of others, or of before, ran at that time: some of their steps are in the "
            "counters, or some of ours are not."
        ),
    )


def _bonus(data: CellData, sources: Sources) -> Caution | None:
    why = bonus_counted(data, sources.get("counters")) or _one_more_a_step(sources)
    return None if why is None else _bonus_caution("counters", why)


def _bonus_of_requests(data: CellData, sources: Sources) -> Caution | None:
    why = bonus_counted(data, sources.get("per_request"))
    return None if why is None else _bonus_caution("per_request", why)


NAMES = {"counters": "the server's counters", "per_request": "the requests' own figures"}


def _positions(sources: Sources) -> Caution | None:
    """Whether the counts by position are not those of the same accepted tokens."""
    for source, name in NAMES.items():
        counts = sources.get(source)
        if counts is None or not counts.drafts or counts.per_position is None:
            continue
        by_position = sum(counts.per_position)
        reached = (counts.drafts, *counts.per_position)
        rising = any(after > before for before, after in pairwise(reached))
        if rising or abs(by_position - counts.accepted) > TRAFFIC * counts.accepted:
            told = ", ".join(map(str, counts.per_position[:9]))
            return Caution(
                code="positions_disagree",
                text=(
                    f"{name} tell {counts.accepted} accepted tokens, and by position {told}, "
                    f"{by_position} in all" + ("; these should only fall" if rising else "")
                ),
                advice="Believe the acceptance length; the rates by position are not of its steps.",
            )
    return None


def _bonus_caution(source: str, why: str) -> Caution:
    return Caution(
        code=f"{source}_count_bonus",
        text=f"{NAMES[source]} count the bonus token as an accepted draft token: {why}",
        advice=f"Their acceptance length is one too large. {NEXT_SOURCE}",
    )
