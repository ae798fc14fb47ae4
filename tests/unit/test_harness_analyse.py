"""Paired ratios, verdicts, acceptance sources, integrity, cautions, void."""

from __future__ import annotations

import math

import msgspec
import pytest
from harness_records import C1, cell, counters, failed, request, run_of, scaled, timeline
from hypothesis import given
from hypothesis import strategies as st

from harness.analyse.acceptance import acceptance_of, sources_of
from harness.analyse.integrity import compare_outputs
from harness.analyse.reconcile import disagreements
from harness.analyse.statistics import geometric_interval, sign_test, t_quantile, verdict
from harness.analyse.summary import summarise
from harness.findings import Summary
from harness.measure.store import to_json
from harness.plan.schema import (
    CompareSection,
    EngineSection,
    Length,
    LoadSection,
    Plan,
    SamplingSection,
    WorkloadSection,
)
from harness.records import VARIANTS, ClientFigures, DraftCounts, LaunchRecord, LoadPoint, Timeline

COUNTS = DraftCounts(drafts=20, drafted=60, accepted=30, per_position=(15, 10, 5))
POSITIVE = st.floats(1e-3, 1e3)


def codes(summary: Summary) -> set[str]:
    found = {c.code for c in summary.cautions}
    return found | {c.code for s in summary.cells for c in s.cautions}


def paired_run(factors: list[tuple[float, float]], **fields: object) -> Summary:
    cells = []
    for repeat, (base, spec) in enumerate(factors):
        cells.append(cell("baseline", repeat, scaled(base, **fields)))
        cells.append(cell("speculative", repeat, scaled(spec), counted=counters(COUNTS)))
    return summarise(run_of(cells))


def test_t_interval_by_hand() -> None:
    # Ratios 2, 2*e^0.1, 2*e^-0.1: mean log = log 2, deviation 0.1, t(0.975, 2) = 4.302653.
    found = geometric_interval([2, 2 * math.exp(0.1), 2 * math.exp(-0.1)], confidence=0.95)
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert found.value == pytest.approx(2)
    assert found.ci_low == pytest.approx(2 * math.exp(-half), rel=1e-6)
    assert found.ci_high == pytest.approx(2 * math.exp(half), rel=1e-6)
    assert t_quantile(0.975, 2) == pytest.approx(4.302653, abs=1e-6)


def test_fewer_than_two_pairs_have_no_interval() -> None:
    found = geometric_interval([2], confidence=0.95)
    assert (found.value, found.ci_low, found.ci_high) == (pytest.approx(2), None, None)
    with pytest.raises(ValueError, match="no values"):
        geometric_interval([], confidence=0.95)


@given(st.lists(POSITIVE, min_size=2, max_size=10))
def test_swapping_the_variants_inverts_the_interval(ratios: list[float]) -> None:
    one = geometric_interval(ratios, confidence=0.9)
    other = geometric_interval([1 / r for r in ratios], confidence=0.9)
    assert one.ci_low is not None
    assert other.ci_high is not None
    assert one.value == pytest.approx(1 / other.value)
    assert one.ci_low == pytest.approx(1 / other.ci_high)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "better", "expected"),
    [
        (1.2, 1.1, 1.3, "higher", "better"),
        (1.2, 1.1, 1.3, "lower", "worse"),
        (0.8, 0.7, 0.9, "higher", "worse"),
        (0.8, 0.7, 0.9, "lower", "better"),
        (1.2, 0.9, 1.5, "higher", "undecided"),
        (1.01, 0.99, 1.02, "higher", "same"),
        (1.02, 1.01, 1.03, "higher", "same"),
        (1.02, 1.001, 1.05, "higher", "undecided"),
        (1.2, None, None, "higher", "undecided"),
    ],
)
def test_verdicts(
    ratio: float, low: float | None, high: float | None, better: str, expected: str
) -> None:
    assert verdict(ratio, low, high, better=better, min_effect=0.03) == expected  # type: ignore[arg-type]


