"""When requests are due: means, dispersion, exact times, the same for everybody who asks.

Bounds are six standard errors or more and the seeds are derandomised: none fails by chance.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.load.schedule import arrivals
from harness.load.schedule.arrivals import offsets
from harness.records import LoadPoint

RATES = st.floats(0.01, 10_000)
SEEDS = st.integers(0, 2**31 - 1)
fixed = settings(max_examples=30, deadline=None, derandomize=True)


def gaps(at_s: np.ndarray) -> np.ndarray:
    return np.diff(at_s, prepend=0.0)


@fixed
@given(RATES, st.floats(0.1, 20), SEEDS)
def test_gamma_gaps_have_the_right_mean_and_dispersion(
    rate: float, burstiness: float, seed: int
) -> None:
    n = 20_000
    load = LoadPoint(
        mode="open", request_rate=rate, num_requests=n, arrival="gamma", burstiness=burstiness
    )
    at_s = offsets(load, seed=seed)
    assert len(at_s) == n
    assert (np.diff(at_s) >= 0).all()
    scaled = gaps(at_s) * rate
    variance = 1 / burstiness
    assert scaled.mean() == pytest.approx(1.0, abs=6 * (variance / n) ** 0.5)
    # The variance of a sample's variance is (kurtosis - 1)/n of its square; a gamma's kurtosis is
    # 3 + 6/shape. Twice the bound, as that error is skewed where the shape is small.
    error = variance * ((2 + 6 * variance) / n) ** 0.5
    assert scaled.var() == pytest.approx(variance, abs=12 * error)


@fixed
@given(RATES, SEEDS)
def test_poisson_is_the_default_and_gamma_of_shape_one(rate: float, seed: int) -> None:
    load = LoadPoint(mode="open", request_rate=rate, num_requests=500)
    at_s = offsets(load, seed=seed)
    shaped = LoadPoint(
        mode="open", request_rate=rate, num_requests=500, arrival="gamma", burstiness=1.0
    )
    assert at_s.tolist() == offsets(load, seed=seed).tolist()
    assert at_s.tolist() == offsets(shaped, seed=seed).tolist()
    assert at_s.tolist() != offsets(load, seed=seed + 1).tolist()


@fixed
@given(st.floats(0.5, 2000), SEEDS)
def test_poisson_counts_in_windows_are_dispersed_like_poisson(rate: float, seed: int) -> None:
    windows = 2000
    duration_s = windows * 5 / rate  # five arrivals a window
    at_s = arrivals.poisson(rate, seed=seed, duration_s=duration_s)
    assert (at_s < duration_s).all()
    counts = np.histogram(at_s, bins=windows, range=(0, duration_s))[0]
    # Index of dispersion 1; its standard error is sqrt(2/windows).
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=6 * (2 / windows) ** 0.5)
    assert len(at_s) == pytest.approx(5 * windows, abs=6 * (5 * windows) ** 0.5)


@fixed
@given(st.sampled_from([0.05, 1.0, 4.0]), st.integers(1, 3000), SEEDS)
def test_count_and_duration_cut_the_same_process(shape: float, count: int, seed: int) -> None:
    by_count = arrivals.gamma(50.0, shape, seed=seed, count=count)
    end = float(by_count[-1])
    by_time = arrivals.gamma(50.0, shape, seed=seed, duration_s=end)
    assert by_time.tolist() == by_count[by_count < end].tolist()


@fixed
@given(RATES, st.integers(1, 2000))
def test_constant_arrivals_are_evenly_spaced_from_the_start(rate: float, count: int) -> None:
    at_s = arrivals.constant(rate, count=count)
    assert at_s.tolist() == [i / rate for i in range(count)]
    within = arrivals.constant(rate, duration_s=count / rate)
    assert len(within) in (count, count + 1)
    assert (within < count / rate).all()


def test_a_burst_is_all_at_once() -> None:
    load = LoadPoint(mode="open", arrival="burst", num_requests=5)
    assert offsets(load, seed=1).tolist() == [0.0] * 5


RATE = st.one_of(st.just(0.0), st.floats(1.0, 100.0))


@fixed
@given(st.lists(st.tuples(st.floats(10.0, 100.0), RATE, RATE), min_size=1, max_size=5), SEEDS)
def test_a_schedule_has_its_rate_in_every_segment(
    segments: list[tuple[float, float, float]], seed: int
) -> None:
    at_s = arrivals.scheduled(segments, seed=seed)
    assert (np.diff(at_s) >= 0).all()
    begin = 0.0
    for seconds, first, last in segments:
        for low, high in ((0.0, 0.5), (0.5, 1.0)):  # in each half: a ramp is one
            rate = [first + (last - first) * part for part in (low, high)]
            expected = seconds * (high - low) * sum(rate) / 2
            inside = (at_s >= begin + low * seconds) & (at_s < begin + high * seconds)
            # The tail of a small Poisson count is longer than a normal's: one more for it.
            assert abs(inside.sum() - expected) <= 6.5 * expected**0.5 + (10 if expected else 0)
        begin += seconds
    assert not len(at_s) or at_s[-1] <= begin


def test_a_schedule_is_inverted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    # The expected arrivals up to t: 2t (to 10 s), then nothing (to 15 s), then a ramp 0 -> 4 over
    # 20 s: t*t/10; then 4 -> 0 over 10 s: 4t - t*t/5.
    segments = [(10.0, 2.0, 2.0), (5.0, 0.0, 0.0), (20.0, 0.0, 4.0), (10.0, 4.0, 0.0)]
    mass = np.array([1.0, 19.0, 20.0, 30.0, 59.999, 75.0])
    monkeypatch.setattr(arrivals, "poisson", lambda *args, **kwargs: mass)
    wanted = [
        0.5,
        9.5,
        15.0,
        15 + (10 * 10) ** 0.5,
        15 + (39.999 * 10) ** 0.5,
        45 - (5 * 5) ** 0.5,  # 5 are left of the last ramp's 20
    ]
    assert arrivals.scheduled(segments, seed=0) == pytest.approx(wanted)


def test_a_schedule_and_a_trace_are_cut_by_count_and_duration(tmp_path: Path) -> None:
    schedule = ((100.0, 10.0, 10.0),)
    whole = LoadPoint(mode="open", arrival="schedule", schedule=schedule)
    every = offsets(whole, seed=4)
    first = LoadPoint(mode="open", arrival="schedule", schedule=schedule, num_requests=7)
    assert offsets(first, seed=4).tolist() == every[:7].tolist()
    begun = LoadPoint(mode="open", arrival="schedule", schedule=schedule, duration_s=20.0)
    assert offsets(begun, seed=4).tolist() == every[every < 20.0].tolist()
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 5.0}\n{"timestamp": 5.25}\n{"timestamp": 7.5}\n')
    for limits, wanted in (({}, [0.0, 0.5, 5.0]), ({"num_requests": 2}, [0.0, 0.5])):
        load = LoadPoint(mode="open", arrival="trace", trace=str(path), time_scale=2.0, **limits)
        assert offsets(load, seed=0).tolist() == wanted


def test_a_load_ended_by_tokens_has_arrivals_enough() -> None:
    load = LoadPoint(mode="open", request_rate=1000.0, num_output_tokens=10)
    assert len(offsets(load, seed=0)) == arrivals.MOST_ARRIVALS


@fixed
@given(st.floats(0.01, 100), SEEDS)
def test_think_times(mean_s: float, seed: int) -> None:
    drawn = np.array(arrivals.think_times("exponential", mean_s, seed=seed, count=20_000))
    assert drawn.mean() == pytest.approx(mean_s, abs=6 * mean_s / 20_000**0.5)
    assert drawn.std() == pytest.approx(mean_s, abs=0.1 * mean_s)
    assert drawn.tolist() == arrivals.think_times("exponential", mean_s, seed=seed, count=20_000)
    assert arrivals.think_times(None, mean_s, seed=seed) == [mean_s]
    assert arrivals.think_times("constant", None, seed=seed) == [0.0]
