"""Divergences against their floor, near-ties, and what counts as a failure."""

from __future__ import annotations

from math import comb
from typing import Any

import pytest
from harness_records import C1, cell, request, run_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from harness.analyse.data import CellData, RunData
from harness.analyse.integrity import compare_outputs, near_tie_bound
from harness.analyse.lossless import engine_integrity, fisher, floor
from harness.analyse.summary import summarise
from harness.findings import Caution, Summary
from harness.plan.schema import EngineSection, Plan
from harness.records import RequestRecord, Tie, Ties

FLOAT32 = Plan(engine=EngineSection(dtype="float32"))
RIGHT = (1, 2, 3, 4, 5, 6)
WRONG = (1, 2, 9, 4, 5, 6)


def answers(cell_id: str, wrong: set[int] = frozenset(), n: int = 30) -> list[RequestRecord]:  # type: ignore[assignment]
    return [
        request(
            cell_id=cell_id,
            index=i,
            prompt_id=f"p{i}",
            token_ids=WRONG if i in wrong else RIGHT,
        )
        for i in range(n)
    ]


def both(wrong: set[int], *, floor_wrong: set[int] | None = None, n: int = 30) -> list[CellData]:
    """A pair; and a second baseline where the floor is to be known."""
    cells = [
        cell("baseline", 0, answers("reference-baseline-r0-b0", n=n)),
        cell("speculative", 0, answers("reference-speculative-r0-b0", wrong, n=n)),
    ]
    if floor_wrong is not None:
        cells.append(cell("baseline", 1, answers("reference-baseline-r1-b0", floor_wrong, n=n)))
    return cells


def ties(gaps: dict[int, float | None], dtype: str | None) -> list[Ties]:
    told = tuple(
        Tie(
            cell_id="reference-speculative-r0-b0", index=i, prompt_id=f"p{i}", position=2,
            gap=gap, asked="baseline",
        )
        for i, gap in gaps.items()
    )  # fmt: skip
    return [Ties(engine="reference", dtype=dtype, ties=told)]


def told(summary: Summary) -> set[str]:
    return {c.code for c in summary.cautions}


def of(cells: list[CellData], *, plan: Plan = FLOAT32, gaps: Any = None) -> RunData:
    run = run_of(cells, plan=plan)
    if gaps is None:
        return run
    return structs.replace(run, ties=ties(gaps, plan.engine.dtype))


def test_a_gap_within_rounding_is_a_near_tie_and_no_failure() -> None:
    summary = summarise(of(both({3, 4}), gaps={3: 0.001, 4: 0.01}))
    (found,) = summary.integrity
    assert (found.diverged, found.near_tie, found.errors) == (2, 2, 0)
    assert found.broken is None
    assert summary.void is None
    assert {"outputs_diverged"} <= told(summary)
    assert "not_lossless" not in told(summary)
    shown = summary.cells[1].integrity
    assert shown is not None
    assert shown.first_divergence[0]["gap"] == 0.001


def test_one_error_voids_the_run_in_float32() -> None:
    summary = summarise(of(both({3, 4}), gaps={3: 0.001, 4: 0.3}))
    assert summary.void is not None
    assert "output broken" in summary.void
    (caution,) = [c for c in summary.cautions if c.code == "not_lossless"]
    assert isinstance(caution, Caution)
    assert "1 of them no near-tie" in caution.text


@pytest.mark.parametrize(
    ("gap", "floor_wrong", "void"),
    [
        (0.4, set(), False),  # within bfloat16's rounding
        (0.9, set(), False),  # one error may be a router's near-tie
        (2.5, set(), True),  # no rounding does that
        (2.5, None, True),
    ],
)
def test_one_error_in_bfloat16_is_a_failure_if_it_is_gross(
    gap: float, floor_wrong: set[int] | None, void: bool
) -> None:
    plan = Plan(engine=EngineSection(dtype="bfloat16"))
    summary = summarise(of(both({3}, floor_wrong=floor_wrong), plan=plan, gaps={3: gap}))
    assert (summary.void is not None) is void


