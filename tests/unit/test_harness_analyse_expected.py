"""Acceptance far from what was published of the drafter gets a caution, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
from harness_records import cell, run_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_harness_acceptance import made_of

from harness.analyse.data import RunData
from harness.analyse.expected import band_of, expected_caution
from harness.analyse.summary import summarise
from harness.findings import Caution
from harness.plan.load import build, read_profile
from harness.plan.schema import Plan, as_dict

SETS = ["target.path=/m/target", "drafter.path=/m/drafter"]


def plan_of(dataset: str = "gsm8k", profile: str = "kimi-k2.5-h200-mla", *more: str) -> Plan:
    sets = SETS if profile.startswith("kimi") else []
    return build(read_profile(profile), "vllm", [*sets, f"workload.dataset={dataset}", *more])


def run(plan: Plan, accepted: list[int], n: int = 20) -> RunData:
    """`n` answers whose verify steps accepted so many draft tokens."""
    records = [made_of(accepted, index=i) for i in range(n)]
    return run_of([cell("speculative", 0, records)], plan=plan)


def found(plan: Plan, accepted: list[int], n: int = 20) -> Caution | None:
    return expected_caution(run(plan, accepted, n), "reference")


FIFTEEN_PERCENT = [0, 1, 0, 1, 0, 1, 0, 0, 1, 0]  # 1.4 tokens a step
AS_PUBLISHED = [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
ALL = [3] * 10


def test_the_acceptance_this_project_began_with() -> None:
    caution = found(plan_of(), FIFTEEN_PERCENT)
    assert caution is not None and caution.code == "acceptance_unexpected"
    assert "1.40 tokens a verify step on gsm8k (k = 3), where 2.56 to 3.47" in caution.text
    assert "lightseekorg/kimi-k2.5-eagle3-mla: 3.017 on gsm8k (model card of" in caution.text
    assert "aux layers" in caution.advice
    assert "\n" not in caution.text + caution.advice


def test_what_is_near_gets_none() -> None:
    assert found(plan_of(), AS_PUBLISHED) is None


def test_too_good_is_doubted_too() -> None:
    caution = found(plan_of(), ALL)
    assert caution is not None and "repeat themselves" in caution.advice


def test_it_stands_in_the_summary() -> None:
    told = {c.code for c in summarise(run(plan_of(), FIFTEEN_PERCENT)).cautions}
    assert "acceptance_unexpected" in told
    assert "acceptance_unexpected" not in {
        c.code for c in summarise(run(plan_of(), AS_PUBLISHED)).cautions
    }


@pytest.mark.parametrize(
    ("dataset", "length"),
    [
        ("mt-bench", 2.94), ("MT_Bench", 2.94), ("mtbench", 2.94), ("math500", 3.051),
        ("human-eval", 2.969), ("aime-2025", 3.139), ("/data/gsm8k-test.jsonl", 3.017),
    ],
)  # fmt: skip
def test_a_data_set_is_known_by_any_of_its_names(dataset: str, length: float) -> None:
    band = band_of(as_dict(plan_of(dataset)), 3)
    assert band is not None
    assert band.low == pytest.approx(length * 0.85)
    assert band.high == pytest.approx(min(4.0, length * 1.15))


def test_other_prompts_are_held_to_the_whole_range() -> None:
    band = band_of(as_dict(plan_of("builtin")), 3)
    assert band is not None
    assert (band.low, band.high) == (pytest.approx(2.829 * 0.85), pytest.approx(3.139 * 1.15))
    assert "2.829 to 3.139 on mt-bench, ceval" in band.said
    assert found(plan_of("builtin"), FIFTEEN_PERCENT) is not None


def test_another_k_has_figures_of_its_own_or_none() -> None:
    plan = as_dict(plan_of("speed-bench"))
    for k, length in ((1, 1.83), (5, 3.46), (8, 3.77)):
        band = band_of(plan, k)
        assert band is not None and band.low == pytest.approx(max(1.0, length * 0.85))
    assert band_of(plan, 9) is None
    assert band_of(as_dict(plan_of("gsm8k")), 5) is None  # one set's figures are no range


@pytest.mark.parametrize(
    "plan",
    [
        plan_of("gsm8k", "kimi-k2.5-h200-mla", "speculative.forced_length=1.4"),
        plan_of("demo", "demo", "target.path=/m/another"),  # the figures are of the demo pair
        plan_of("builtin", "demo"),  # and of its own prompts
        plan_of("gsm8k", "model"),
        plan_of("gsm8k", "deepseek-r1-h200"),
    ],
)
def test_where_nothing_is_known_nothing_is_said(plan: Plan) -> None:
    assert found(plan, FIFTEEN_PERCENT) is None


def test_the_demo_pair_has_its_own() -> None:
    assert found(plan_of("demo", "demo"), FIFTEEN_PERCENT) is not None
    assert found(plan_of("demo", "demo"), AS_PUBLISHED) is None


def test_few_steps_say_nothing() -> None:
    assert found(plan_of(), FIFTEEN_PERCENT, n=9) is None
    assert found(plan_of(), FIFTEEN_PERCENT, n=10) is not None


def test_baselines_and_runs_of_before_have_none() -> None:
    records = [made_of(FIFTEEN_PERCENT, index=i) for i in range(20)]
    only = run_of([cell("baseline", 0, records)], plan=plan_of())
    assert expected_caution(only, "reference") is None
    old: Any = run(plan_of(), FIFTEEN_PERCENT)
    del old.manifest.plan["engines"]["reference"]["expect"]
    assert expected_caution(old, "reference") is None


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3), min_size=10, max_size=40))
def test_none_is_said_where_the_figure_lies_in_the_band(accepted: list[int]) -> None:
    plan = plan_of()
    band = band_of(as_dict(plan), 3)
    assert band is not None
    length = 1 + sum(accepted) / len(accepted)
    if band.low <= length <= band.high:
        assert found(plan, accepted) is None
    elif not band.low * 0.9 <= length <= band.high * 1.1:
        assert found(plan, accepted) is not None  # answers that are all alike have no spread
