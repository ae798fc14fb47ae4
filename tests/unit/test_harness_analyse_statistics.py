"""Intervals, corrections, the bootstrap and early stopping, where the truth is known."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from harness_records import C1, cell, counters, run_of, scaled
from hypothesis import given
from hypothesis import strategies as st

from harness.analyse import simulate, simulated
from harness.analyse.bootstrap import BOOTSTRAP_STARTS, PairSums, figures, hierarchical, pair_sums
from harness.analyse.data import CellData
from harness.analyse.estimates import pooled_ratio
from harness.analyse.simulated import PLAIN, PRECISION, REALISTIC
from harness.analyse.statistics import LogMean, holm, log_mean, percent_of, t_p_value, t_quantile
from harness.analyse.stopping import stopped_confidence
from harness.analyse.summary import summarise
from harness.analyse.words import metric_words
from harness.measure.store import to_json
from harness.plan.schema import CompareSection, Plan
from harness.records import DraftCounts, LoadPoint, Variant

COUNTS = DraftCounts(drafts=20, drafted=60, accepted=30, per_position=(15, 10, 5))
VALUES = st.lists(st.integers(-1000, 1000).map(lambda i: i / 1000), min_size=2, max_size=8)


def planned(
    starts: int,
    *,
    loads: tuple[LoadPoint, ...] = (C1,),
    ratio: float = 0.5,
    noise: float = 0.01,
    compare: CompareSection | None = None,
    seed: int = 1,
) -> bytes:
    """The summary, in bytes, of a run whose speculative cells take `ratio` of the time."""
    return to_json(
        summarise(
            run_of(
                cells_of(starts, loads, ratio, noise, seed),
                plan=Plan(compare=compare or CompareSection()),
            )
        )
    )


def cells_of(
    starts: int, loads: tuple[LoadPoint, ...], ratio: float, noise: float, seed: int
) -> list[CellData]:
    rng = np.random.default_rng(seed)
    variants: tuple[Variant, Variant] = ("baseline", "speculative")
    cells = []
    for repeat in range(starts):
        for load in loads:
            for variant in variants:
                factor = (ratio if variant == "speculative" else 1.0) * math.exp(
                    noise * rng.standard_normal()
                )
                made = cell(variant, repeat, scaled(factor), load=load, counted=counters(COUNTS))
                cells.append(made)
    return cells


@given(VALUES, st.floats(0.6, 0.99))
def test_the_p_value_and_the_interval_say_the_same(values: list[float], confidence: float) -> None:
    found = log_mean(values)
    interval, p = found.interval(confidence), found.p_value()
    assert interval is not None
    assert p is not None
    if abs(p - (1 - confidence)) > 1e-6:
        assert (p < 1 - confidence) == (not interval[0] <= 1 <= interval[1])


def test_p_value_by_hand() -> None:
    # t = 2 with 4 degrees of freedom: p = 0.1161165 (tables of Student's t).
    assert t_p_value(2.0, 1.0, 4) == pytest.approx(0.1161165, abs=1e-6)
    assert t_p_value(0.0, 0.0, 4) == 1.0
    assert t_p_value(0.1, 0.0, 4) == 0.0
    assert log_mean([0.0, 0.0]).p_value() == 1.0
    assert log_mean([0.3]).p_value() is None


def test_a_reference_of_resamples_gives_both_too() -> None:
    found = LogMean(mean=0.2, error=0.1, units=9, reference=tuple(i / 10 for i in range(39)))
    assert found.half(0.95) == pytest.approx(0.1 * 3.7)  # the 38th of 39
    assert found.p_value() == pytest.approx((19 + 1) / 40)
    assert found.half(0.99) == math.inf
    assert found.interval(0.99) is None  # so few resamples know nothing of it


def test_holm_by_hand() -> None:
    # Of four at 5%: 0.01 <= 0.05/4, 0.015 <= 0.05/3, 0.03 > 0.05/2: the last two have 0.05/4.
    levels = holm([0.03, 0.01, 0.015, 0.04], [0.05] * 4)
    assert levels == pytest.approx([0.0125, 0.0125, 0.05 / 3, 0.0125])
    assert holm([0.9], [0.05]) == [0.05]
    assert holm([], []) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_bonferroni_and_none_and_is_monotone(p_values: list[float]) -> None:
    levels = holm(p_values, [0.05] * len(p_values))
    assert all(0.05 / len(p_values) <= level <= 0.05 + 1e-12 for level in levels)
    accepted = [p for p, level in zip(p_values, levels, strict=True) if p > level]
    rejected = [p for p, level in zip(p_values, levels, strict=True) if p <= level]
    assert not accepted or not rejected or max(rejected) <= min(accepted)


def test_the_verdict_takes_the_corrected_interval_and_the_plain_one_is_shown() -> None:
    loads = tuple(LoadPoint(mode="closed", concurrency=c, num_requests=4) for c in (1, 2, 3, 4))
    cells = cells_of(3, loads, 0.93, 0.013, seed=3)
    summary = summarise(run_of(cells))
    speeds = [c for c in summary.comparisons if c.metric == "output_tokens_per_s"]
    others = [c for c in summary.comparisons if c.metric != "output_tokens_per_s"]
    assert {c.family for c in speeds} == {4}  # the run's question, over its loads
    assert {c.family for c in others} == {12}
    for c in (*speeds, *others):
        assert None not in (c.ci_low, c.ci_high, c.corrected_low, c.corrected_high)
        assert c.corrected_low <= c.ci_low <= c.ci_high <= c.corrected_high  # type: ignore[operator]
        assert c.confidence == 0.95
        assert "Holm's correction" in c.method
    lost = [c for c in speeds if c.ci_low > 1 >= c.corrected_low]  # type: ignore[operator]
    assert lost, "the noise was chosen so that the correction matters"
    assert {c.verdict for c in lost} == {"undecided"}
    (told,) = [c for c in summary.cautions if c.code == "verdict_corrected"]
    first = lost[0]
    assert f"differs by itself ({first.ci_low:.2f}" in told.text
    assert f": {metric_words(first.metric)} differs" in told.text and "_s " not in told.text
    assert f"not as one of 4 comparisons ({first.corrected_low:.2f}" in told.text


def test_the_plan_chooses_the_question() -> None:
    plan = Plan(compare=CompareSection(metric="tpot_s"))
    summary = summarise(run_of(cells_of(3, (C1,), 0.5, 0.001, seed=1), plan=plan))
    families = {c.metric: c.family for c in summary.comparisons}
    assert families == {"output_tokens_per_s": 3, "ttft_s": 3, "tpot_s": 1, "e2el_s": 3}


def test_with_two_starts_the_blocks_are_not_the_units() -> None:
    cells = []
    for repeat in range(2):
        for block in range(5):
            slow = 1.0 + 0.2 * repeat  # what a start brings with it, the same in all its blocks
            cells.append(cell("baseline", repeat, scaled(1.0 + block / 1000), block=block))
            cells.append(cell("speculative", repeat, scaled(0.8 * slow), block=block))
    speed = next(iter(summarise(run_of(cells)).comparisons))
    assert speed.pairs == 2
    assert speed.verdict == "undecided"
    assert "2 paired starts" in speed.method


def test_many_starts_have_the_hierarchical_bootstrap_and_the_same_bytes() -> None:
    first, second = planned(BOOTSTRAP_STARTS), planned(BOOTSTRAP_STARTS)
    assert first == second
    assert b"hierarchical bootstrap-t" in first
    assert b"hierarchical bootstrap-t" not in planned(BOOTSTRAP_STARTS - 1)
    assert first != planned(BOOTSTRAP_STARTS, seed=2)


def test_a_run_that_stopped_early_keeps_the_interval_its_correction_is_for() -> None:
    told = planned(BOOTSTRAP_STARTS, compare=CompareSection(precision=0.03))
    assert b"hierarchical" not in told
    assert b"stopped by its width" in told


def test_requests_are_paired_by_their_index_and_failed_ones_left_out() -> None:
    base, cand = scaled(1.0, n=10), scaled(0.5, n=8)
    sums = pair_sums(0.1, figures(base), figures(cand), metric="e2el_s", load=C1)
    assert sums.batches.shape == (8, 4)
    assert sums.batches.sum(axis=0) == pytest.approx([8 * 0.105, 8, 8 * 0.21, 8])
    rate = pair_sums(0.1, figures(base), figures(cand), metric="output_tokens_per_s", load=C1)
    assert rate.batches.sum(axis=0) == pytest.approx([48, 8 * 0.105, 48, 8 * 0.21])
    none = pair_sums(0.1, figures([]), figures(cand), metric="ttft_s", load=C1)
    assert none.batches.shape == (0, 4)


def test_the_bootstrap_counts_the_requests_noise_once() -> None:
    # Starts that differ by their requests alone: the interval is Student's, not wider.
    rng = np.random.default_rng(4)
    n, batches = 24, 20
    starts = []
    for _ in range(n):
        sums = np.ones((batches, 4))
        sums[:, 0] = np.exp(0.2 * rng.standard_normal(batches))
        value = math.log(sums[:, 0].mean())
        starts.append([PairSums(log_ratio=value, batches=sums)])
    found = hierarchical(starts, name="x")
    assert found.error is not None
    assert found.half(0.95) == pytest.approx(t_quantile(0.975, n - 1) * found.error, rel=0.1)


def test_a_pooled_ratio_by_hand() -> None:
    # 30/20 and 10/20: ratio 1, deviations +10 and -10, variance 200, half = t * sqrt(2*200)/40.
    found = pooled_ratio([(30, 20), (10, 20)], 0.95)
    assert found is not None
    ratio, half = found
    assert ratio == 1.0
    assert half == pytest.approx(t_quantile(0.975, 1) * 20 / 40)
    assert pooled_ratio([(3, 2)], 0.95) == (1.5, None)
    assert pooled_ratio([], 0.95) is None


def test_each_variant_has_its_own_figures_with_intervals_and_acceptance_has_one() -> None:
    summary = summarise(run_of(cells_of(3, (C1,), 0.5, 0.01, seed=1)))
    by = {(e.metric, e.variant): e for e in summary.estimates}
    length = by["acceptance_length", "speculative"]
    assert ("acceptance_length", "baseline") not in by
    assert (length.value, length.units) == (2.5, 3)
    assert length.ci_low == length.ci_high == 2.5  # every start counted the same
    speed = by["output_tokens_per_s", "baseline"]
    assert speed.ci_low is not None
    assert speed.ci_high is not None
    assert speed.ci_low < speed.value < speed.ci_high
    assert by["ttft_s", "speculative"].value == pytest.approx(0.05, rel=0.05)


def test_acceptance_of_one_start_has_the_requests_interval() -> None:
    accepted = [1, 2, 3, 2]
    records = [
        r
        for i, r in enumerate(scaled(0.5, n=4))
        for r in [_with(r, DraftCounts(drafts=2, drafted=6, accepted=accepted[i]))]
    ]
    cells = [cell("baseline", 0, scaled(1.0, n=4)), cell("speculative", 0, records)]
    (length,) = [e for e in summarise(run_of(cells)).estimates if e.metric == "acceptance_length"]
    assert length.value == 2.0
    assert "4 requests of one start" in length.method
    assert length.ci_low is not None
    assert 1 < length.ci_low < 2


def _with(record: object, counts: DraftCounts) -> object:
    import msgspec

    return msgspec.structs.replace(record, acceptance=counts)  # type: ignore[type-var]


@pytest.mark.parametrize("pairs", [2, 3, 4, 6])
def test_runs_without_a_difference_are_called_as_often_as_the_confidence_says(pairs: int) -> None:
    rng = np.random.default_rng(pairs)
    called = simulated.same_against_same(rng, 2000, pairs, REALISTIC)
    row = simulate.Row(table="", setting="", what="", hits=called, trials=2000, nominal=0.05)
    p = row.p_value()
    assert p is not None
    assert p > 0.01, f"{called} of 2000 called"


def test_the_formula_for_many_runs_is_the_one_for_one() -> None:
    rng = np.random.default_rng(1)
    logs = simulated.differences(rng, 300, 4, REALISTIC)
    alone = sum(not _covers(row.tolist()) for row in logs)
    assert simulated.apart(logs) == alone


def _covers(values: list[float]) -> bool:
    interval = log_mean(values).interval(0.95)
    assert interval is not None
    return interval[0] <= 1 <= interval[1]


def test_the_plain_bootstrap_would_not_cover() -> None:
    missed = simulated.percentile_misses(np.random.default_rng(1), 400, 3, PLAIN)
    assert missed > 0.15 * 400  # what a nominal 5% would be, three times over


def test_the_simulated_order_is_abba() -> None:
    """A steady drift cancels in an even number of pairs, and outliers slow their own variant."""
    still = simulated.Noise(slow=0, correlation=0, drift=1000, outliers=0)
    logs = simulated.differences(np.random.default_rng(1), 50, 4, still)
    assert np.abs(logs).mean() > 50
    assert np.abs(logs.mean(axis=1)).max() < 5


@pytest.mark.parametrize("noise", [0.5, 1.0, 1.7, 3.0])
def test_stopping_early_covers_what_it_says(noise: float) -> None:
    runs = 20_000
    logs = noise * np.random.default_rng(7).standard_normal((runs, simulated.MOST))
    good = stopped_confidence(0.95, simulated.FIRST, simulated.MOST)
    found = simulated.stop_early(logs, confidence=good)
    assert found.covered.mean() >= 0.95 - 2.33 * math.sqrt(0.95 * 0.05 / runs)
    if noise == 1.7:
        plain = simulated.stop_early(logs, confidence=0.95)
        assert plain.covered.mean() < 0.92  # what it is made up for


def test_stopping_early_saves_two_fifths_where_the_noise_is_not_known_before() -> None:
    rows = simulate.stopping_table(np.random.default_rng(3), 4000)
    by = {row.setting: row for row in rows}
    plain = by["noise 0.5% to 3%, not known"]
    assert plain.share >= 0.95
    assert _saved(plain.note) >= 40
    assert _saved(by["noise 0.5% to 3%, not known, all kinds"].note) >= 40


def _saved(note: str) -> int:
    return int(note.partition("saves ")[2].partition("%")[0])


def test_stopping_later_costs_less_confidence() -> None:
    assert stopped_confidence(0.95, 3, 20) == 0.979
    assert stopped_confidence(0.95, 6, 20) < stopped_confidence(0.95, 4, 20) < 0.979
    assert stopped_confidence(0.95, 20, 20) == 0.95
    assert stopped_confidence(0.9, 3, 20) < 0.96


def test_a_fixed_design_is_precise_as_often_as_it_is_to_be() -> None:
    pairs = simulated.fixed_pairs(1.0, 0.95)
    logs = np.random.default_rng(2).standard_normal((20_000, pairs))
    half = t_quantile(0.975, pairs - 1) * logs.std(axis=1, ddof=1) / math.sqrt(pairs)
    assert (half <= 1).mean() > 0.94
    assert simulated.fixed_pairs(0.1, 0.95) == 3
    assert pytest.approx(math.log(1.03)) == PRECISION


@pytest.mark.parametrize(
    ("truth", "min_effect"),
    [
        ([0.0] * 8, 1e-9),
        ([0.0] * 4 + [0.2] * 4, 1e-9),
        ([math.log(1.03)] * 8, 0.03),  # each as different as matters: `same` would be wrong
    ],
)
def test_many_loads_have_a_wrong_verdict_no_more_often_than_one(
    truth: list[float], min_effect: float
) -> None:
    runs = 800
    alone, together = (
        simulated.any_wrong(np.random.default_rng(1), runs, truth, min_effect, corrected=corrected)
        for corrected in (False, True)
    )
    assert alone > 0.08 * runs
    assert together <= 0.05 * runs + 2.33 * math.sqrt(0.05 * 0.95 * runs)


def test_a_true_three_percent_are_found_as_often_as_the_docs_say() -> None:
    seen, better = simulated.power(np.random.default_rng(1), 20_000, 4, 0.01, 0.03)
    assert seen / 20_000 == pytest.approx(0.96, abs=0.01)
    assert better / 20_000 == pytest.approx(0.5, abs=0.02)


def test_whole_runs_without_a_difference_are_called_no_more_often_than_one_in_twenty() -> None:
    runs = 400
    plan = Plan(compare=CompareSection(min_effect=0.0001))
    called = any_ = 0
    for seed in range(runs):
        cells = cells_of(3, (C1,), 1.0, 0.02, seed)
        found = summarise(run_of(cells, plan=plan)).comparisons
        verdicts = {c.metric: c.verdict in ("better", "worse") for c in found}
        called += verdicts["output_tokens_per_s"]
        any_ += any(verdicts.values())
    assert 8 <= called <= 34  # 20 are expected; 99.5% of such runs lie within
    assert any_ <= 2 * 34  # two families, each at 5%


@pytest.mark.full
def test_every_row_of_the_whole_table_keeps_its_nominal_rate() -> None:
    begun = time.process_time()
    rows = simulate.simulate()
    nominal = [row for row in rows if row.nominal is not None]
    assert len(nominal) >= 10
    assert all((row.p_value() or 0) > 0.01 and row.trials >= 2000 for row in nominal)
    stopped = [r for r in rows if r.table == "stopped early" and "made up" not in r.setting]
    assert all(row.share >= 0.95 for row in stopped)
    assert time.process_time() - begun < 120


def test_the_table_is_printed_for_a_share_of_the_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["simulate", "--share", "0.01", "--seed", "5"])
    monkeypatch.delitem(simulate.TABLES, "bootstrap")
    simulate.main()
    told = capsys.readouterr().out
    assert "A/A, all noise" in told
    assert "of 100 " in told
    assert "saves" in told


def test_acceptance_over_starts_covers_what_it_says() -> None:
    missed = simulated.acceptance_misses(np.random.default_rng(1), 2000, 4, sizes=0.1, between=0.02)
    assert 73 <= missed <= 129  # 100 are expected; 99% of such runs lie within


@pytest.mark.parametrize(
    ("confidence", "said"),
    [(0.95, "95%"), (0.9, "90%"), (0.975, "97.5%"), (0.979, "97.9%"), (1 - 0.05 / 6, "99.17%"),
     (1 - 0.05 / 4950, "99.999%"), (0.999999999, "99.9999999%")],
)  # fmt: skip
def test_a_confidence_is_never_rounded_to_certainty(confidence: float, said: str) -> None:
    assert percent_of(confidence) == said


@given(st.floats(0.5, 1 - 1e-9, exclude_min=True))
def test_a_confidence_in_words_is_as_far_from_1_as_itself(confidence: float) -> None:
    told = float(percent_of(confidence).rstrip("%")) / 100
    assert told < 1 and abs(told - confidence) <= 0.1 * (1 - confidence) + 1e-12