def test_sign_test() -> None:
    assert sign_test(0, 0) == 1.0
    assert sign_test(0, 6) == pytest.approx(2 / 64)
    assert sign_test(3, 3) == 1.0


def test_a_faster_candidate_is_better_in_speed_and_in_latency() -> None:
    summary = paired_run([(1.0, 0.5), (1.1, 0.56), (0.9, 0.44)])
    by = {c.metric: c for c in summary.comparisons}
    speed, ttft = by["output_tokens_per_s"], by["ttft_s"]
    assert speed.ratio == pytest.approx(2.0, rel=0.02)
    assert (speed.verdict, speed.pairs) == ("better", 3)
    assert ttft.ratio == pytest.approx(0.5, rel=0.02)
    assert ttft.verdict == "better"
    assert speed.baseline is not None
    assert speed.candidate is not None
    assert speed.ratio == pytest.approx(speed.candidate / speed.baseline)
    assert "t interval" in speed.method
    assert summary.void is None


def test_one_start_of_each_is_undecided_whatever_its_blocks_say() -> None:
    cells = []
    for block in range(4):
        cells.append(cell("baseline", 0, scaled(1.0 + block / 1000), block=block))
        cells.append(cell("speculative", 0, scaled(0.5), block=block, counted=counters(COUNTS)))
    summary = summarise(run_of(cells))
    assert {c.verdict for c in summary.comparisons} == {"undecided"}
    assert "few_launches" in codes(summary)


def test_with_three_starts_the_starts_are_the_units() -> None:
    cells = []
    for repeat in range(3):
        for block in range(2):
            cells.append(cell("baseline", repeat, scaled(1.0), block=block))
            cells.append(cell("speculative", repeat, scaled(0.5 + repeat / 100), block=block))
    by = {c.metric: c for c in summarise(run_of(cells)).comparisons}
    assert by["ttft_s"].pairs == 3
    assert "paired starts" in by["ttft_s"].method


def test_the_minimum_effect_comes_from_the_plan() -> None:
    plan = Plan(compare=CompareSection(min_effect=0.6))
    cells = [
        cell(variant, repeat, scaled(factor + repeat / 1000))  # type: ignore[arg-type]
        for repeat in range(3)
        for variant, factor in (("baseline", 1.0), ("speculative", 0.8))
    ]
    by = {c.metric: c for c in summarise(run_of(cells, plan=plan)).comparisons}
    assert by["ttft_s"].verdict == "same"


def test_acceptance_prefers_counters_and_keeps_all_sources() -> None:
    per_request = DraftCounts(drafts=2, drafted=6, accepted=3, per_position=(2, 1, 0))
    records = [request(acceptance=per_request), request(index=1, acceptance=per_request)]
    data = cell("speculative", 0, records, counted=counters(COUNTS))
    found = acceptance_of(sources_of(data))
    assert found is not None
    assert found.source == "counters"
    assert (found.rate, found.length) == (0.5, 2.5)
    assert found.per_position == (0.75, 0.5, 0.25)
    assert found.per_position_conditional == pytest.approx((0.75, 2 / 3, 0.5))
    assert found.sources["per_request"] == DraftCounts(
        drafts=4, drafted=12, accepted=6, per_position=(4, 2, 0)
    )
    assert found.sources["client"] is not None


def test_acceptance_falls_back_and_takes_positions_where_they_are() -> None:
    data = cell("speculative", 0, [request(acceptance=DraftCounts(drafts=2, accepted=3))])
    found = acceptance_of(sources_of(data))
    assert found is not None
    assert (found.source, found.rate, found.length) == ("per_request", None, 2.5)
    assert found.per_position == (1.0, 0.5)  # of the client's two steps of 3 and 2 tokens
    blind = cell("speculative", 0, [request(chunk_tokens=None)])
    assert acceptance_of(sources_of(blind)) is None


