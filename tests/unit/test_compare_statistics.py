"""The intervals and verdicts of comparisons between runs, where the truth is known."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from compare_runs import cells_of, group, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analyse.across.compare import compare_groups
from harness.analyse.across.effect import Effect, apart, effect, sample
from harness.analyse.across.metrics import SHARES
from harness.analyse.across.readings import Reading
from harness.analyse.across.rows import Wanted
from harness.analyse.across.shares import paired_shares, share_effect
from harness.analyse.simulated import REALISTIC, differences
from harness.analyse.statistics import judged, log_mean

LEAST, MOST = 0.938, 0.98
"""Coverage of 95% is looked for in this band; 3,000 runs tell it to 0.8% (two deviations)."""
WIDEST = 0.998
"""What an interval may cover that holds whichever of two sides spreads more."""
RUNS = 3000
MIRROR = {"better": "worse", "worse": "better", "same": "same", "undecided": "undecided"}


def units(logs: np.ndarray) -> dict[tuple[int, int], Reading]:
    return {(i, 0): Reading(above=math.exp(value)) for i, value in enumerate(logs)}


def of(a: np.ndarray, b: np.ndarray, *, unpaired: str | None) -> Effect:
    first, second = sample([units(a)]), sample([units(b)])
    assert first is not None
    assert second is not None
    return effect(first, second, unpaired=unpaired)


def covered(effects: list[Effect], truth: float) -> float:
    hits = 0
    for told in effects:
        assert told.found is not None
        low, high = told.found.interval(0.95) or (math.nan, math.nan)
        hits += low <= math.exp(truth) <= high
    return hits / len(effects)


@pytest.mark.parametrize("starts", [3, 4, 6])
def test_the_paired_interval_covers_what_it_says(starts: int) -> None:
    """What the prompts of a start bring is common to both and far larger than the noise."""
    rng = np.random.default_rng(starts)
    noise = 0.01 * differences(rng, RUNS, starts, REALISTIC)
    prompts = 0.2 * rng.standard_normal((RUNS, starts))
    found = [of(p, p + n + 0.02, unpaired=None) for p, n in zip(prompts, noise, strict=True)]
    assert all(told.paired for told in found)
    assert LEAST <= covered(found, 0.02) <= MOST


@pytest.mark.parametrize(("ours", "theirs", "wider"), [(3, 3, 1), (3, 6, 1), (4, 4, 3), (6, 3, 3)])
def test_the_unpaired_interval_covers_what_it_says(ours: int, theirs: int, wider: float) -> None:
    """Also where one side spreads more than the other, or has fewer starts."""
    rng = np.random.default_rng(10 * ours + theirs)
    a = 0.01 * rng.standard_normal((RUNS, ours))
    b = -0.05 + 0.01 * wider * rng.standard_normal((RUNS, theirs))
    found = [of(x, y, unpaired="the seeds are not the same") for x, y in zip(a, b, strict=True)]
    assert not any(told.paired for told in found)
    assert LEAST <= covered(found, -0.05) <= WIDEST


def test_blocks_that_pair_need_a_far_narrower_interval_than_the_same_blocks_apart() -> None:
    rng = np.random.default_rng(5)
    prompts = 0.2 * rng.standard_normal(6)
    a, b = (prompts + 0.01 * rng.standard_normal(6) for _ in range(2))
    paired, apart_ = (of(a, b, unpaired=why) for why in (None, "the seeds are not the same"))
    assert paired.found is not None
    assert apart_.found is not None
    assert (apart_.found.half(0.95) or 0) > 5 * (paired.found.half(0.95) or math.inf)
    assert paired.found.mean == pytest.approx(apart_.found.mean)


@pytest.mark.parametrize("many", [3, 5, 10])
def test_one_run_against_several_is_held_to_spread_as_they_do(many: int) -> None:
    rng = np.random.default_rng(many)
    values = 0.02 * rng.standard_normal((RUNS, many + 1))
    hits = 0
    for own in values:
        found, how = apart(own[1:].tolist(), own[:1].tolist())
        low, high = found.interval(0.95) or (math.nan, math.nan)
        hits += low <= 1 <= high
        assert "the single one" in how
    assert LEAST <= hits / RUNS <= MOST


@pytest.mark.parametrize("unpaired", [None, "the seeds are not the same"])
def test_the_same_is_called_worse_at_the_nominal_rate(unpaired: str | None) -> None:
    """Two-sided at 5%, whatever the size: so 2.5% each way."""
    rng = np.random.default_rng(77)
    told = {"worse": 0, "better": 0}
    for a, b in zip(*0.01 * rng.standard_normal((2, RUNS, 4)), strict=True):
        found = of(a, b, unpaired=unpaired).found
        assert found is not None
        said = judged(found, level=0.05, strict=0.05, better="higher", min_effect=1e-9).verdict
        if said in told:
            told[said] += 1
    for count in told.values():
        assert (0.015 if unpaired is None else 0.0) <= count / RUNS <= 0.033


def test_a_family_of_comparisons_has_one_false_alarm_in_twenty_runs_at_most() -> None:
    """Whole runs, both variants and their ratio, at four starts: any verdict but the right one."""
    rng = np.random.default_rng(3)
    runs, wrong = 400, 0
    wanted = Wanted(tolerances={"": 1e-6}, metrics=("output_tokens_per_s",))
    for _ in range(runs):
        sides = [
            stored(
                label,
                cells_of(
                    {
                        v: (50 * np.exp(0.01 * rng.standard_normal(4))).tolist()
                        for v in ("baseline", "speculative")
                    }
                ),
            )
            for label in "ab"
        ]
        across = compare_groups([group(side) for side in sides], wanted)
        assert len(across.comparisons[0].rows) == 3
        wrong += any(row.verdict in ("better", "worse") for row in across.comparisons[0].rows)
    assert wrong / runs <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / runs)


def test_a_regression_of_five_percent_is_found() -> None:
    rng = np.random.default_rng(8)
    found = 0
    for _ in range(100):
        a, b = (
            cells_of({"speculative": (scale * np.exp(0.005 * rng.standard_normal(4))).tolist()})
            for scale in (60.0, 57.0)
        )
        across = compare_groups([group(stored("a", a)), group(stored("b", b))], Wanted())
        found += any(row.kind == "question" for row in across.worse)
    assert found >= 90


speeds = st.lists(st.floats(10, 100), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None)
@given(a=speeds, b=speeds, seed=st.sampled_from([0, 7]))
def test_the_other_way_round_gives_the_reciprocal(
    a: list[float], b: list[float], seed: int
) -> None:
    one = stored("a", cells_of({"baseline": a, "speculative": a[::-1]}))
    two = stored("b", cells_of({"baseline": b, "speculative": b}), seed=seed)
    there = compare_groups([group(one), group(two)], Wanted()).comparisons[0].rows
    back = compare_groups([group(two), group(one)], Wanted()).comparisons[0].rows
    assert len(there) == len(back) > 20
    for row, other in zip(there, back, strict=True):
        assert (row.metric, row.side, row.paired) == (other.metric, other.side, other.paired)
        if row.ratio is None or other.ratio is None:
            assert row.ratio is other.ratio
            continue
        assert other.ratio == pytest.approx(1 / row.ratio, rel=1e-9)
        assert (other.p_value is None) is (row.p_value is None)
        if row.p_value is not None:
            assert other.p_value == pytest.approx(row.p_value, rel=1e-6, abs=1e-12)
        if row.ci_low is not None and row.ci_high is not None and row.ci_low > 0:
            assert other.ci_high == pytest.approx(1 / row.ci_low, rel=1e-6)
            assert other.ci_low == pytest.approx(1 / row.ci_high, rel=1e-6)
        edge = abs(abs(math.log(row.ratio)) - row.tolerance) < row.tolerance**2
        if not edge and not {row.verdict, other.verdict} & {"same"}:
            assert other.verdict == MIRROR[row.verdict]


def test_a_run_against_itself_is_the_same() -> None:
    run = group(stored())
    across = compare_groups([run, run], Wanted())
    for row in across.comparisons[0].rows:
        if row.metric not in SHARES:
            assert (row.ratio, row.verdict) == (1.0, "same")
    assert across.comparisons[0].differences == ()


@pytest.mark.parametrize("prompts", [60, 300])
def test_shares_of_prompts_cover_what_they_say(prompts: int) -> None:
    """Prompts are as hard for both; one in eight tips over, a few more one way than the other."""
    rng = np.random.default_rng(prompts)
    stays, falls, rises = 0.55, 0.08, 0.05
    truth = math.log((stays + rises) / (stays + falls))
    hits = 0
    for _ in range(RUNS):
        draw = rng.random(prompts)
        a = (draw < stays + falls).astype(np.float64)
        risen = (draw >= stays + falls) & (draw < stays + falls + rises)
        b = ((draw < stays) | risen).astype(np.float64)
        found = paired_shares(a, b)
        low, high = found.interval(0.95) or (math.nan, math.nan)
        hits += low <= math.exp(truth) <= high
    assert LEAST <= hits / RUNS <= MOST


def test_one_prompt_that_tips_over_is_no_certain_change() -> None:
    """Every start of an engine gives the same answers, so that over starts nothing spreads."""
    right = {f"p{i}": 1.0 for i in range(24)}
    told = share_effect(right, {**right, "p3": 0.0})
    assert told is not None
    assert told.found is not None
    low, high = told.found.interval(0.95) or (math.nan, math.nan)
    assert low < 0.9 < 1 < high
    many = share_effect(right, {**right, **{f"p{i}": 0.0 for i in range(12)}})
    assert many is not None
    assert many.found is not None
    assert (many.found.interval(0.95) or (0, 2))[1] < 0.9


def test_no_change_in_few_prompts_does_not_show_that_there_is_none() -> None:
    same = np.ones(20)
    found = paired_shares(same, same)
    low, high = found.interval(0.95) or (math.nan, math.nan)
    assert low < 0.93 < 1.07 < high
    large = paired_shares(np.ones(3000), np.ones(3000))
    assert (large.interval(0.95) or (0, 2))[0] > 0.999


def test_the_unpaired_statistic_is_that_of_welch_with_fewer_degrees_of_freedom() -> None:
    from scipy.stats import ttest_ind

    rng = np.random.default_rng(4)
    a, b = rng.normal(0, 1, 5), rng.normal(1, 3, 9)
    found, _ = apart(a.tolist(), b.tolist())
    assert found.error is not None
    told = ttest_ind(b, a, equal_var=False)
    assert found.mean / found.error == pytest.approx(told.statistic)
    assert (found.p_value() or 0) > told.pvalue
    assert found.degrees == 4


def test_counts_are_pooled_and_other_figures_are_not() -> None:
    blocks = {(0, 0): Reading(above=10, below=100, offset=1), (0, 1): Reading(above=300, below=300)}
    blocks[0, 1] = msgspec.structs.replace(blocks[0, 1], offset=1)
    told = sample([{**blocks, (1, 0): Reading(above=50, below=100, offset=1)}])
    assert told is not None
    assert told.logs == {
        (0, 0): pytest.approx(math.log(1 + 310 / 400)),
        (1, 0): pytest.approx(math.log(1.5)),
    }
    assert told.value == pytest.approx(1 + 360 / 500)
    single = {(0, 0): 1.0, (0, 1): 4.0, (1, 0): 2.0}
    times = sample([{unit: Reading(above=value) for unit, value in single.items()}])
    assert times is not None
    assert times.logs[0, 0] == pytest.approx(math.log(2))
    assert sample([{(0, 0): Reading(above=0.0)}]) is None


def test_a_fall_to_nothing_is_found() -> None:
    """Nothing has no logarithm; that must not hide the worst that can happen."""
    right = {f"p{i}": 1.0 for i in range(24)}
    told = share_effect(right, dict.fromkeys(right, 0.0))
    assert told is not None
    assert told.found is not None
    assert (told.found.interval(0.95) or (0, 2))[1] < 0.2
    assert (told.reference, told.candidate) == (1.0, 0.0)
    some = sample([{(i, 0): Reading(above=300.0 + i, below=1000.0) for i in range(3)}])
    none = sample([{(i, 0): Reading(above=0.0, below=1000.0) for i in range(3)}])
    assert some is not None
    assert none is not None
    found = effect(some, none, unpaired=None).found
    assert found is not None
    assert (found.interval(0.95) or (0, 2))[1] < 0.01
    assert none.value == 0


def test_log_mean_has_as_many_degrees_of_freedom_as_it_is_given() -> None:
    plain = log_mean([0.0, 0.1, 0.2])
    assert plain.freedom == 2
    other = msgspec.structs.replace(plain, degrees=7.5)
    assert (other.half(0.95) or 0) < (plain.half(0.95) or 0)


def test_two_starts_far_apart_have_no_interval_at_a_strict_level_rather_than_an_overflow() -> None:
    """One degree of freedom: t at the level of 300 rows is in the thousands."""
    found = log_mean([0.0, 0.5])
    assert found.interval(0.95) is not None
    assert found.interval(1 - 0.05 / 300) is None
    told = judged(found, level=0.05 / 300, strict=0.05 / 300, better="higher", min_effect=0.03)
    assert (told.verdict, told.low, told.high) == ("undecided", None, None)
