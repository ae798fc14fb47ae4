"""Service levels, goodput, dropped and late requests, and figures by category."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from harness_records import MS, cell, failed, request, run_of

from harness.analyse.summary import summarise
from harness.measure.metrics import by_category, cell_metrics
from harness.measure.slo import Slo, meets, slo_of, strain
from harness.measure.steady import steady_window
from harness.plan.schema import Plan, SloSection, as_dict
from harness.records import DraftCounts, LoadPoint

OPEN = LoadPoint(mode="open", request_rate=1.0, num_requests=1)
DROPPED: dict[str, Any] = {
    "status": "cancelled", "sent_ns": None, "due_ns": 5, "end_ns": None,
    "error": "dropped: 4 requests under way (load.max_concurrency)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), True),
        (Slo(ttft_s=0.1), True),
        (Slo(ttft_s=0.0999), False),
        (Slo(tpot_s=0.022, e2el_s=0.21), True),
        (Slo(tpot_s=0.0219), False),
        (Slo(ttft_s=1.0, e2el_s=0.2), False),
    ],
)
def test_a_request_meets_the_levels_that_are_set(slo: Slo, met: bool) -> None:
    assert meets([request()], slo).tolist() == [met]


def test_the_strain_is_that_of_the_worst_figure() -> None:
    assert strain([request()], Slo(ttft_s=0.2, e2el_s=0.3)) == pytest.approx([0.7])
    assert strain([request()], Slo()) == [0.0]
    assert strain([failed()], Slo(ttft_s=0.2)) == pytest.approx([math.nan], nan_ok=True)


def test_a_request_that_waited_to_be_sent_has_waited() -> None:
    assert meets([request(due_ns=0)], Slo(ttft_s=0.1))
    assert not meets([request(due_ns=-1 * MS)], Slo(ttft_s=0.1))
    assert not meets([request(due_ns=-1 * MS)], Slo(e2el_s=0.21))


def test_an_undefined_time_per_token_breaks_no_level() -> None:
    one = request(chunk_ns=(50 * MS,), chunk_tokens=(6,))
    assert meets([one], Slo(tpot_s=1e-6))
    assert not meets([one], Slo(tpot_s=1e-6, ttft_s=0.04))


def test_a_time_per_token_that_is_not_known_meets_no_level() -> None:
    for counts in ({"output_tokens": None, "chunk_tokens": None}, {"chunk_tokens": None}):
        assert not meets([request(**counts)], Slo(tpot_s=100.0))
        assert meets([request(**counts)], Slo(ttft_s=0.2))


def test_a_request_without_an_answer_meets_nothing() -> None:
    for r in (failed(), request(**DROPPED), request(chunk_ns=(), chunk_tokens=())):
        assert not meets([r], Slo())


def test_goodput_counts_what_met_all_levels() -> None:
    slow = request(index=1, chunk_ns=(300 * MS, 400 * MS), chunk_tokens=(1, 5), due_ns=0)
    records = [request(due_ns=0), slow, failed(index=2, due_ns=0), request(index=3, **DROPPED)]
    figures = cell_metrics(
        records, steady_window(records, OPEN), meets=partial(meets, slo=Slo(ttft_s=0.2))
    )
    assert figures.goodput_per_s == pytest.approx(1 / 0.4)
    assert figures.goodput_share == pytest.approx(1 / 4)
    assert (figures.requests_ok, figures.requests_failed, figures.requests_dropped) == (2, 1, 1)
    none = cell_metrics(records, steady_window(records, OPEN))
    assert (none.goodput_per_s, none.goodput_share) == (None, None)


def test_late_requests_are_counted_in_an_open_loop_alone() -> None:
    on_time, late = request(due_ns=-10 * MS), request(index=1, due_ns=-11 * MS)
    assert cell_metrics([on_time, late]).requests_late == 1
    assert cell_metrics([on_time]).requests_late == 0
    assert cell_metrics([request()]).requests_late is None


def test_first_reasoning_first_answer_and_connection_are_told_apart() -> None:
    r = request(first_reasoning_ns=100 * MS, first_answer_ns=150 * MS, connect_ns=7 * MS)
    figures = cell_metrics([r, request(index=1)])
    assert figures.time_to_first_reasoning_s is not None
    assert figures.time_to_first_answer_s is not None
    assert figures.connect_s is not None
    assert figures.time_to_first_reasoning_s.mean == pytest.approx(0.1)
    assert figures.time_to_first_answer_s.mean == pytest.approx(0.15)
    assert (figures.connect_s.mean, figures.connect_s.n) == (pytest.approx(0.007), 1)
    assert cell_metrics([request()]).connect_s is None


def test_the_plans_levels_reach_the_summary() -> None:
    plan = Plan(slo=SloSection(ttft_s=0.2))
    assert slo_of(as_dict(plan)) == Slo(ttft_s=0.2)
    assert not slo_of({}).said
    records = [request(index=i, sent_ns=0) for i in range(3)]
    (found,) = summarise(run_of([cell("baseline", 0, records)], plan=plan)).cells
    assert found.metrics is not None
    assert found.metrics.goodput_share == 1.0


def test_dropped_requests_are_a_caution_and_no_failure() -> None:
    records = [request(due_ns=0), *(request(index=i, **DROPPED) for i in (1, 2, 3))]
    summary = summarise(run_of([cell("baseline", 0, records, load=OPEN)]))
    codes = [c.code for c in summary.cells[0].cautions]
    assert "requests_dropped" in codes
    assert "failed_requests" not in codes
    assert (summary.void, summary.cells[0].status) == (None, "ok")


def test_levels_in_words() -> None:
    assert Slo(ttft_s=0.2, tpot_s=0.0125).words() == "ttft <= 200 ms, tpot <= 12.5 ms"


def test_categories_pool_their_counts() -> None:
    def counted(drafts: int, accepted: int, **more: Any) -> Any:
        return request(acceptance=DraftCounts(drafts=drafts, accepted=accepted), **more)

    records = [
        counted(10, 10, category="math", correct=True),
        counted(30, 0, index=1, category="math", correct=False),
        counted(5, 10, index=2, category="code"),
        failed(index=3, category="code"),
    ]
    found = by_category(records)
    assert list(found) == ["code", "math"]
    assert found["math"].acceptance_length == pytest.approx(1 + 10 / 40)
    assert (found["math"].task_accuracy, found["math"].task_n) == (0.5, 2)
    assert (found["code"].requests, found["code"].ok, found["code"].output_tokens) == (2, 1, 6)
    assert found["code"].task_accuracy is None
    assert by_category([request()]) == {}