def test_sources_that_disagree_are_named() -> None:
    sources = {
        "counters": COUNTS,
        "per_request": DraftCounts(drafts=20, accepted=40),
        "client": None,
    }
    found = acceptance_of(sources)
    assert found is not None
    assert disagreements(found) == ["per_request 3.000"]
    agreeing = acceptance_of({**sources, "per_request": COUNTS})
    assert agreeing is not None
    assert disagreements(agreeing) == []


def test_outputs_are_compared_by_tokens_and_the_first_difference_is_kept() -> None:
    base = cell("baseline", 0, [request(index=i, prompt_id=f"p{i}") for i in range(4)])
    records = [
        request(index=0, prompt_id="p0"),
        request(index=1, prompt_id="p1", token_ids=(1, 2, 9, 4, 5, 6)),
        request(index=2, prompt_id="p2", token_ids=(1, 2, 3)),
        failed(index=3, prompt_id="p3"),
    ]
    found = compare_outputs(base, cell("speculative", 0, records))
    assert (found.compared, found.identical, found.diverged) == (3, 1, 2)
    first, second = found.first_divergence
    assert (first["position"], first["baseline"], first["candidate"]) == (2, 3, 9)
    assert (second["position"], second["baseline"], second["candidate"]) == (3, 4, None)


def test_texts_are_compared_where_there_are_no_ids() -> None:
    base = cell("baseline", 0, [request(token_ids=None, text="abc")])
    other = cell("speculative", 0, [request(token_ids=None, text="abd")])
    (found,) = compare_outputs(base, other).first_divergence
    assert found["unit"] == "character"
    assert (found["baseline"], found["candidate"]) == ("c", "d")


def test_sampled_outputs_are_not_compared() -> None:
    plan = Plan(sampling=SamplingSection(temperature=1.0))
    cells = [cell("baseline", 0, [request()]), cell("speculative", 0, [request()])]
    assert summarise(run_of(cells, plan=plan)).cells[1].integrity is None
    assert summarise(run_of(cells)).cells[1].integrity is not None


def test_cautions_about_outputs_accuracy_and_break_even() -> None:
    plan = Plan(engine=EngineSection(dtype="float32"))
    wrong = scaled(1.5, token_ids=(9,), correct=False)
    cells = []
    for repeat in range(3):
        cells.append(cell("baseline", repeat, scaled(1.0, correct=True)))
        cells.append(cell("speculative", repeat, wrong, counted=counters(COUNTS)))
    summary = summarise(run_of(cells, plan=plan))
    assert {"outputs_diverged", "accuracy_differs", "below_break_even"} <= codes(summary)
    advice = {c.code: c for c in summary.cautions}
    assert "defect" in advice["outputs_diverged"].advice
    # Length 2.5 at 1/1.5 of the speed: break-even at 3.75.
    assert "2.50" in advice["below_break_even"].text
    assert "3.75" in advice["below_break_even"].text


def test_a_loss_that_is_undecided_is_no_caution_of_a_loss() -> None:
    cells = []
    for repeat, factor in enumerate((0.8, 1.5, 1.2)):
        cells.append(cell("baseline", repeat, scaled(1.0)))
        cells.append(cell("speculative", repeat, scaled(factor), counted=counters(COUNTS)))
    told = {c.code: c for c in summarise(run_of(cells)).cautions}["below_break_even"]
    assert "may not pay, which is undecided," in told.text
    assert " (" in told.text.partition("that cost ")[2], "the interval of the cost is told"
    assert "before you believe a loss" in told.advice


def test_every_error_of_failed_requests_is_counted_and_the_advice_fits_the_server() -> None:
    errors = ["a", "a", "b", "c", "d", "d", "d"]
    records = [*scaled(1.0), *(failed(index=20 + i, error=e) for i, e in enumerate(errors))]
    (told,) = summarise(run_of([cell("baseline", 0, records)])).cells[0].cautions
    assert told.text == "7 of 17 requests failed, 3 with: d; 2 with: a; 1 with: b; 1 otherwise"
    assert "the engine's log" in told.advice
    attached = cell("baseline", 0, records, time=timeline(ready_s=None))
    (told,) = summarise(run_of([attached])).cells[0].cautions
    assert "the server's own log" in told.advice
    long = failed(index=11, error="HTTP 400: This model's maximum context length is 9 tokens")
    (told,) = summarise(run_of([cell("baseline", 0, [*scaled(1.0), long])])).cells[0].cautions
    assert "workload.max_input_tokens" in told.advice


