"""The steady window on simulated servers: who belongs, what is counted, when there is none."""

from __future__ import annotations

import random

import msgspec
import pytest
from harness_records import MS, cell, failed, request, run_of
from harness_simulated import STEP, answer, closed_loop, open_loop
from hypothesis import given
from hypothesis import strategies as st

from harness.analyse.summary import summarise
from harness.findings import Metrics
from harness.measure.metrics import cell_metrics
from harness.measure.steady import steady_window
from harness.measure.table import RequestTable
from harness.records import LoadPoint, RequestRecord


def closed(concurrency: int) -> LoadPoint:
    return LoadPoint(mode="closed", concurrency=concurrency, num_requests=1)


def figures_of(records: list[RequestRecord], load: LoadPoint | None) -> Metrics:
    return cell_metrics(records, steady_window(records, load))


OPEN = LoadPoint(mode="open", request_rate=1.0, num_requests=1)


def lengths(n: int, seed: int = 0) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randint(5, 200) for _ in range(n)]


@given(concurrency=st.integers(2, 12), waves=st.integers(4, 8), seed=st.integers(0, 10**6))
def test_members_are_the_same_however_long_the_answers_are(
    concurrency: int, waves: int, seed: int
) -> None:
    n = concurrency * waves + seed % concurrency
    window = steady_window(closed_loop(concurrency, lengths(n, seed)), closed(concurrency))
    assert window is not None
    if window.level == "steady":
        assert set(window.members.tolist()) == set(range(concurrency, n - concurrency))
    elif window.level == "started":
        assert set(window.members.tolist()) == set(range(concurrency, n))
    else:
        assert window.requests == n


def test_the_window_opens_with_the_first_end_and_closes_with_the_last_request() -> None:
    records = closed_loop(4, lengths(40))
    window = steady_window(records, closed(4))
    assert window is not None
    assert window.level == "steady"
    assert window.begin_ns == min(r.end_ns for r in records if r.end_ns is not None)
    assert window.end_ns == max(r.sent_ns for r in records if r.sent_ns is not None)
    assert "first answer at full concurrency has ended" in window.rule
    assert "as many as the concurrency" in window.rule


def test_the_opening_wave_of_prefills_is_in_no_latency() -> None:
    records = closed_loop(4, lengths(40), wait_ns=lambda i: 900 * MS if i < 4 else STEP)
    whole, steady = cell_metrics(records), figures_of(records, closed(4))
    assert whole.ttft_s.p99 == pytest.approx(0.9)
    assert steady.ttft_s.p99 == pytest.approx(0.01)
    assert (steady.ttft_s.n, steady.requests_ok) == (32, 40)
    assert steady.output_tokens == whole.output_tokens


@given(concurrency=st.integers(2, 10), seed=st.integers(0, 10**6))
def test_throughput_is_that_of_the_full_load(concurrency: int, seed: int) -> None:
    records = closed_loop(concurrency, lengths(concurrency * 10, seed))
    figures = figures_of(records, closed(concurrency))
    assert figures.output_tokens_per_s is not None
    assert figures.steady is not None
    edges = concurrency / (figures.steady.end_s - figures.steady.begin_s)
    assert figures.output_tokens_per_s == pytest.approx(concurrency / 0.01, abs=2 * edges)


def test_the_drain_takes_nothing_from_the_throughput() -> None:
    records = closed_loop(8, lengths(80))
    whole, steady = (figures_of(records, load).output_tokens_per_s for load in (None, closed(8)))
    assert whole is not None
    assert steady is not None
    assert whole < 0.97 * 800 < steady


def test_without_chunk_counts_the_throughput_is_of_the_whole_phase() -> None:
    records = closed_loop(4, lengths(40))
    blind = [request_without_counts(r) for r in records]
    figures = figures_of(blind, closed(4))
    assert figures.output_tokens_per_s == cell_metrics(blind).output_tokens_per_s
    assert figures.steady is not None
    assert figures.steady.level == "steady"


def request_without_counts(r: RequestRecord) -> RequestRecord:
    return request(**{**{f: getattr(r, f) for f in r.__struct_fields__}, "chunk_tokens": None})


def test_gaps_belong_where_their_later_chunk_arrived() -> None:
    records = closed_loop(4, lengths(40))
    window = steady_window(records, closed(4))
    assert window is not None
    inside = int(window.holds(RequestTable.of(records).lists("chunk_ns").later().flat()).sum())
    figures = figures_of(records, closed(4))
    assert 0 < inside < sum(len(r.chunk_ns) - 1 for r in records)
    assert figures.icl_s.n == inside


