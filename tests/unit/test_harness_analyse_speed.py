"""Speed-up taken apart: an identity on records made from a known step cost and acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

import msgspec
import numpy as np
import pytest
from harness_records import C1, cell, counters, run_of
from hypothesis import given
from hypothesis import strategies as st
from speed_records import Steps, answers, drafts_of, pair

from harness.analyse.data import CellData
from harness.analyse.predict import (
    MeasuredK,
    Unit,
    cost_at,
    estimate,
    length_at,
    line,
    predict,
    predictions,
)
from harness.analyse.speed import running_batch, speed_of, step_basis
from harness.analyse.summary import summarise
from harness.findings import Interval, Speed
from harness.measure.metrics import cell_metrics
from harness.measure.table import RequestTable
from harness.plan.schema import Plan, SpeculativeSection
from harness.records import DraftCounts, LoadPoint
from harness.report.verdict import verdict_sentences


def taken_apart(cells: list[CellData], k: int | None = 3) -> Speed:
    metrics = {c.cell.cell_id: cell_metrics(c.records, c.window()) for c in cells}
    found = speed_of(cells, metrics, confidence=0.95, k=k)
    assert found is not None
    return found


STEPS = st.lists(st.integers(1, 4), min_size=2, max_size=12)


@given(
    STEPS, st.integers(100, 50_000), st.integers(100, 50_000), st.tuples(*[st.integers(1, 90)] * 2)
)
def test_the_identity_holds_on_known_costs(
    steps: list[int], token_us: int, step_us: int, first: tuple[int, int]
) -> None:
    speed = taken_apart(pair(steps, token_us, step_us, first=first))
    tokens_per_step = sum(steps) / len(steps)
    assert speed.step_basis == "chunks"
    assert speed.chunks_per_step == 1
    assert speed.tokens_per_step.value == pytest.approx(tokens_per_step, rel=1e-12)
    assert speed.acceptance_length == pytest.approx(tokens_per_step, rel=1e-12)
    assert speed.relative_step_cost.value == pytest.approx(step_us / token_us, rel=1e-9)
    assert speed.decode.value == pytest.approx(tokens_per_step * token_us / step_us, rel=1e-9)
    assert speed.throughput is not None
    assert speed.residual is not None
    whole = speed.decode.value * speed.first_token.value * speed.batch.value
    assert speed.throughput.value == pytest.approx(whole * speed.residual.value, rel=1e-9)
    # One request at a time, back to back: nothing is left over, and the batch is one on each side.
    assert speed.batch.value == pytest.approx(1, rel=1e-9)
    assert speed.residual.value == pytest.approx(1, rel=1e-9)
    assert speed.running_batch == pytest.approx((1, 1))
    assert speed.equal_batch


def test_equal_first_tokens_of_a_long_prefill_swallow_the_gain() -> None:
    speed = taken_apart(pair([2, 2, 2], 1000, 1000, first=(6, 6)))
    assert speed.decode.value == pytest.approx(2)
    assert speed.first_token_share == pytest.approx((0.5, 6 / 9))
    # 12 ms against 9 ms a request.
    assert speed.first_token.value == pytest.approx(12 / 9 / 2)


def test_where_chunks_are_no_steps_the_step_is_told_by_the_acceptance_length() -> None:
    """Two steps of 2 tokens merged into one chunk of 4."""
    cells = pair([4, 4, 4], 1000, 2400)
    merged = [
        msgspec.structs.replace(r, acceptance=drafts_of([2] * 6, 3)) for r in cells[1].records
    ]
    cells[1] = msgspec.structs.replace(cells[1], records=RequestTable.of(merged))
    assert step_basis(cells[1:]) == ("acceptance", 0.5)
    speed = taken_apart(cells)
    assert speed.step_s == pytest.approx(0.0012)
    assert speed.tokens_per_step.value == pytest.approx(2)
    assert speed.decode.value == pytest.approx(4000 / 2400)


def test_the_running_batch_is_what_a_step_sees() -> None:
    assert running_batch(np.array([0, 20]), np.array([10, 30])) == 1
    assert running_batch(np.array([0, 0, 0]), np.array([10, 10, 10])) == 3
    # One alone for 10, two together for 10: of three request-times two see the other.
    assert running_batch(np.array([0, 10]), np.array([20, 20])) == pytest.approx(5 / 3)


def test_other_running_batches_are_told() -> None:
    load = LoadPoint(mode="open", request_rate=1.0, num_requests=4)
    base = answers([1] * 8, 1000, k=0)
    alone = answers([2] * 4, 1000)
    both = [msgspec.structs.replace(r, sent_ns=0, chunk_ns=base[0].chunk_ns) for r in base]
    cells = [
        c
        for repeat in range(2)
        for c in (
            cell("baseline", repeat, both, load=load),
            cell("speculative", repeat, alone, load=load),
        )
    ]
    summary = summarise(run_of(cells))
    (speed,) = summary.speed
    assert speed.running_batch == pytest.approx((4, 1))
    assert not speed.equal_batch
    (caution,) = [c for c in summary.cautions if c.code == "batches_differ"]
    assert "4.0 requests without the drafter and 1.0 with it" in caution.text


def test_counters_tell_the_steps_where_requests_do_not() -> None:
    records = answers([2, 2], 1000, k=0)
    delta = DraftCounts(drafts=8, accepted=8)
    told = cell("speculative", 0, records, counted=counters(delta))
    assert step_basis([told]) == ("chunks", 1.0)
    silent = cell("speculative", 0, records)
    assert step_basis([silent]) == ("chunks", None)


def test_intervals_are_over_blocks_and_need_two() -> None:
    cells = [c for r, cost in enumerate((1000, 1100, 1200)) for c in pair([2, 3], 1000, cost, r)]
    speed = taken_apart(cells)
    assert speed.pairs == 3
    cost = speed.relative_step_cost
    assert cost.value == pytest.approx((1.0 * 1.1 * 1.2) ** (1 / 3))
    assert cost.ci_low is not None
    assert cost.ci_high is not None
    assert cost.ci_low < 1.0 < 1.2 < cost.ci_high
    # Tokens a step are alike in every block.
    assert speed.tokens_per_step.ci_low == pytest.approx(2.5)
    alone = taken_apart(pair([2, 3], 1000, 1000))
    assert alone.relative_step_cost == Interval(value=pytest.approx(1.0))


def test_of_two_starts_the_blocks_are_not_the_units() -> None:
    costs = [(0, 1.0), (0, 1.01), (0, 0.99), (1, 1.2), (1, 1.21), (1, 1.19)]
    found = estimate(costs, confidence=0.95)
    assert found == estimate([(0, found_of(costs, 0)), (1, found_of(costs, 1))], confidence=0.95)
    assert found.ci_low is not None and found.ci_low < 0.5  # one degree of freedom
    alone = estimate(costs[:3], confidence=0.95)
    assert alone.ci_low is not None and alone.ci_low > 0.9


def found_of(values: list[tuple[int, float]], repeat: int) -> float:
    return geometric_mean(v for r, v in values if r == repeat)


def test_a_loss_is_sure_with_several_starts_alone() -> None:
    def advice(starts: int, blocks: int) -> str:
        cells = [
            c
            for r in range(starts)
            for b in range(blocks)
            for c in pair([1, 1, 1], 1000, 3500 + 10 * b + 10 * r, r, block=b)
        ]
        (told,) = [c for c in summarise(run_of(cells)).cautions if c.code == "below_break_even"]
        return told.advice

    assert advice(1, 5).startswith("Measure more")
    assert advice(3, 1).startswith("Lower")


def test_nothing_to_time_is_none() -> None:
    assert speed_of([], {}, confidence=0.95, k=3) is None
    one_chunk = [cell(v, 0, answers([], 1000)) for v in ("baseline", "speculative")]
    metrics = {c.cell.cell_id: cell_metrics(c.records, c.window()) for c in one_chunk}
    assert speed_of(one_chunk, metrics, confidence=0.95, k=3) is None


# -- prediction --------------------------------------------------------------------------------


def rates_of(steps: Steps, k: int) -> tuple[float, ...]:
    return tuple(sum(s > i + 1 for s in steps) / len(steps) for i in range(k))


@given(STEPS, st.integers(1, 3))
def test_the_length_at_a_smaller_k_is_exact(steps: list[int], k: int) -> None:
    """Cut every step of k = 3 at `k` drafts: that is what a chain of `k` would have yielded."""
    cut = [min(s, k + 1) for s in steps]
    found = length_at(rates_of(steps, 3), k)
    assert found.low == found.value == found.high
    assert found.value == pytest.approx(sum(cut) / len(cut), rel=1e-12)


def test_beyond_k_the_last_conditional_rate_goes_on_between_bounds() -> None:
    found = length_at((0.8, 0.4), 4)
    assert found.low == pytest.approx(2.2)
    assert found.value == pytest.approx(2.2 + 0.4 * 0.5 + 0.4 * 0.25)
    assert found.high == pytest.approx(2.2 + 0.8)
    assert length_at((0.0, 0.0), 3).value == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(1, 12))
def test_the_expected_length_lies_between_its_bounds(chances: list[float], k: int) -> None:
    rates = tuple(_products(chances))
    found = length_at(rates, k)
    assert found.value is not None
    assert 1 <= found.low <= found.value + 1e-12
    assert found.value <= found.high + 1e-12 <= k + 1 + 1e-9


def _products(chances: Sequence[float]) -> list[float]:
    found, so_far = [], 1.0
    for chance in chances:
        so_far *= chance
        found.append(so_far)
    return found


def test_costs_follow_a_line_through_several_k_and_have_bounds_from_one() -> None:
    several = {1: 1.2, 3: 1.6, 5: 2.0}
    assert line(several) == pytest.approx((1.0, 0.2))
    assert cost_at(several, 4).value == pytest.approx(1.8)
    assert cost_at(several, 3).value == 1.6
    one = cost_at({4: 1.8}, 2)
    assert (one.low, one.value, one.high) == (pytest.approx(1.4), None, pytest.approx(1.8))
    beyond = cost_at({4: 1.8}, 6)
    assert (beyond.low, beyond.high) == (pytest.approx(1.8), pytest.approx(2.2))


def measured(k: int, costs: Sequence[float], rates: tuple[float, ...]) -> MeasuredK:
    return MeasuredK(
        k=k,
        units=tuple(Unit(key=(r, 0), rates=rates, cost=c) for r, c in enumerate(costs)),
    )


def test_a_prediction_between_measured_k_is_what_a_known_engine_gives() -> None:
    """An engine whose step costs 1 + k / 10 and whose drafter holds 0.8, 0.6, 0.5, 0.4, 0.3."""
    rates = (0.8, 0.6, 0.5, 0.4, 0.3)
    points = [measured(k, [1 + k / 10] * 3, rates[:k]) for k in (1, 5)]
    found = predict(points, 3, confidence=0.95)
    assert found is not None
    assert found.acceptance_length == pytest.approx(2.9)
    assert found.relative_step_cost == pytest.approx(1.3)
    assert found.speedup == found.low == found.high == pytest.approx(2.9 / 1.3)
    assert "line through k = 1, 5" in found.basis
    at_five = predict(points, 5, confidence=0.95)
    assert at_five is not None
    assert (at_five.basis, at_five.speedup) == ("measured", pytest.approx(3.6 / 1.5))


def test_one_measured_k_gives_bounds_that_hold_the_truth() -> None:
    rates = (0.8, 0.6, 0.5, 0.4, 0.3)
    told = predictions([measured(3, [1.3] * 3, rates[:3])], confidence=0.95)
    assert [p.k for p in told] == [1, 2, 3, 4, 5]
    for p in told:
        truth = (1 + sum(rates[: p.k])) / (1 + p.k / 10)
        assert p.low is not None
        assert p.high is not None
        assert p.low - 1e-9 <= truth <= p.high + 1e-9
        assert (p.speedup is None) == (p.k != 3)


def test_nothing_is_predicted_from_nothing_or_from_other_blocks() -> None:
    assert predictions([], confidence=0.95) == ()
    apart = [MeasuredK(k=k, units=(Unit(key=(k, 0), rates=(0.5,) * k, cost=1.0),)) for k in (1, 2)]
    assert predict(apart, 1, confidence=0.95) is None


# -- in the summary ----------------------------------------------------------------------------


def test_the_summary_holds_the_speed_of_every_load() -> None:
    cells = [c for r in range(3) for c in pair([2, 3, 4], 1000, 1500, r)]
    summary = summarise(run_of(cells))
    (speed,) = summary.speed
    assert (speed.engine, speed.load, speed.k) == ("reference", C1, 3)
    assert speed.decode.value == pytest.approx(2.0)
    assert speed.predictions[2].speedup == pytest.approx(2.0)
    decoded = msgspec.json.decode(msgspec.json.encode(summary.speed), type=tuple[Speed, ...])
    assert decoded == summary.speed


def test_the_k_of_a_running_server_is_what_its_positions_tell() -> None:
    cells = [c for r in range(2) for c in pair([2, 3, 4], 1000, 1500, r)]
    run = run_of(cells, plan=Plan(speculative=SpeculativeSection(k=1)))
    plan = {**run.manifest.plan, "request": {"urls": {"": "http://127.0.0.1:1"}}}
    attached = msgspec.structs.replace(
        run, manifest=msgspec.structs.replace(run.manifest, plan=plan)
    )
    (speed,) = summarise(attached).speed
    assert speed.k == 3
    assert [p.k for p in speed.predictions] == [1, 2, 3, 4, 5]


def test_forced_acceptance_is_not_compared_and_draws_no_verdict() -> None:
    cells = [c for r in range(3) for c in pair([4, 4, 4], 1000, 1500, r)]
    assert summarise(run_of(cells)).comparisons[0].verdict == "better"
    forced = Plan(speculative=SpeculativeSection(k=3, forced_length=4.0))
    summary = summarise(run_of(cells, plan=forced))
    assert {c.integrity for c in summary.cells} == {None}
    assert {c.verdict for c in summary.comparisons} == {"undecided"}
    (caution,) = [c for c in summary.cautions if c.code == "forced_acceptance"]
    assert "yield 4 tokens" in caution.text
    slow = [c for r in range(3) for c in pair([1, 1, 1], 1000, 3500, r)]
    assert "below_break_even" in {c.code for c in summarise(run_of(slow)).cautions}
    assert "below_break_even" not in {c.code for c in summarise(run_of(slow, plan=forced)).cautions}
    (told,) = verdict_sentences(summary)
    assert told.startswith("reference: no verdict, acceptance was forced and tells nothing")
    assert "draft tokens accepted" not in told
    assert "outputs_diverged" not in {c.code for c in summary.cautions}