@pytest.mark.parametrize(
    ("load", "advice"),
    [
        (C1, "raise load.num_requests"),
        (LoadPoint(mode="closed", concurrency=1, duration_s=3.0), "raise load.duration_s"),
        (LoadPoint(mode="open", arrival="trace", trace="t.jsonl"), "a longer trace"),
    ],
)
def test_the_way_to_more_answers_is_that_of_the_load(load: LoadPoint, advice: str) -> None:
    run = run_of([cell("baseline", 0, scaled(1.0, 3), load=load)])
    told = {c.code: c for c in summarise(run).cautions}["few_samples"]
    assert advice in told.advice


def test_cautions_about_a_cell() -> None:
    records = [*scaled(1.0), failed(index=10, error="HTTP 500: boom")]
    late = [request(due_ns=-200_000_000, index=i, output_tokens=None) for i in range(3)]
    cells = [
        cell("baseline", 0, records, time=timeline(client_cpu_share=0.9)),
        cell("speculative", 0, late, counted=counters(note="no counters")),
    ]
    summary = summarise(run_of(cells))
    base, spec = summary.cells
    assert base.status == "partial"
    assert {c.code for c in base.cautions} == {"failed_requests", "client_cpu_bound"}
    assert "1 of 11 requests failed" in base.cautions[0].text
    assert {c.code for c in spec.cautions} == {"send_lag", "token_counts_missing", "counters"}


def test_other_clients_show_in_the_counters() -> None:
    busy = counters(COUNTS, generation_tokens=120)
    summary = summarise(run_of([cell("speculative", 0, scaled(1.0), counted=busy)]))
    assert "other_traffic" in codes(summary)
    own = counters(COUNTS, generation_tokens=60)
    summary = summarise(run_of([cell("speculative", 0, scaled(1.0), counted=own)]))
    assert "other_traffic" not in codes(summary)


def test_repeated_prompts_and_cut_answers_are_told() -> None:
    again = [request(index=i, prompt_id="same", finish_reason="length") for i in range(3)]
    assert {"prompts_repeat", "answers_cut", "few_samples"} <= codes(
        summarise(run_of([cell("baseline", 0, again)]))
    )


@pytest.mark.parametrize(("urls", "told"), [({}, "started"), ({"": "http://h"}, "measured")])
def test_servers_that_run_already_were_not_started(urls: dict[str, str], told: str) -> None:
    run = run_of([cell(v, 0, scaled(1.0)) for v in ("baseline", "speculative")])  # type: ignore[arg-type]
    run.manifest.plan["request"] = {"urls": urls}
    caution = next(c for c in summarise(run).cautions if c.code == "few_launches")
    assert f"each variant was {told} once" in caution.text
    assert ("compare.blocks" in caution.advice) == bool(urls)


@pytest.mark.parametrize(
    ("wanted", "lengths", "told"),
    [
        (6, [6, 6], "the limit of workload.output_tokens (6)"),
        (256, [6, 6], "at limits of their own (a row's max_tokens, a trace's output length"),
        (
            6,
            [6, 4],
            "the limit of workload.output_tokens (6) or, 1 of them, at limits of their own",
        ),
        (Length(mean=6), [6, 4], "the limit drawn for each from workload.output_tokens"),
    ],
)
def test_a_cut_answer_is_blamed_on_the_limit_that_cut_it(
    wanted: int | Length, lengths: list[int], told: str
) -> None:
    records = [
        request(index=i, prompt_id=f"p{i}", finish_reason="length", output_tokens=n)
        for i, n in enumerate(lengths)
    ]
    for ignore_eos in (False, True):
        plan = Plan(workload=WorkloadSection(output_tokens=wanted, ignore_eos=ignore_eos))
        found = summarise(run_of([cell("baseline", 0, records)], plan=plan)).cautions
        caution = next(c for c in found if c.code == "answers_cut")
        assert told in caution.text
        assert ("ignore_eos" in caution.advice) == ignore_eos


