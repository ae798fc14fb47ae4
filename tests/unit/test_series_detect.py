"""Change points of a nightly series: what is found, when, and what must not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analyse.series.detect import detect
from harness.analyse.series.records import Change, Config

NIGHTS = 80


def noisy(seed: int, *, noise: float = 0.01, nights: int = NIGHTS) -> np.ndarray:
    """Values around 100."""
    return 100 * np.exp(noise * np.random.default_rng(seed).standard_normal(nights))


def stepped(seed: int, by: float, at: int = 50) -> np.ndarray:
    values = noisy(seed)
    values[at:] *= 1 + by
    return values


def summary(changes: list[Change]) -> list[tuple[int, int, str, str, bool]]:
    return [(c.at, c.found, c.kind, c.direction, c.certain) for c in changes]


@pytest.mark.parametrize("seed", range(5))
def test_a_step_is_found_where_it_is_with_its_size(seed: int) -> None:
    changes = detect(stepped(seed, -0.05).tolist())
    worse = [c for c in changes if c.certain]
    assert len(worse) == 1
    found = worse[0]
    assert (found.kind, found.direction) == ("step", "worse")
    assert abs(found.at - 50) <= 1
    assert found.found <= 55
    assert found.good < 50
    assert found.effect is not None and found.effect.ci_low is not None
    assert found.effect.ci_low < 0.95 < (found.effect.ci_high or 0)
    assert found.before.value == pytest.approx(100, rel=0.01)
    assert found.noise == pytest.approx(0.01, rel=0.5)
    assert found.difference == pytest.approx(found.after.value - found.before.value)


def test_the_size_is_told_with_an_interval_that_mostly_holds_it() -> None:
    held = 0
    for seed in range(40):
        found = next(c for c in detect(stepped(seed, -0.05).tolist()) if c.certain)
        assert found.effect and found.effect.ci_low and found.effect.ci_high
        held += found.effect.ci_low <= 0.95 <= found.effect.ci_high
    assert held >= 33


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_loss_is_found_within_its_month(seed: int) -> None:
    values = noisy(seed)
    values[45:75] *= np.linspace(1, 0.95, 30)
    values[75:] *= 0.95
    worse = [c for c in detect(values.tolist()) if c.direction == "worse" and c.certain]
    assert worse and worse[0].found < 75
    assert worse[0].found > 48


def test_a_rise_back_is_found_as_better() -> None:
    values = stepped(1, -0.05, at=30)
    values[60:] *= 1 / 0.95
    changes = [c for c in detect(values.tolist()) if c.certain]
    assert [c.direction for c in changes] == ["worse", "better"]


def test_a_bad_night_is_a_suspect_that_night_and_nothing_after_it() -> None:
    values = noisy(3)
    values[60] *= 0.93
    tonight = detect(values[:61].tolist())
    assert [(c.at, c.certain) for c in tonight] == [(60, False)]
    assert not [c for c in detect(values.tolist()) if c.at == 60]


def test_a_small_loss_is_told_from_weekdays() -> None:
    weekend = np.where(np.arange(120) % 7 >= 5, 0.96, 1.0)
    values = noisy(5, noise=0.005, nights=120) * weekend
    values[100:] *= 0.98
    known, unknown = (detect(values.tolist(), config=Config(period=p)) for p in (7, 0))
    assert [(c.at, c.direction) for c in known] == [(100, "worse")]
    assert known[0].noise == pytest.approx(0.005, rel=0.4)
    assert known[0].found <= 104
    assert not [c for c in unknown if c.found <= 104]


def suspect_on(values: np.ndarray, night: int, config: Config) -> bool:
    found = detect(values[: night + 1].tolist(), config=config)
    return bool(found) and found[-1].found == night and found[-1].direction == "worse"


def test_refuted_is_no_evidence_for_a_while() -> None:
    values = stepped(2, -0.03, at=78)
    night = len(values) - 1
    first = next(t for t in range(78, 80) if suspect_on(values, t, Config()))
    assert suspect_on(values, first, Config())
    told = detect(values[: night + 1].tolist(), decisions={first: "refuted"})
    assert all(c.at > first for c in told if c.found > first)


def test_accepted_and_confirmed_begin_a_new_level() -> None:
    values = stepped(4, -0.10, at=50)
    for decision in ("accepted", "confirmed"):
        changes = detect(values.tolist(), decisions={50: decision})
        assert summary(changes)[0] == (50, 50, "step", "worse", True)
        assert not [c for c in changes[1:] if c.certain]


def test_the_machine_is_followed_once_it_lasts_and_is_not_listed() -> None:
    values = stepped(4, -0.10, at=50)
    decisions = dict.fromkeys(range(50, 60), "machine")
    assert not [c for c in detect(values.tolist(), decisions=decisions) if c.certain]


def test_an_accepted_loss_that_is_lost_again_is_found_again() -> None:
    values = stepped(6, -0.10, at=40)
    values[60:] *= 0.93
    changes = [c for c in detect(values.tolist(), decisions={40: "accepted"}) if c.certain]
    assert [c.at for c in changes] == [40, 60]
    assert changes[1].before.value == pytest.approx(90, rel=0.02)


def test_a_night_measured_badly_weighs_less() -> None:
    values = noisy(7)
    values[79] *= 0.96
    errors = [0.5] * 79
    assert detect(values.tolist(), errors=[*errors, 0.5])
    assert not detect(values.tolist(), errors=[*errors, 5.0])


def test_a_constant_series_that_steps_is_found_and_one_that_does_not_is_quiet() -> None:
    assert detect([3.0] * 60) == []
    changes = detect([3.0] * 40 + [2.9] * 10)
    assert (changes[0].at, changes[0].direction) == (40, "worse")


def test_counts_that_may_be_zero_are_watched_as_differences() -> None:
    changes = detect([0.0] * 40 + [5.0] * 6, better="lower")
    assert changes and changes[0].at == 40 and changes[0].direction == "worse"
    assert changes[0].effect is None and changes[0].difference == pytest.approx(5.0)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1.0],
        [None] * 50,
        [math.nan] * 50,
        [math.inf] * 50,
        [0.0] * 50,
        [-1.0] * 50,
        [1.0, None],
    ],
)
def test_nothing_to_tell_is_told_as_nothing(values: list[float | None]) -> None:
    assert detect(values) == []


def test_the_largest_numbers_overflow_nothing() -> None:
    values = [1e-300 if t % 2 else 1e300 for t in range(40)] + [1e-300] * 20
    for better in ("higher", "lower"):
        for change in detect(values, better=better):
            assert math.isfinite(change.after.ci_high or 0)


@given(
    st.lists(
        st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.integers(-3, 3),
        max_size=60,
    ),
    st.sampled_from(["higher", "lower", None]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_comes_is_judged_or_left(values: list[float | None], better: str | None) -> None:
    for change in detect(values, better=better):
        assert 0 <= change.good < change.at <= change.found < len(values)
        assert 0 <= change.p_value <= 1
        assert math.isfinite(change.before.value) and math.isfinite(change.after.value)


@given(st.integers(0, 500), st.floats(1e-6, 1e6), st.floats(-0.1, 0.1))
@settings(max_examples=15, deadline=None)
def test_the_unit_does_not_matter(seed: int, unit: float, by: float) -> None:
    values = stepped(seed, by)
    plain, scaled = detect(values.tolist()), detect((unit * values).tolist())
    assert summary(plain) == summary(scaled)
    for one, other in zip(plain, scaled, strict=True):
        assert other.before.value == pytest.approx(unit * one.before.value, rel=1e-6)
        assert other.p_value == pytest.approx(one.p_value, rel=1e-3, abs=1e-12)


@given(st.integers(0, 500), st.floats(-0.1, 0.1))
@settings(max_examples=15, deadline=None)
def test_a_time_is_watched_as_the_rate_it_is_the_inverse_of(seed: int, by: float) -> None:
    values = stepped(seed, by)
    rate, time = detect(values.tolist()), detect((1 / values).tolist(), better="lower")
    assert summary(rate) == summary(time)
    for one, other in zip(rate, time, strict=True):
        assert one.effect and other.effect
        assert other.effect.value == pytest.approx(1 / one.effect.value, rel=1e-6)


@given(st.integers(0, 500), st.floats(-0.1, 0.1), st.integers(20, NIGHTS - 1))
@settings(max_examples=15, deadline=None)
def test_later_nights_do_not_change_what_was_found(seed: int, by: float, until: int) -> None:
    values = stepped(seed, by)
    early = [c for c in detect(values[:until].tolist()) if c.certain]
    late = [c for c in detect(values.tolist()) if c.certain]
    assert late[: len(early)] == early


@given(st.integers(0, 200), st.sets(st.integers(0, 48), max_size=20))
@settings(max_examples=15, deadline=None)
def test_gaps_hide_no_large_change(seed: int, gaps: set[int]) -> None:
    values: list[float | None] = stepped(seed, -0.08).tolist()
    for gap in gaps:
        values[gap] = None
    found = [c for c in detect(values) if c.certain and c.direction == "worse"]
    assert any(abs(c.at - 50) <= 2 for c in found)