def test_many_errors_above_the_floor_are_a_failure_in_any_precision() -> None:
    plan = Plan(engine=EngineSection(dtype="bfloat16"))
    wrong = set(range(12))
    gaps = dict.fromkeys(wrong, 0.9)
    above = summarise(of(both(wrong, floor_wrong=set()), plan=plan, gaps=gaps))
    assert above.void is not None
    assert above.integrity[0].p_value is not None
    assert above.integrity[0].p_value < 0.001
    within = summarise(of(both(wrong, floor_wrong=set(range(10, 20))), plan=plan, gaps=gaps))
    assert within.void is None


def test_divergences_nobody_could_be_asked_about() -> None:
    wrong = set(range(12))
    assert summarise(of(both(wrong))).void is None  # no floor is known
    assert summarise(of(both(wrong, floor_wrong=set()))).void is not None
    low = Plan(engine=EngineSection(dtype="bfloat16"))
    assert summarise(of(both(wrong, floor_wrong=set()), plan=low)).void is None
    assert summarise(of(both({1}, floor_wrong=set()))).void is None
    unknown = summarise(of(both({1}), gaps={1: None})).integrity[0]
    assert unknown.near_tie is unknown.errors is None


def test_the_floor_counts_each_prompt_once_by_load() -> None:
    other = structs.replace(C1, concurrency=4)
    cells = [
        cell("baseline", 0, answers("a", n=10)),
        cell("baseline", 1, answers("b", {1}, n=10)),
        cell("baseline", 2, answers("c", {2, 3}, n=10)),
        cell("baseline", 3, answers("d", {4, 5, 6}, n=10), load=other),
    ]
    assert floor(cells, load=True) == (1, 10)
    assert floor(cells, load=False) == (3, 10)
    again = [request(index=i, prompt_id="p0") for i in range(3)]
    assert floor([cell("baseline", 0, again)], load=True) == (0, 0)


def test_what_was_asked_again_is_a_floor() -> None:
    run = of(both({1}))
    again = cell("baseline", 0, answers("floor", {2, 3}))
    found = engine_integrity(structs.replace(run, floor=[again]), "reference", {})
    assert found.compared == 0  # nothing compared, nothing held against it
    summary = summarise(structs.replace(run, floor=[again]))
    assert (summary.integrity[0].floor_compared, summary.integrity[0].floor_diverged) == (30, 2)
    assert len(summary.cells) == 2


def test_a_tie_of_another_place_is_not_taken() -> None:
    base, cand = both({3})
    place = Tie(
        cell_id=cand.cell.cell_id, index=3, prompt_id="p3", position=1, gap=0.0, asked="baseline"
    )
    found = compare_outputs(base, cand, ties={(place.cell_id, 3): place}, dtype="float32")
    assert found.near_tie is None
    right = structs.replace(place, position=2)
    found = compare_outputs(base, cand, ties={(place.cell_id, 3): right}, dtype="float32")
    assert found.near_tie == 1


def test_a_conversation_is_compared_up_to_where_it_parts() -> None:
    def talk(wrong: int) -> list[RequestRecord]:
        return [
            request(
                index=i, turn=i, prompt_id="t", conversation="t",
                token_ids=WRONG if i >= wrong else RIGHT,
            )
            for i in range(4)
        ]  # fmt: skip

    found = compare_outputs(cell("baseline", 0, talk(9)), cell("speculative", 0, talk(1)))
    assert (found.compared, found.identical, found.diverged) == (2, 1, 1)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_fishers_test_is_exact(n: int, floor_n: int, hits: int, floor_hits: int) -> None:
    hits, floor_hits = min(hits, n), min(floor_hits, floor_n)
    total = hits + floor_hits
    exact = sum(
        comb(n, x) * comb(floor_n, total - x) for x in range(hits, min(n, total) + 1)
    ) / comb(n + floor_n, total)
    assert fisher(hits, n, floor_hits, floor_n) == pytest.approx(exact, rel=1e-9)


def test_bounds_widen_with_the_rounding() -> None:
    assert near_tie_bound("float32") < near_tie_bound("float16") < near_tie_bound("bfloat16")
    assert near_tie_bound(None) == near_tie_bound("bfloat16")