@pytest.mark.parametrize(("limit", "told"), [(2, True), (3, False), (None, False)])
def test_a_trace_that_a_number_of_requests_ended_is_told(limit: int | None, told: bool) -> None:
    load = LoadPoint(mode="open", arrival="trace", trace="t.jsonl", num_requests=limit)
    records = [request(index=i, prompt_id=f"p{i}", due_ns=0) for i in range(2)]
    summary = summarise(run_of([cell("baseline", 0, records, load=load)]))
    assert ("trace_cut" in codes(summary)) == told


def test_the_turns_of_one_conversation_are_no_repeat() -> None:
    turns = [request(index=i, prompt_id="same", conversation="same", turn=i) for i in range(3)]
    assert "prompts_repeat" not in codes(summarise(run_of([cell("baseline", 0, turns)])))
    again = [request(index=i, prompt_id="same", conversation="same", turn=0) for i in range(2)]
    assert "prompts_repeat" in codes(summarise(run_of([cell("baseline", 0, again)])))


@pytest.mark.parametrize("dataset", ["random", "synthetic"])
def test_acceptance_on_made_prompts_is_told_to_mean_nothing(dataset: str) -> None:
    plan = Plan(workload=WorkloadSection(dataset=dataset, input_tokens=8))
    speculative = cell("speculative", 0, scaled(1.0), counted=counters(COUNTS))
    found = {c.code: c for c in summarise(run_of([speculative], plan=plan)).cautions}
    assert "means nothing" in found[f"{dataset}_prompts"].text
    assert f"{dataset}_prompts" not in codes(summarise(run_of([speculative])))
    baseline = cell("baseline", 0, scaled(1.0))
    assert f"{dataset}_prompts" not in codes(summarise(run_of([baseline], plan=plan)))


@pytest.mark.parametrize(
    ("data", "needle"),
    [
        (cell("baseline", 0, [request(), failed(), failed()]), "too few requests"),
        (cell("baseline", 0, []), "too few requests"),
        (cell("baseline", 0, [request()], time=timeline(client_cpu_share=0.99)), "bottleneck"),
        (cell("baseline", 0, [request(output_tokens=0)]), "no token"),
    ],
)
def test_a_void_run_says_why_and_draws_no_verdict(data: object, needle: str) -> None:
    good = [cell(v, r, scaled(f)) for r in (1, 2, 3) for v, f in _VARIANTS]
    summary = summarise(run_of([data, *good]))  # type: ignore[list-item]
    assert needle in (summary.void or "")
    assert {c.verdict for c in summary.comparisons} == {"undecided"}


def test_requests_asked_again_are_told() -> None:
    records = [request(index=i, tries=1 + i % 2) for i in range(4)]
    (base,) = summarise(run_of([cell("baseline", 0, records)])).cells
    (caution,) = [c for c in base.cautions if c.code == "requests_retried"]
    assert "2 of 4 requests" in caution.text


def client(**lags: float) -> Timeline:
    figures = ClientFigures(
        worker=0, cpu_share=0.1, cpu_s=1.0, loop_lag_max_s=1.0,
        **{"loop_lag_p50_s": 0.0, "loop_lag_p99_s": 0.0, **lags},
    )  # fmt: skip
    return timeline(client=(figures,))


def test_a_client_whose_loop_is_always_late_makes_the_run_void_unless_allowed() -> None:
    late = cell("baseline", 0, scaled(1.0), time=client(loop_lag_p50_s=0.02))
    assert "20.0 ms late at the median" in (summarise(run_of([late])).void or "")
    plan = Plan(load=LoadSection(allow_client_bound=True))
    assert summarise(run_of([late], plan=plan)).void is None


