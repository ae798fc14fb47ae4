"""The order of a night: what would tell the most comes first, and says why."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from nightly_points import finding, night, state

from harness.nightly.order import order, scatter_of
from harness.nightly.records import Night
from harness.nightly.suite import Entry

A, B, C = (Entry(name=n) for n in "abc")


def names(entries: list[Entry], nights: list[Night], **scatter: float) -> list[str]:
    known: dict[str, float | None] = dict(scatter)
    return [p.name for p in order(entries, nights, known)]


def measured(number: int, *which: str, **fields: Any) -> Night:
    return night(number, entries=tuple(state(n) for n in which), **fields)


def test_what_was_never_measured_comes_before_what_was() -> None:
    places = order([A, B], [measured(0, "a")], {})
    assert [p.name for p in places] == ["b", "a"]
    assert places[0].why == "never measured"


def test_the_oldest_data_come_first() -> None:
    nights = [measured(0, "a", "b"), measured(1, "b"), measured(2, "b")]
    places = order([B, A], nights, {})
    assert [p.name for p in places] == ["a", "b"]
    assert places[0].why == "2 nights without data"


def test_a_suspect_that_was_not_confirmed_comes_before_quiet_ones() -> None:
    doubt = finding(series="b/x", entry="b", status="unconfirmed")
    nights = [measured(0, "a", "b", findings=(doubt,))]
    places = order([A, B], nights, {})
    assert [p.name for p in places] == ["b", "a"]
    assert places[0].why == "unsettled last night"
    assert names([A, B], [*nights, measured(1, "a", "b")]) == ["a", "b"]


def test_what_was_left_out_is_made_up_for() -> None:
    out = night(1, entries=(state("a"), state("b", status="left_out", attempt=None)))
    places = order([A, B], [measured(0, "a", "b"), out], {})
    assert places[0].name == "b" and "1 night without data" in places[0].why


def test_noisy_entries_come_before_steady_ones_and_priority_before_all() -> None:
    nights = [measured(0, "a", "b", "c")]
    assert names([A, B, C], nights, b=0.03, c=0.01) == ["b", "c", "a"]
    first = Entry(name="c", priority=1)
    assert names([A, B, first], nights, b=0.03) == ["c", "b", "a"]


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.integers(-3, 3))
def test_every_entry_has_one_place(which: list[str], priority: int) -> None:
    entries = [Entry(name=n, priority=priority if n == "a" else 0) for n in which]
    assert sorted(names(entries, [measured(0, "a", "c")])) == sorted(which)


def test_scatter_is_of_neighbours_not_of_levels() -> None:
    assert scatter_of([1.0, 2.0, None]) is None
    step = [100.0, 101.0, 100.0, 101.0, 200.0, 202.0, 200.0, 202.0]
    found = scatter_of(step)
    assert found is not None and found < 0.02
    assert scatter_of([5.0] * 6) == 0
