"""The search for a capacity, against simulated servers whose true capacity is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analyse.bracket import (
    Look,
    Search,
    bracket,
    next_value,
    points,
    requests_needed,
    rounded,
)
from harness.analyse.statistics import autocorrelation_time, wilson

Server = Callable[[float], float]
"""The share of requests that meet the levels, by load."""


def searched(search: Search, server: Server, seed: int | None = None) -> list[Look]:
    """All looks of a search; without a seed there is no chance in what is seen."""
    random_ = random.Random(seed)
    looks: list[Look] = []
    while (value := next_value(looks, search)) is not None:
        assert len(looks) < 200
        share, n = server(value), search.requests
        met = round(share * n) if seed is None else sum(random_.random() < share for _ in range(n))
        looks.append(Look(value=value, met=met, of=n))
    return looks


def curve(capacity: float, steepness: float, attain: float) -> Server:
    """A share that falls with the load and is `attain` at the capacity."""
    odds = (1 - attain) / attain
    return lambda v: 1 / (1 + odds * (v / capacity) ** steepness)


@given(
    capacity=st.floats(0.01, 500),
    start=st.floats(0.05, 100),
    resolution=st.floats(1.02, 2),
    attain=st.floats(0.5, 0.99),
)
def test_a_sharp_edge_is_found_within_the_resolution(
    capacity: float, start: float, resolution: float, attain: float
) -> None:
    plain = Search(attain=attain, resolution=resolution, start=start, lowest=1e-3, highest=1e4)
    n = requests_needed(attain, plain.z)
    search = Search(
        attain=attain, resolution=resolution, start=start, lowest=1e-3, highest=1e4, requests=n
    )
    found = bracket(searched(search, lambda v: float(v <= capacity)), search)
    assert found.highest_met is not None
    assert found.lowest_missed is not None
    assert found.highest_met <= capacity < found.lowest_missed
    assert found.lowest_missed / found.highest_met <= resolution * 1.002
    assert found.undecided == ()


@given(capacity=st.integers(1, 900), start=st.integers(1, 50))
def test_a_concurrency_is_found_exactly_where_it_is_small(capacity: int, start: int) -> None:
    search = Search(by="concurrency", start=float(start), lowest=1.0)
    found = bracket(searched(search, lambda v: float(v <= capacity)), search)
    assert found.highest_met is not None
    assert found.lowest_missed is not None
    assert found.highest_met <= capacity < found.lowest_missed
    assert (
        found.lowest_missed - found.highest_met == 1
        or found.lowest_missed / found.highest_met <= search.resolution
    )


@pytest.mark.parametrize("steepness", [1.5, 4.0, 12.0])
@pytest.mark.parametrize("attain", [0.9, 0.99])
def test_the_true_capacity_is_bracketed_with_the_stated_confidence(
    steepness: float, attain: float
) -> None:
    search = Search(attain=attain)
    search = Search(attain=attain, requests=requests_needed(attain, search.z))
    right = total = 0
    for seed in range(150):
        capacity = 0.3 * 1.05**seed
        looks = searched(search, curve(capacity, steepness, attain), seed)
        found = bracket(looks, search)
        assert found.highest_met is not None
        low, high = found.highest_met, found.lowest_missed
        right += low <= capacity and (high is None or capacity <= high)
        total += 1
    assert right / total >= search.confidence


def test_an_undecided_load_is_looked_at_again_and_no_more_often_than_allowed() -> None:
    search = Search()
    looks = searched(search, curve(3.0, 4.0, 0.9), 1)
    for point in points(looks, search):
        assert point.looks <= search.looks
        assert point.judged != "undecided" or point.looks == search.looks


def test_an_overload_is_missed_whatever_its_few_requests_met() -> None:
    search = Search()
    (point,) = points([Look(value=1.0, met=57, of=57, overloaded=True)], search)
    assert point.judged == "missed"
    assert next_value([Look(value=1.0, met=57, of=57, overloaded=True)], search) == 0.5


def test_no_lower_load_is_tried_where_an_idle_server_misses_too() -> None:
    missed = Look(value=1.0, met=0, of=57)
    assert next_value([missed], Search()) == 0.5
    assert next_value([Look(value=1.0, met=0, of=57, hopeless=True)], Search()) is None


def test_the_search_ends_at_its_bounds() -> None:
    search = Search(start=4.0, lowest=1.0, highest=20.0)
    up = searched(search, lambda v: 1.0)
    assert [look.value for look in up] == [4.0, 8.0, 16.0, 20.0]
    assert (bracket(up, search).highest_met, bracket(up, search).lowest_missed) == (20.0, None)
    down = searched(search, lambda v: 0.0)
    assert [look.value for look in down] == [4.0, 2.0, 1.0]
    assert bracket(down, search).highest_met is None


@given(looks=st.integers(0, 30), seed=st.integers(0, 1000))
def test_a_search_goes_on_from_any_of_its_looks(looks: int, seed: int) -> None:
    search = Search()
    whole = searched(search, curve(5.0, 3.0, 0.9), seed)
    kept = whole[:looks]
    expected = whole[looks].value if looks < len(whole) else None
    assert next_value(kept, search) == expected


def test_all_requests_met_are_enough_to_show_it() -> None:
    search = Search()
    n = requests_needed(search.attain, search.z)
    assert wilson(n, n, search.z)[0] >= search.attain > wilson(n - 1, n - 1, search.z)[0]
    assert n == search.requests


@given(n=st.integers(1, 500), data=st.data(), z=st.floats(0.5, 4))
def test_the_interval_holds_the_share(n: int, data: st.DataObject, z: float) -> None:
    hits = data.draw(st.integers(0, n))
    low, high = wilson(hits, n, z)
    assert 0 <= low <= hits / n + 1e-12
    assert hits / n - 1e-12 <= high <= 1
    wider = wilson(hits, n, z + 1)
    assert wider[0] <= low + 1e-12
    assert high <= wider[1] + 1e-12


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_the_autocorrelation_time_of_a_known_process(phi: float) -> None:
    random_ = random.Random(1)
    values = [0.0]
    for _ in range(20_000):
        values.append(phi * values[-1] + random_.gauss(0, 1))
    assert autocorrelation_time(values) == pytest.approx((1 + phi) / (1 - phi), rel=0.2)


@given(st.lists(st.floats(0, 4), max_size=200))
def test_the_autocorrelation_time_lies_between_one_and_all(values: list[float]) -> None:
    assert 1 <= autocorrelation_time(values) <= max(1, len(values))
    assert autocorrelation_time([1.0] * len(values)) == 1


def test_looks_at_one_queue_count_less() -> None:
    search = Search()
    (alone,) = points([Look(value=1.0, met=57, of=57)], search)
    (queued,) = points([Look(value=1.0, met=57, of=57, tau=3.0)], search)
    assert (alone.judged, queued.judged) == ("met", "undecided")
    assert (queued.met, queued.of) == (57, 57)


def test_wilson_of_a_known_case() -> None:
    assert wilson(9, 10, 1.959964) == (
        pytest.approx(0.5958, abs=1e-4),
        pytest.approx(0.9821, abs=1e-4),
    )
    assert wilson(0, 0, 2.0) == (0.0, 1.0)


def test_loads_fit_into_a_cells_name() -> None:
    assert rounded(1.23456789, Search()) == 1.235
    assert rounded(2.5, Search(by="concurrency")) == 2.0
    assert rounded(0.2, Search(by="concurrency")) == 1.0