@pytest.mark.parametrize(
    ("concurrency", "n", "level", "requests"),
    [
        (1, 40, "whole", 40),
        (4, 4, "whole", 4),
        (4, 11, "whole", 11),
        (4, 12, "started", 8),
        (4, 15, "started", 11),
        (4, 16, "steady", 8),
        (50, 100, "started", 50),
        (50, 120, "started", 70),  # 20 would be fewer than a fifth
        (50, 52, "whole", 52),
    ],
)
def test_too_small_a_window_is_widened(concurrency: int, n: int, level: str, requests: int) -> None:
    window = steady_window(closed_loop(concurrency, lengths(n)), closed(concurrency))
    assert window is not None
    assert (window.level, window.requests) == (level, requests)
    assert ("the whole phase" in window.rule) == (level == "whole")


def test_nothing_sent_has_no_window() -> None:
    assert steady_window([], closed(4)) is None
    assert steady_window([failed(sent_ns=None)], closed(4)) is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("load", "growing"), [(0.1, False), (0.8, False), (2.0, True)])
def test_an_overload_has_no_steady_state(seed: int, load: float, growing: bool) -> None:
    capacity = 4 / (10 * STEP / 1e9)
    window = steady_window(open_loop(load * capacity, 200, seed=seed), OPEN)
    assert window is not None
    assert window.growing is growing


def test_an_open_loop_leaves_out_as_many_at_its_end_as_at_its_beginning() -> None:
    records = open_loop(30.0, 200, seed=1)
    window = steady_window(records, OPEN)
    assert window is not None
    first = int(min(window.members))
    assert records[first].due_ns is not None
    assert records[first].due_ns >= (records[0].end_ns or 0) > (records[first - 1].due_ns or 0)
    assert set(window.members.tolist()) == set(range(first, 200 - first))


def test_requests_due_all_at_once_are_the_whole_phase() -> None:
    window = steady_window([request(index=i, due_ns=0) for i in range(40)], OPEN)
    assert window is not None
    assert (window.level, window.requests, window.growing) == ("whole", 40, False)


def test_an_overload_is_a_caution() -> None:
    data = cell("baseline", 0, open_loop(80.0, 200, seed=3), load=OPEN)
    codes = [c.code for c in summarise(run_of([data])).cells[0].cautions]
    assert "not_steady" in codes


def test_partners_of_a_pair_take_the_wider_of_their_windows() -> None:
    long = cell("baseline", 0, closed_loop(4, lengths(40)), load=closed(4))
    short = cell("speculative", 0, closed_loop(4, lengths(12)), load=closed(4))
    other = cell("baseline", 1, closed_loop(4, lengths(40)), load=closed(4))
    levels = [
        c.metrics.steady.level
        for c in summarise(run_of([long, short, other])).cells
        if c.metrics and c.metrics.steady
    ]
    assert levels == ["started", "started", "steady"]


def test_the_window_closes_when_no_conversation_begins_any_more() -> None:
    """Senders that run out of conversations leave the others' later turns at a smaller load."""
    free = [0] * 4
    records: list[RequestRecord] = []
    drawn = random.Random(3)
    for number in range(30):
        sender = free.index(min(free))
        for turn in range(drawn.randint(1, 8)):
            record = answer(len(records), free[sender], drawn.randint(5, 40))
            records.append(msgspec.structs.replace(record, conversation=str(number), turn=turn))
            free[sender] = record.end_ns or 0
    window = steady_window(records, closed(4))
    assert window is not None
    last_begun = max(r.sent_ns for r in records if r.turn == 0 and r.sent_ns is not None)
    assert window.end_ns == last_begun
    under_way = [
        sum((q.sent_ns or 0) <= (r.sent_ns or 0) < (q.end_ns or 0) for q in records)
        for r in records
        if window.has([r]).all()
    ]
    assert set(under_way) == {4}


def test_a_rising_rate_is_no_overload() -> None:
    due = [int(1e9 * (i * 2 / 10) ** 0.5) for i in range(2000)]  # from 0 to some 200 a second
    records = [answer(i, at, 200, due_ns=at) for i, at in enumerate(due)]
    ramp = LoadPoint(mode="open", arrival="schedule", schedule=((20.0, 0.0, 200.0),))
    window = steady_window(records, ramp)
    assert window is not None
    assert not window.growing
    even = steady_window(records, OPEN)  # at one rate the same would be an overload
    assert even is not None
    assert even.growing
