# ruff: noqa: RUF001 (an en dash is what the report shows)
"""The one sentence: it claims what the interval carries and nothing more."""

from __future__ import annotations

import pytest
import report_run as made
from msgspec import structs

from harness.findings import Integrity, Verdict
from harness.report.verdict import standing, verdict_sentence

TAIL = "; 55% of draft tokens accepted; output identical (48 of 48)."


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict", "said"),
    [
        (1.24, 1.15, 1.33, "better", "1.24x (1.15–1.33) the speed of no speculation at"),
        (0.66, 0.6, 0.72, "worse", "only 0.66x (0.60–0.72) the speed of no speculation at"),
    ],
)
def test_better_and_worse(
    ratio: float, low: float, high: float, verdict: Verdict, said: str
) -> None:
    told = made.summary(
        comparisons=(made.comparison("output_tokens_per_s", ratio, low, high, verdict),)
    )
    assert verdict_sentence(told) == f"With this drafter, reference is {said} concurrency 1{TAIL}"
    assert standing(told) == verdict


def test_a_latency_that_got_worse_is_told_beside_the_speed() -> None:
    faster = made.comparison()
    later = made.comparison("ttft_s", 1.51, 1.18, 1.92, "worse", baseline=0.01)
    told = verdict_sentence(made.summary(comparisons=(faster, later)))
    assert told == (
        "With this drafter, reference is 1.24x (1.15–1.33) the speed of no speculation at "
        f"concurrency 1; but worse TTFT 1.51x (1.18–1.92) at concurrency 1{TAIL}"
    )
    slower = made.comparison("output_tokens_per_s", 0.66, 0.6, 0.72, "worse")
    assert "TTFT" not in verdict_sentence(made.summary(comparisons=(slower, later)))
    open_ = structs.replace(later, verdict="undecided")
    assert "TTFT" not in verdict_sentence(made.summary(comparisons=(faster, open_)))


def test_same_and_undecided_claim_no_difference() -> None:
    same = made.comparison("output_tokens_per_s", 1.0, 0.99, 1.01, "same")
    assert verdict_sentence(made.summary(comparisons=(same,))) == (
        "With this drafter, reference is as fast as no speculation at concurrency 1 "
        f"(1.00x, 0.99–1.01){TAIL}"
    )
    open_ = made.comparison("output_tokens_per_s", 1.06, 0.94, 1.2, "undecided")
    assert verdict_sentence(made.summary(comparisons=(open_,))) == (
        "With this drafter, reference is not shown to be faster or slower than no speculation at "
        f"concurrency 1 (1.06x, 0.94–1.20){TAIL}"
    )


def test_two_loads_that_are_undecided_alike_are_said_to_be_so_once() -> None:
    one = made.comparison("output_tokens_per_s", 1.06, 0.94, 1.2, "undecided")
    four = structs.replace(one, load=made.C4)
    told = verdict_sentence(made.summary(comparisons=(one, four)))
    assert told.startswith(
        "With this drafter, reference is not shown to be faster or slower than no speculation at "
        "concurrency 1 (1.06x, 0.94–1.20) or at concurrency 4 (1.06x, 0.94–1.20)"
    )


def test_a_difference_that_the_correction_takes_away_is_told_with_both_intervals() -> None:
    lost = structs.replace(
        made.comparison("output_tokens_per_s", 1.3, 1.03, 1.63, "undecided"),
        family=2, corrected_low=0.93, corrected_high=1.8, corrected_confidence=0.975,
    )  # fmt: skip
    told = verdict_sentence(made.summary(comparisons=(lost,)))
    assert "(1.30x, 1.03–1.63; corrected for 2 comparisons 0.93–1.80)" in told
    kept = structs.replace(lost, corrected_low=1.01, verdict="better")
    assert "corrected" not in verdict_sentence(made.summary(comparisons=(kept,)))


def test_void_withholds_the_verdict() -> None:
    told = made.summary(void="the client was the bottleneck: 98% of a core.")
    assert verdict_sentence(told) == (
        "Void, verdicts withheld: the client was the bottleneck: 98% of a core."
    )
    assert standing(told) == "void"


def test_a_failed_variant_gives_no_verdict_but_what_is_known() -> None:
    told = made.summary(
        cells=(
            made.cell("baseline", figures=made.metrics(50.0)),
            made.cell("speculative", status="failed", metrics=None, acceptance=None),
        ),
        comparisons=(),
        failures=("the engine died while loading the drafter",),
    )
    assert verdict_sentence(told) == (
        "reference: no verdict, 50.0 output tokens/s without speculation at concurrency 1, "
        "nothing measured with it; the engine died while loading the drafter."
    )
    assert standing(told) == "failed"


def test_nothing_measured() -> None:
    told = made.summary(cells=(), comparisons=(), failures=("no free port",))
    assert verdict_sentence(told) == "Nothing was measured: no free port."
    assert standing(told) == "failed"
    alone = made.summary(
        cells=(made.cell("speculative", figures=made.metrics(62.0)),), comparisons=()
    )
    assert "62.0 output tokens/s with speculation" in verdict_sentence(alone)
    assert standing(alone) == "undecided"


def test_two_loads_are_both_told_and_many_are_summed_up() -> None:
    loads = [structs.replace(made.C1, concurrency=c) for c in (1, 2, 4, 8)]
    cells = tuple(made.cell(v, load=ld) for ld in loads for v in ("baseline", "speculative"))
    compared = tuple(made.comparison(ratio=1.4 - 0.1 * i, load=ld) for i, ld in enumerate(loads))
    two = made.summary(cells=cells[:4], comparisons=compared[:2])
    assert (
        "at concurrency 1 and 1.30x (1.15–1.33) the speed of no speculation at concurrency 2; "
        in (verdict_sentence(two))
    )
    four = verdict_sentence(made.summary(cells=cells, comparisons=compared))
    assert "1.40x" in four and "1.10x" in four and "1.30x" not in four
    assert "(4 loads, all in the table)" in four


def test_engines_are_told_one_after_the_other() -> None:
    engines = ("reference", "vllm")
    cells = tuple(made.cell(v, engine=e) for e in engines for v in ("baseline", "speculative"))
    told = made.summary(
        cells=cells,
        comparisons=(
            made.comparison(),
            made.comparison("output_tokens_per_s", 0.8, 0.7, 0.9, "worse", engine="vllm"),
        ),
    )
    sentence = verdict_sentence(told)
    assert sentence.count("With this drafter") == 2
    assert sentence.index("reference is 1.24x") < sentence.index("vllm is only 0.80x")
    assert standing(told) == "mixed"


def test_differing_output_is_said_with_its_near_ties() -> None:
    cells = list(made.summary().cells)
    broken = Integrity(compared=24, identical=20, near_tie=3, diverged=1)
    cells[1] = structs.replace(cells[1], integrity=broken)
    sentence = verdict_sentence(made.summary(cells=tuple(cells)))
    assert "output differs in 4 of 48, 3 of them near ties" in sentence


def test_acceptance_length_stands_in_where_the_rate_is_unknown() -> None:
    cells = [
        structs.replace(c, acceptance=structs.replace(c.acceptance, drafted=None, rate=None))
        if c.acceptance
        else c
        for c in made.summary().cells
    ]
    assert "; 2.64 tokens a verify step; " in verdict_sentence(made.summary(cells=tuple(cells)))
