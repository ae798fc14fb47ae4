"""Counters of several replicas of one server, taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.base import RankCounters, SpecCounters
from harness.measure.counters import CounterReader

SUMMED = (
    *("drafts", "drafted", "accepted", "generation_tokens", "prompt_tokens"),
    *("requests_finished", "running", "waiting", "accepted_past_end"),
)


class ReplicaReader(CounterReader):
    """Reads every replica; what one does not tell is told of none.

    Each replica is a rank of the sum, so that one that is restarted or goes missing is seen.
    """

    def __init__(self, readers: Sequence[CounterReader]) -> None:
        self._readers = readers
        self.failure: str | None = None

    def close(self) -> None:
        """Close every connection kept alive."""
        for reader in self._readers:
            reader.close()

    def read(self) -> SpecCounters | None:
        """The sums now, or None where a replica brought nothing; then `failure` says why."""
        told = [reader.read() for reader in self._readers]
        failed = [
            f"replica {number}: {reader.failure}"
            for number, reader in enumerate(self._readers)
            if reader.failure is not None
        ]
        known = [counters for counters in told if counters is not None]
        self.failure = failed[0] if failed else None
        if len(known) < len(told):
            if known and self.failure is None:
                self.failure = "some replicas publish counters and some do not"
            return None
        return summed(known)


def summed(replicas: Sequence[SpecCounters]) -> SpecCounters:
    """The sum of several servers' counters; a figure that one does not tell is not told."""
    sums: dict[str, int | None] = {}
    for name in SUMMED:
        values = [getattr(counters, name) for counters in replicas]
        sums[name] = None if None in values else sum(values)
    ranks = [
        rank for number, one in enumerate(replicas) for rank in _ranks(f"replica={number}", one)
    ]
    return SpecCounters(
        **sums,
        accepted_per_position=_by_position([c.accepted_per_position for c in replicas]),
        ranks=tuple(ranks),
    )


def _ranks(name: str, one: SpecCounters) -> list[RankCounters]:
    whole = RankCounters(
        rank=name,
        drafts=one.drafts,
        accepted=one.accepted,
        generation_tokens=one.generation_tokens,
        created_s=one.process_start_s,
    )
    return [whole, *(replace(rank, rank=f"{name} {rank.rank}") for rank in one.ranks)]


def _by_position(told: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    known = [positions for positions in told if positions is not None]
    if not known or len(known) < len(told):
        return None
    longest = max(map(len, known))
    return tuple(sum(p[i] for p in known if i < len(p)) for i in range(longest))