def test_a_client_whose_loop_is_late_now_and_then_is_told() -> None:
    data = cell("baseline", 0, scaled(1.0), time=client(loop_lag_p99_s=0.04))
    (caution,) = [
        c for c in summarise(run_of([data])).cells[0].cautions if c.code == "client_loop_lag"
    ]
    assert "40 ms late (p99; the mean TTFT is 100 ms)" in caution.text
    in_time = cell("baseline", 0, scaled(1.0), time=client(loop_lag_p99_s=0.009))
    assert not summarise(run_of([in_time])).cells[0].cautions


_VARIANTS = (("baseline", 1.0), ("speculative", 0.5))


def test_an_interrupted_cell_is_a_failure_and_not_a_void_run() -> None:
    dead = cell("baseline", 0, [failed()], time=timeline(interrupted="reference died"))
    launch = LaunchRecord(
        name="l", engine="reference", variant="baseline", repeat=0, argv=(), phases=(),
        ready_s=None, failure="reference died",
    )  # fmt: skip
    summary = summarise(run_of([dead], launches=[launch]))
    assert summary.failures == ("reference died",)
    assert summary.void is None
    assert summary.cells[0].status == "failed"
    assert summary.comparisons == ()


def test_an_interrupted_block_takes_no_part_in_a_comparison() -> None:
    cells = [cell(v, r, scaled(f)) for r in (0, 1) for v, f in _VARIANTS]  # type: ignore[arg-type]
    cells.append(cell("baseline", 2, scaled(1.0)))
    cells.append(cell("speculative", 2, scaled(9.0), time=timeline(interrupted="died")))
    by = {c.metric: c for c in summarise(run_of(cells)).comparisons}
    assert by["ttft_s"].pairs == 2


@pytest.mark.parametrize(
    ("lost", "status", "verdict"),
    [(1, "failed", "better"), (2, "failed", "undecided"), (8, "cancelled", "better")],
)
@pytest.mark.parametrize("variant", ["baseline", "speculative"])
def test_many_failed_requests_withhold_the_verdict(
    variant: str, lost: int, status: str, verdict: str
) -> None:
    """One of 20 is 5%, which is not more than 5%; who cancelled a request failed nothing."""
    cells = []
    for repeat in range(3):
        for name, factor in _VARIANTS:
            records = scaled(factor + repeat / 100, n=20)
            if repeat == 1 and name == variant:
                records[-lost:] = [failed(index=20 - n, status=status) for n in range(lost)]
            cells.append(cell(name, repeat, records))  # type: ignore[arg-type]
    summary = summarise(run_of(cells))
    assert {c.verdict for c in summary.comparisons if c.metric == "tpot_s"} == {verdict}
    assert summary.void is None
    told = [c.text for c in summary.cautions if c.code == "verdict_withheld"]
    assert len(told) == (verdict == "undecided")
    if told:
        assert f"2 of 20 requests of reference-{variant}-r1-b0 failed" in told[0]


def test_the_same_records_give_the_same_bytes() -> None:
    factors = [(1.0, 0.5), (1.1, 0.56)]
    assert to_json(paired_run(factors)) == to_json(paired_run(factors))
    assert paired_run(factors).cells[0].load == C1
    assert paired_run(factors).title == "m/target with drafter-mla on reference"


def test_cells_that_are_not_there_are_told() -> None:
    cells = [cell(v, r, scaled(1.0)) for r in range(3) for v in VARIANTS]
    run = run_of(cells)
    assert "cells_missing" not in {c.code for c in summarise(run).cautions}
    part = msgspec.structs.replace(run, cells=cells[:-2])
    (told,) = [c for c in summarise(part).cautions if c.code == "cells_missing"]
    assert told.text.startswith("reference: 2 of 6 planned cells are not there, first reference-")
