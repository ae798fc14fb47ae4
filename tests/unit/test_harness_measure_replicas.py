"""Counters of replicas: sums, and what they show of one that was restarted or is gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines.base import RankCounters, SpecCounters
from harness.measure.counters import CounterReader, difference
from harness.measure.replicas import SUMMED, ReplicaReader, summed

counts = st.one_of(st.none(), st.integers(0, 10**9))
servers = st.lists(
    st.builds(
        SpecCounters,
        **dict.fromkeys(SUMMED, counts),  # type: ignore[arg-type]
        accepted_per_position=st.one_of(
            st.none(), st.lists(st.integers(0, 99), max_size=4).map(tuple)
        ),
        process_start_s=st.one_of(st.none(), st.floats(0, 1e9)),
    ),
    min_size=1,
    max_size=4,
)


@given(servers)
def test_a_sum_is_told_only_where_every_replica_tells_it(told: list[SpecCounters]) -> None:
    both = summed(told)
    for name in SUMMED:
        values = [getattr(one, name) for one in told]
        assert getattr(both, name) == (None if None in values else sum(values))
    positions = [one.accepted_per_position for one in told]
    if None in positions or not positions:
        assert both.accepted_per_position is None
    else:
        assert sum(both.accepted_per_position or ()) == sum(sum(p or ()) for p in positions)
    assert len({rank.rank for rank in both.ranks}) == len(both.ranks) == len(told)


ONE = SpecCounters(
    drafts=10, drafted=30, accepted=12, generation_tokens=50, process_start_s=100.0,
    ranks=(RankCounters(rank="engine=0", drafts=10),),
)  # fmt: skip


def grown(one: SpecCounters, by: int, **more: Any) -> SpecCounters:
    assert one.drafts is not None
    assert one.generation_tokens is not None
    return replace(
        one, drafts=one.drafts + by, generation_tokens=one.generation_tokens + by, **more
    )


def test_a_replica_that_was_restarted_voids_the_difference() -> None:
    before = summed([ONE, ONE])
    calm = difference(before, summed([grown(ONE, 5), grown(ONE, 7)]), True)
    assert calm.delta is not None
    assert calm.delta.drafts == 12
    # the sum has grown, and yet one replica began anew
    anew = grown(ONE, 200, process_start_s=500.0)
    found = difference(before, summed([grown(ONE, 5), anew]), True)
    assert found.problem == "reset"
    assert "replica=1" in (found.note or "")
    lower = replace(ONE, drafts=1, process_start_s=None)
    found = difference(before, summed([grown(ONE, 500), lower]), True)
    assert found.problem == "reset"


class Told(CounterReader):
    """A reader that has one thing to say."""

    def __init__(self, counters: SpecCounters | None, failure: str | None = None) -> None:
        self.counters, self.failure, self.closed = counters, failure, False

    def read(self) -> SpecCounters | None:
        return self.counters

    def close(self) -> None:
        self.closed = True


def test_a_replica_that_cannot_be_read_is_named() -> None:
    parts = [Told(ONE), Told(None, "HTTP 503")]
    reader = ReplicaReader(parts)
    assert reader.read() is None
    assert reader.failure == "replica 1: HTTP 503"
    reader.close()
    assert all(part.closed for part in parts)


def test_replicas_of_which_only_some_publish_counters_are_told() -> None:
    reader = ReplicaReader([Told(ONE), Told(None)])
    assert reader.read() is None
    assert "some do not" in (reader.failure or "")
    silent = ReplicaReader([Told(None), Told(None)])
    assert silent.read() is None
    assert silent.failure is None


def test_all_that_can_be_read_is_summed() -> None:
    reader = ReplicaReader([Told(ONE), Told(grown(ONE, 1))])
    told = reader.read()
    assert told is not None
    assert told.drafts == 21
    assert {rank.rank for rank in told.ranks} == {
        "replica=0", "replica=1", "replica=0 engine=0", "replica=1 engine=0",
    }  # fmt: skip
