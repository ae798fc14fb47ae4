"""Fresh blocks and gates: what they decide, and what they leave open."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analyse.series.confirm import confirm
from harness.analyse.series.gate import gate
from harness.analyse.series.records import DEFAULT, Change, Config
from harness.findings import Interval

GOOD = [100.0, 100.6, 99.5, 100.1]
BAD = [97.0, 97.5, 96.6, 97.1]


def change(*, after: float = 97.0, nights: int = 1, p: float = 0.02, **given: object) -> Change:
    """A suspected loss from 100, `nights` nights old."""
    told = {
        "at": 51 - nights,
        "found": 50,
        "good": 40,
        "kind": "step",
        "direction": "worse",
        "before": Interval(value=100.0, ci_low=99.7, ci_high=100.3),
        "after": Interval(value=after),
        "difference": after - 100,
        "effect": Interval(value=after / 100),
        "noise": 0.01,
        "p_value": p,
        "certain": False,
    }
    return Change(**{**told, **given})


def test_a_loss_that_is_there_beside_a_good_version_is_confirmed() -> None:
    said = confirm(change(), BAD, reference=GOOD)
    assert said.verdict == "confirmed" and said.more == 0
    assert said.effect.value == pytest.approx(0.97, abs=0.002)
    assert said.effect.ci_high is not None and said.effect.ci_high < 1


def test_a_loss_that_the_good_version_has_too_is_the_machines() -> None:
    said = confirm(change(), BAD, reference=BAD)
    assert said.verdict == "machine"
    assert said.machine is not None and said.machine.value == pytest.approx(0.97, abs=0.002)


def test_a_loss_that_is_gone_is_refuted() -> None:
    assert confirm(change(), GOOD, reference=GOOD).verdict == "refuted"
    assert confirm(change(), GOOD).verdict == "refuted"


def test_a_night_alone_cannot_tell_a_version_from_the_machine() -> None:
    said = confirm(change(), BAD)
    assert (said.verdict, said.more) == ("undecided", 0)
    assert "another night" in said.why


def test_without_a_good_version_only_lasting_and_certain_losses_are_confirmed() -> None:
    assert confirm(change(nights=3, p=1e-5), BAD).verdict == "confirmed"
    assert confirm(change(nights=3, p=1e-3), BAD).verdict == "undecided"
    assert confirm(change(nights=3, p=1e-5), GOOD).verdict == "refuted"


def test_noisy_blocks_ask_for_more_until_the_last_look() -> None:
    config = Config()
    noisy, other = [90.0, 104.0, 97.0, 101.0], [99.0, 94.0, 105.0, 102.0]
    first = confirm(change(), noisy, reference=other)
    assert (first.verdict, first.more) == ("undecided", config.blocks)
    last = confirm(change(), noisy * config.looks, reference=other * config.looks)
    assert last.more == 0


def test_too_few_blocks_decide_nothing() -> None:
    for fresh, other in (([], GOOD), ([97.0], GOOD), (BAD, [100.0]), ([None, math.nan], GOOD)):
        said = confirm(change(), fresh, reference=other)
        assert said.verdict == "undecided" and said.more > 0


def test_blocks_that_never_have_a_value_end_at_the_last_look() -> None:
    most = DEFAULT.looks * DEFAULT.blocks
    for fresh, other in (([None] * most, GOOD), (BAD, [None] * most), ([None] * most, None)):
        said = confirm(change(), fresh, reference=other)
        assert (said.verdict, said.more) == ("undecided", 0)


def test_a_difference_smaller_than_is_worth_a_word_is_no_alarm() -> None:
    exact = [99.5, 99.51, 99.5, 99.49]
    assert confirm(change(), exact, reference=[100.0, 100.01, 99.99, 100.0]).verdict == "refuted"


def test_a_count_that_rose_is_confirmed_as_a_difference() -> None:
    rose = change(after=5.0, before=Interval(value=0.0), effect=None, difference=5.0, noise=0.001)
    said = confirm(rose, [5.0, 5.0, 6.0, 5.0], reference=[0.0, 0.0, 0.0, 0.0], better="lower")
    assert said.verdict == "confirmed"


@given(st.integers(0, 10_000), st.floats(1e-4, 1e4), st.floats(-0.06, 0.02))
@settings(max_examples=60, deadline=None)
def test_unit_and_side_do_not_matter(seed: int, unit: float, by: float) -> None:
    rng = np.random.default_rng(seed)
    new, old = (100 * np.exp(m + 0.01 * rng.standard_normal(6)) for m in (by, 0))
    plain = confirm(change(), new.tolist(), reference=old.tolist())

    def turned(value: float) -> float:
        return unit / value

    mirrored = change(
        after=turned(97.0),
        before=Interval(value=turned(100.0)),
        effect=Interval(value=100 / 97),
        difference=turned(97.0) - turned(100.0),
    )
    fresh, reference = ([turned(v) for v in side.tolist()] for side in (new, old))
    other = confirm(mirrored, fresh, reference=reference, better="lower")
    assert (plain.verdict, plain.more) == (other.verdict, other.more)
    assert other.effect.value == pytest.approx(1 / plain.effect.value)


def test_chance_alone_is_confirmed_as_seldom_as_is_said() -> None:
    rng = np.random.default_rng(1)
    config, wrong, runs = Config(least=0.0), 0, 4000
    for _ in range(runs):
        fresh, other, more = [], [], config.blocks
        while more:
            fresh += np.exp(0.02 * rng.standard_normal(more)).tolist()
            other += np.exp(0.02 * rng.standard_normal(more)).tolist()
            small = change(after=99.99)
            said = confirm(small, fresh, reference=other, config=config)
            more = said.more
        wrong += said.verdict == "confirmed"
    assert wrong <= config.alpha * runs + 3 * math.sqrt(config.alpha * runs)


def interval(value: float, half: float) -> Interval:
    return Interval(value=value, ci_low=value - half, ci_high=value + half)


@pytest.mark.parametrize(
    ("value", "half", "verdict"),
    [(99, 1, "pass"), (97.5, 1, "undecided"), (96, 0.5, "fail"), (110, 1, "pass")],
)
def test_a_gate_is_decided_by_the_interval(value: float, half: float, verdict: str) -> None:
    got = gate(interval(value, half), Interval(value=100), better="higher", tolerance=0.03)
    assert got.verdict == verdict
    assert got.change is not None
    assert got.change.value == pytest.approx(value / 100 - 1)
    assert got.change.ci_low == pytest.approx((value - half) / 100 - 1)


def test_the_baselines_interval_counts_too() -> None:
    value, wide = interval(95, 1), interval(100, 3)
    assert gate(value, Interval(value=100), better="higher", tolerance=0.03).verdict == "fail"
    assert gate(value, wide, better="higher", tolerance=0.03).verdict == "undecided"


def test_a_gate_of_a_time_fails_when_it_takes_longer() -> None:
    base = interval(10.0, 0.1)
    assert gate(interval(11, 0.1), base, better="lower", tolerance=0.05).verdict == "fail"
    assert gate(interval(9, 0.1), base, better="lower", tolerance=0.05).verdict == "pass"
    assert gate(interval(9, 0.1), base, better=None, tolerance=0.05).verdict == "fail"


def test_exact_counts_need_no_interval_and_others_do() -> None:
    base = Interval(value=0.0)
    for count, verdict in ((0.0, "pass"), (1.0, "fail")):
        got = gate(
            Interval(value=count), base, better="lower", tolerance=0, absolute=True, exact=True
        )
        assert got.verdict == verdict
    open_ = gate(Interval(value=1.0), base, better="lower", tolerance=0, absolute=True)
    assert open_.verdict == "undecided"


def test_no_value_passes_no_gate() -> None:
    for value in (None, Interval(value=math.nan), Interval(value=math.inf)):
        got = gate(value, Interval(value=1.0), better="higher", tolerance=0.1)
        assert (got.verdict, got.change) == ("undecided", None)


def test_what_has_no_ratio_asks_for_an_absolute_gate() -> None:
    with pytest.raises(ValueError, match="absolute"):
        gate(Interval(value=1.0), Interval(value=0.0), better="lower", tolerance=0.1)
    with pytest.raises(ValueError, match="tolerance"):
        gate(Interval(value=1.0), Interval(value=1.0), better="lower", tolerance=-0.1)


def test_a_rate_that_fell_to_nothing_fails() -> None:
    got = gate(Interval(value=0.0), Interval(value=2.0), better="higher", tolerance=0.1, exact=True)
    assert got.verdict == "fail" and got.change is not None and got.change.value == -1


@given(
    st.floats(0.5, 2),
    st.floats(0, 0.3),
    st.floats(0, 0.3),
    st.floats(0, 0.2),
    st.sampled_from(["higher", "lower"]),
)
@settings(deadline=None)
def test_more_tolerance_never_fails_what_passed(
    value: float, half: float, base_half: float, tolerance: float, better: str
) -> None:
    order = ("fail", "undecided", "pass")
    base = interval(1.0, base_half)
    strict, lenient = (
        gate(interval(value, half), base, better=better, tolerance=t)
        for t in (tolerance, tolerance + 0.05)
    )
    assert order.index(strict.verdict) <= order.index(lenient.verdict)
    assert strict.change is not None and strict.change.ci_low is not None
    assert strict.change.ci_low <= strict.change.value <= (strict.change.ci_high or 0)
