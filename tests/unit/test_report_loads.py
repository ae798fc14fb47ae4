"""Figures against load, of verify steps and over time: what they draw, and where they draw none."""

from __future__ import annotations

import re

import numpy as np
import pytest
import report_run as made
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from harness.analyse.frontier import gpus_told
from harness.findings import Summary, VariantEstimate
from harness.records import LaunchRecord, LoadPoint
from harness.report import style, view
from harness.report.plot_acceptance import step_shares, tokens_per_step
from harness.report.plot_latency import MOST_CURVE_POINTS, ecdf
from harness.report.plot_loads import effects, load_plots, series_of
from harness.report.samples import LEAST_IN_A_BIN, MOST_BINS, gap_track


def closed(concurrency: int) -> LoadPoint:
    return LoadPoint(mode="closed", concurrency=concurrency, num_requests=8 * concurrency)


def loaded(*loads: LoadPoint, engines: tuple[str, ...] = ("vllm",)) -> Summary:
    """Every engine at every load, with ratios that fall with the load and intervals of figures."""
    cells, comparisons, estimates = [], [], []
    for engine in engines:
        for i, load in enumerate(loads):
            cells += [
                made.cell(v, r, engine=engine, load=load)
                for r in (0, 1)
                for v in ("baseline", "speculative")
            ]
            ratio = 1.4 - 0.2 * i
            comparisons.append(
                made.comparison("output_tokens_per_s", ratio, ratio - 0.1, ratio + 0.1,
                                "better" if i < 2 else "worse", engine=engine, load=load)
            )  # fmt: skip
            estimates.append(
                VariantEstimate(metric="output_tokens_per_s", engine=engine, variant="baseline",
                                load=load, value=50.5, ci_low=45.0, ci_high=56.0, units=2,
                                method="geometric mean over 2 starts")
            )  # fmt: skip
    return made.summary(
        cells=tuple(cells), comparisons=tuple(comparisons), estimates=tuple(estimates)
    )


def plots(told: Summary, gpus: dict[str, int | None] | None = None) -> dict[str, style.Plot]:
    with style.drawing():
        return {p.name: p for p in load_plots(view.groups(told), gpus or {})}


def test_loads_are_joined_in_rising_order_and_by_kind() -> None:
    open_ = [LoadPoint(mode="open", request_rate=r, arrival="poisson") for r in (4.0, 1.0)]
    even = LoadPoint(mode="open", request_rate=2.0, arrival="constant")
    burst = LoadPoint(mode="open", arrival="burst", num_requests=9)
    told = loaded(closed(8), closed(1), *open_, even, burst)
    found = series_of(view.groups(told))
    assert [(one.mode, one.unit, one.at) for one in found] == [
        ("closed", "concurrency", [1, 8]),
        ("open", "requests/s", [1.0, 4.0]),
    ]


def test_a_single_load_has_no_figure_against_load() -> None:
    assert plots(loaded(closed(4))) == {}
    assert set(plots(loaded(closed(4), closed(8)))) == {
        "speedup", "by-load-vllm-closed", "frontier"
    }  # fmt: skip


def test_the_speed_up_stands_beside_break_even() -> None:
    plot = plots(loaded(*map(closed, (1, 4, 16)), engines=("vllm", "sglang")))["speedup"]
    assert "break-even" in plot.svg and ">sglang<" in plot.svg
    assert "vllm: 1.40x (1.30\N{EN DASH}1.50) at 1; 1.20x" in plot.alt
    assert "n = 2 pairs of blocks a load" in plot.svg
    assert "concurrency" in plot.svg


def test_bands_are_drawn_where_there_is_an_interval() -> None:
    told = loaded(*map(closed, (1, 4)))
    with_band = plots(told)["by-load-vllm-closed"]
    without = plots(structs.replace(told, estimates=()))["by-load-vllm-closed"]
    assert with_band.svg.count("FillBetween") == 1 and "FillBetween" not in without.svg
    assert "output tokens/s, baseline: 50.5 at 1" in with_band.alt
    for label in ("output tokens/s", "TTFT, mean, ms", "TPOT, mean, ms", "E2E latency, mean, ms"):
        assert label in with_band.svg


def test_the_frontier_is_of_a_gpu_where_their_number_is_known() -> None:
    told = loaded(*map(closed, (1, 4)))
    whole, each = (plots(told, {"vllm": n})["frontier"] for n in (None, 4))
    assert "tokens/s a server" in whole.svg and "tokens/s a GPU" in each.svg
    per_user = 1 / (0.0201 * 1.05)
    assert f"{per_user:.1f} and 50.5 at 1" in whole.alt
    assert f"{per_user:.1f} and 12.6 at 1" in each.alt


