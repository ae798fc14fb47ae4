"""Order effects, drift, autocorrelation, outliers, short warm-up: told, never left out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest
from harness_records import cell, run_of, scaled

from harness.analyse.data import CellData, RunData
from harness.analyse.drift import drift_cautions
from harness.analyse.summary import summarise
from harness.measure.metrics import cell_metrics
from harness.measure.table import RequestTable
from harness.records import RequestRecord, Variant


def planted(
    starts: int, log: Callable[[int, bool, int], float], *, noise: float = 0.005, seed: int = 1
) -> RunData:
    """ABBA starts whose duration's logarithm is `log(place, second of its pair, repeat)`."""
    random_ = random.Random(seed)
    cells: list[CellData] = []
    for repeat in range(starts):
        order: list[Variant] = ["baseline", "speculative"]
        if repeat % 2:
            order.reverse()
        for variant in order:
            second = variant == order[1]
            slow = log(len(cells), second, repeat) + random_.gauss(0, noise)
            cells.append(cell(variant, repeat, scaled(math.exp(slow), n=20)))
    return run_of(cells)


def told(run: RunData) -> dict[str, str]:
    metrics = {c.cell.cell_id: cell_metrics(c.records, c.window()) for c in run.cells}
    return {c.code: c.text for c in drift_cautions(run, "reference", metrics)}


def test_what_comes_second_and_is_slower_is_told_with_what_is_left_of_it() -> None:
    found = told(planted(6, lambda place, second, repeat: 0.05 * second))
    assert set(found) == {"order_effect"}
    assert "has -4." in found["order_effect"] or "has -5." in found["order_effect"]
    assert "leaves +0.0% of it" in found["order_effect"]
    odd = told(planted(5, lambda place, second, repeat: 0.05 * second, noise=0.001))
    assert "leaves -1.0% of it" in odd["order_effect"]


def test_a_drift_is_told_with_its_size() -> None:
    found = told(planted(5, lambda place, second, repeat: -0.02 * place, noise=0.01))
    assert "drift" in found
    assert "drifted by +1" in found["drift"] or "drifted by +2" in found["drift"]


def test_a_block_far_from_the_others_is_told_and_still_counted() -> None:
    run = planted(6, lambda place, second, repeat: 0.3 * (place == 4))
    found = told(run)
    assert "1 of 12 blocks" in found["outlier_block"]
    assert "reference-baseline-r2-b0" in found["outlier_block"]
    speed = next(c for c in summarise(run).comparisons if c.metric == "output_tokens_per_s")
    assert speed.pairs == 6


def test_neighbours_that_are_alike_are_told() -> None:
    found = told(planted(16, lambda place, second, repeat: 0.05 * math.sin(place / 3), noise=0.005))
    assert "autocorrelated" in found


def test_first_requests_that_are_slower_are_told() -> None:
    run = planted(4, lambda place, second, repeat: 0.0)

    def cold(r: RequestRecord) -> RequestRecord:
        if r.index >= 3:
            return r
        first, *rest = r.chunk_ns
        return msgspec.structs.replace(
            r, chunk_ns=(first, *(first + 2 * (t - first) for t in rest))
        )

    cells = [
        msgspec.structs.replace(c, records=RequestTable.of([cold(r) for r in c.records]))
        for c in run.cells
    ]
    found = told(msgspec.structs.replace(run, cells=cells))
    assert "warm_up_short" in found
    assert told(run) == {}


@pytest.mark.parametrize("starts", [2, 3, 4, 6, 10])
def test_plain_noise_is_seldom_told(starts: int) -> None:
    rounds = 60
    runs = [
        planted(starts, lambda place, second, repeat: 0.0, noise=0.03, seed=seed)
        for seed in range(rounds)
    ]
    told_of = sum(bool(told(run)) for run in runs)
    assert told_of <= 6  # four checks at 1%: beyond 6 of 60 once in 50,000
