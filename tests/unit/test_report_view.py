"""Pooling of repeats: counts for acceptance and accuracy, means over blocks for speed."""

from __future__ import annotations

import math

import pytest
import report_run as made
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from harness.findings import Caution, Integrity
from harness.report import view
from harness.report.pooled import pool_acceptance

COUNTS = st.lists(
    st.tuples(st.integers(1, 5000), st.lists(st.integers(0, 100), min_size=3, max_size=3)).map(
        lambda t: (t[0], tuple(sorted((t[0] * c // 100 for c in t[1]), reverse=True)))
    ),
    min_size=1,
    max_size=5,
)


@given(COUNTS)
def test_acceptance_is_pooled_by_counts(cells: list[tuple[int, tuple[int, ...]]]) -> None:
    pooled = pool_acceptance([made.acceptance(c, d) for d, c in cells])
    assert pooled is not None
    drafts = sum(d for d, _ in cells)
    accepted = sum(sum(c) for _, c in cells)
    assert (pooled.drafts, pooled.accepted, pooled.drafted) == (drafts, accepted, 3 * drafts)
    assert pooled.rate == pytest.approx(accepted / (3 * drafts))
    assert pooled.length == pytest.approx(1 + accepted / drafts)
    assert pooled.length == pytest.approx(1 + sum(pooled.per_position))
    product = 1.0
    for p, c in zip(pooled.per_position, pooled.conditional, strict=True):
        if c is None:
            assert product == 0.0
            break
        product *= c
        assert product == pytest.approx(p)


def test_positions_unknown_in_one_cell_are_unknown_in_the_pool() -> None:
    whole = made.acceptance()
    blind = structs.replace(whole, per_position=None, sources={"counters": None})
    pooled = pool_acceptance([whole, blind])
    assert pooled is not None
    assert pooled.per_position == ()
    assert pooled.drafts == 2000


def test_a_short_source_does_not_stand_for_the_cell() -> None:
    whole = made.acceptance()
    part = whole.sources["counters"]
    assert part is not None
    fewer = structs.replace(part, drafts=10, per_position=(1, 0, 0))
    pooled = pool_acceptance([structs.replace(whole, sources={"counters": fewer})])
    assert pooled is not None
    assert pooled.per_position == pytest.approx((0.78, 0.48, 0.38))


def test_no_drafts_is_no_acceptance() -> None:
    assert pool_acceptance([]) is None
    none = structs.replace(made.acceptance(), drafts=0, accepted=0, drafted=0)
    assert pool_acceptance([none]) is None


def test_groups_follow_engine_and_load() -> None:
    cells = tuple(
        made.cell(v, r, engine=e, load=load)
        for e in ("vllm", "reference")
        for load in (made.C1, made.C4)
        for r in (0, 1)
        for v in ("baseline", "speculative")
    )
    groups = view.groups(made.summary(cells=cells, comparisons=()))
    assert [g.name for g in groups] == [
        "vllm, concurrency 1",
        "vllm, concurrency 4",
        "reference, concurrency 1",
        "reference, concurrency 4",
    ]
    assert all(len(g.cells) == 4 for g in groups)


def test_speed_is_the_mean_over_blocks_that_have_it() -> None:
    cells = (
        made.cell("baseline", 0, figures=made.metrics(40.0)),
        made.cell("baseline", 1, figures=made.metrics(60.0)),
        made.cell("baseline", 2, figures=made.metrics(math.nan)),
        made.cell("baseline", 3, figures=made.metrics(None)),
    )
    (group,) = view.groups(made.summary(cells=cells, comparisons=()))
    row = group.row("output_tokens_per_s")
    assert row is not None
    assert row.baseline == 50.0
    assert row.speculative is None and row.verdict is None


def test_a_comparison_gives_the_values_that_belong_to_its_ratio() -> None:
    told = made.summary(
        comparisons=(made.comparison("ttft_s", 1.5, 1.2, 1.8, "worse", baseline=0.1),)
    )
    (group,) = view.groups(told)
    row = group.row("ttft_s")
    assert row is not None
    assert (row.baseline, row.ratio, row.verdict) == (0.1, 1.5, "worse")
    assert row.speculative == pytest.approx(0.15)


def test_accuracy_and_integrity_are_pooled_by_counts() -> None:
    few = structs.replace(made.metrics(accuracy=0.0), task_n=1)
    cells = (
        made.cell("speculative", 0, figures=made.metrics(accuracy=1.0)),
        made.cell("speculative", 1, figures=few),
        made.cell(
            "speculative", 2, integrity=Integrity(compared=6, identical=4, near_tie=1, diverged=1)
        ),
    )
    (group,) = view.groups(made.summary(cells=cells, comparisons=()))
    assert group.accuracy["speculative"].rate == pytest.approx((24 + 0 + 21) / 49)
    assert group.accuracy["baseline"].rate is None
    assert group.integrity is not None
    assert (group.integrity.compared, group.integrity.identical) == (54, 52)
    assert (group.integrity.near_tie, group.integrity.diverged) == (1, 1)


def test_a_caution_is_told_once_with_its_cells() -> None:
    caution = Caution(code="short", text="few requests", advice="more")
    cells = tuple(made.cell("baseline", r, cautions=(caution,)) for r in (0, 1))
    placed = view.cautions(made.summary(cells=cells))
    assert [p.caution.code for p in placed] == ["few-blocks", "short"]
    assert placed[1].cells == ("reference-baseline-c1-r0", "reference-baseline-c1-r1")


def test_cautions_that_differ_in_figures_alone_are_told_once() -> None:
    cells = tuple(
        made.cell("baseline", r, cautions=(Caution(code="lag", text=f"{r} ms", advice="more"),))
        for r in range(3)
    )
    placed = [p for p in view.cautions(made.summary(cells=cells)) if p.caution.code == "lag"]
    assert [p.caution.text for p in placed] == [
        "reference-baseline-c1-r0: 0 ms; the like in 2 more cells"
    ]
    assert len(placed[0].cells) == 3