def test_how_many_gpus_serve() -> None:
    launch = LaunchRecord(name="x", engine="vllm", variant="baseline", repeat=0, argv=("vllm",),
                          phases=(), ready_s=None)  # fmt: skip
    cuda = {"engine": {"device": "cuda", "tensor_parallel": 8}}
    assert gpus_told(cuda, [launch], "vllm") == 8
    assert gpus_told(cuda, [], "vllm") is None
    assert gpus_told({"engine": {"device": "cpu", "tensor_parallel": 1}}, [launch], "vllm") is None
    assert gpus_told({}, [launch], "vllm") is None


def test_every_ratio_is_drawn_with_its_verdict() -> None:
    told = loaded(*map(closed, (1, 4, 16)))
    with style.drawing():
        plot = effects(view.groups(told))
        assert effects(view.groups(made.summary(comparisons=()))) is None
    assert plot is not None
    assert "output tokens/s, vllm, concurrency 16: 1.00x (0.90\N{EN DASH}1.10), worse" in plot.alt
    assert ">better<" in plot.svg and ">worse<" in plot.svg and ">same<" not in plot.svg
    assert style.VERDICT["worse"] in plot.svg


def test_a_void_runs_figure_claims_nothing() -> None:
    told = made.summary(void="another model was served")
    with style.drawing():
        plot = effects(view.groups_to_draw(told))
    assert plot is not None and "better" not in plot.alt and "no verdict" in plot.alt
    assert style.VERDICT["undecided"] in plot.svg
    assert ">better<" not in plot.svg and ">undecided<" in plot.svg


def test_an_interval_that_reaches_far_is_cut_at_the_edge() -> None:
    wild = made.comparison("output_tokens_per_s", 3.0, 0.001, 9000.0, "undecided")
    with style.drawing():
        plot = effects(view.groups(made.summary(comparisons=(wild,))))
    assert plot is not None and not re.search(r"[ML] -?\d{5}", plot.svg)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=8), st.integers(0, 200))
def test_shares_of_steps_are_those_of_the_positions(falls: list[int], none: int) -> None:
    counts = np.cumsum(falls[::-1])[::-1].tolist()  # accepted at least to each position
    drafts = counts[0] + none
    if not drafts:
        return
    pooled = view.pool_acceptance([made.acceptance(tuple(counts), drafts)])
    assert pooled is not None
    shares = step_shares(pooled)
    assert sum(shares) == pytest.approx(1)
    mean = sum(n * share for n, share in enumerate(shares, 1))
    assert mean == pytest.approx(pooled.length)
    assert shares[0] == pytest.approx(none / drafts)
    with style.drawing():
        assert tokens_per_step([]) is None


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=4000))
def test_a_thinned_curve_is_exact_to_less_than_a_pixel(values: list[float]) -> None:
    xs, ys = ecdf(np.array(values))
    ordered = np.sort(values)
    assert (xs[0], xs[-1], ys[0], ys[-1]) == (ordered[0], ordered[-1], 0.0, 1.0)
    assert len(xs) <= MOST_CURVE_POINTS + 1
    at = np.concatenate([ordered, ordered + 1e-9])
    drawn = ys[np.searchsorted(xs, at, side="right") - 1]
    true = np.searchsorted(ordered, at, side="right") / len(ordered)
    assert np.abs(drawn - true).max() <= 1 / (MOST_CURVE_POINTS - 1) + 1e-12


def test_gaps_over_time_are_quantiles_of_their_stretch() -> None:
    rng = np.random.default_rng(3)
    at = np.sort(rng.integers(0, 10**10, 40_000))
    gaps = np.where(at < 5e9, 0.010, 0.020) * rng.uniform(0.9, 1.1, len(at))
    order = rng.permutation(len(at))  # requests' gaps do not come in the order of time
    track = gap_track(0, at[order], gaps[order])
    assert track is not None and len(track.seconds) == MOST_BINS and track.n == 40_000
    early = track.seconds < 4.9
    assert track.median_s[early] == pytest.approx(0.010, rel=0.03)
    assert track.median_s[track.seconds > 5.1] == pytest.approx(0.020, rel=0.03)
    assert (track.low_s <= track.median_s).all() and (track.median_s <= track.high_s).all()
    own = gaps[(at >= 0) & (at < 10**10 / MOST_BINS)]
    assert track.high_s[0] == pytest.approx(np.quantile(own, 0.9), rel=0.01)


def test_too_few_gaps_tell_nothing_over_time() -> None:
    few = np.arange(6 * LEAST_IN_A_BIN - 1)
    assert gap_track(0, few, few / 1e3) is None
    at = np.concatenate([np.arange(100), np.arange(800, 901)]) * 10**9  # nothing between
    track = gap_track(0, at, np.full(len(at), 0.01))
    assert track is not None and np.isnan(track.median_s).any()
    assert np.isnan(track.median_s[track.seconds < 60]).sum() == 0
    assert gap_track(None, np.arange(1000), np.ones(1000)) is None
