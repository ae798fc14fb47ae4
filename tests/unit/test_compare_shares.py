"""Shares of prompts of runs whose requests are there: answered, right, and as the baseline said."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from compare_runs import cells_of, group, stored
from harness_records import C1, cell, failed, request
from report_run import metrics

from harness.analyse.across.compare import compare_groups
from harness.analyse.across.records import Row, Stored
from harness.analyse.across.rows import Wanted
from harness.analyse.data import CellData, RunData
from harness.records import RequestRecord, Variant

PROMPTS = 200


def records(
    *, wrong: range = range(0), other: range = range(0), lost: range = range(0), n: int = PROMPTS
) -> list[RequestRecord]:
    """Answers to prompts by number: `wrong`, saying something else, or none at all."""
    found = []
    for i in range(n):
        fields: dict[str, Any] = {
            "index": i,
            "prompt_id": f"p{i}",
            "category": "even" if i % 2 == 0 else "odd",
        }
        if i in lost:
            found.append(failed(**fields))
        else:
            said = (9, 9, 9, 9, 9, 9) if i in other else (1, 2, 3, 4, 5, 6)
            found.append(request(**fields, correct=i not in wrong, token_ids=said))
    return found


def run_of(label: str, baseline: list[RequestRecord], spec: list[RequestRecord]) -> Stored:
    """Two starts of each variant that answer alike, and figures that go with them."""
    data: list[CellData] = []
    both: tuple[tuple[Variant, list[RequestRecord]], ...] = (
        ("baseline", baseline),
        ("speculative", spec),
    )
    for variant, answers in both:
        data += [cell(variant, repeat, answers) for repeat in range(2)]
    told = stored(label, cells_of({"baseline": (50.0, 51.0), "speculative": (60.0, 61.0)}, load=C1))
    run = RunData(manifest=told.run.manifest, cells=data, launches=[])
    return Stored(
        label=label, summary=told.summary, run=run, plans=told.plans, argv=dict(told.argv)
    )


def row_of(a: Stored, b: Stored, metric: str, **fields: Any) -> Row:
    (found,) = [
        row
        for row in compare_groups([group(a), group(b)], Wanted()).comparisons[0].rows
        if (row.metric, row.side, row.category) == (metric, "speculative", fields.get("category"))
    ]
    return found


GOOD = run_of("a", records(), records())


def test_right_answers_are_counted_by_prompt_and_not_by_start() -> None:
    told = row_of(GOOD, run_of("b", records(), records(wrong=range(40))), "task_accuracy")
    assert (told.reference, told.candidate, told.units) == (1.0, pytest.approx(0.8), (200, 200))
    assert told.verdict == "worse"
    assert told.paired
    # 40 of 200 tipped over: the usual error of a ratio of paired shares.
    half = math.log(told.ci_high / told.ratio) if told.ci_high and told.ratio else math.nan
    assert half == pytest.approx(1.97 * math.sqrt(40 / (200 * 160)), rel=0.05)


def test_one_wrong_answer_is_no_regression() -> None:
    told = row_of(GOOD, run_of("b", records(), records(wrong=range(8))), "task_accuracy")
    assert told.ratio == pytest.approx(0.96)
    assert told.verdict == "undecided"


def test_answers_that_part_from_the_baseline_are_found() -> None:
    told = row_of(GOOD, run_of("b", records(), records(other=range(60))), "identical")
    assert (told.reference, told.candidate) == (1.0, pytest.approx(0.7))
    assert told.verdict == "worse"


def test_requests_that_were_not_answered_are_found_and_say_nothing_of_the_rest() -> None:
    b = run_of("b", records(), records(lost=range(50)))
    lossy = [
        msgspec.structs.replace(c, metrics=metrics(60.0, failed=6), status="partial")
        for c in b.summary.cells
    ]
    b = msgspec.structs.replace(b, summary=msgspec.structs.replace(b.summary, cells=tuple(lossy)))
    assert row_of(GOOD, b, "output_tokens_per_s").verdict == "undecided"
    answered = row_of(GOOD, b, "answered")
    assert answered.candidate == pytest.approx(0.75)
    assert answered.verdict == "worse"
    right = row_of(GOOD, b, "task_accuracy")
    assert (right.candidate, right.units) == (1.0, (150, 150))
    assert right.note is not None
    assert right.note.startswith("50 prompts that one of them did not answer are left out; more")


def test_blocks_with_other_prompts_do_not_pair() -> None:
    others = [
        request(index=i, prompt_id=f"q{i}", category="even", correct=True) for i in range(PROMPTS)
    ]
    told = row_of(GOOD, run_of("b", others, others), "output_tokens_per_s")
    assert told.unpaired == "the prompts are not the same"
    longer = [
        request(index=i, prompt_id=f"p{i}", prompt_tokens=99, correct=True) for i in range(PROMPTS)
    ]
    told = row_of(GOOD, run_of("b", longer, longer), "output_tokens_per_s")
    assert told.unpaired == "the prompts are not the same"
    assert row_of(GOOD, run_of("b", records(), records()), "output_tokens_per_s").paired


def test_several_runs_answer_together() -> None:
    bad = run_of("b", records(), records(wrong=range(40)))
    across = compare_groups([group(GOOD, bad, label="both"), group(GOOD)], Wanted())
    (told,) = [
        row
        for row in across.comparisons[0].rows
        if (row.metric, row.side, row.category) == ("task_accuracy", "speculative", None)
    ]
    assert (told.reference, told.candidate) == (pytest.approx(0.9), 1.0)
    assert told.units == (200, 200)
