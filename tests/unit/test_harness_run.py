"""What a start of an engine leaves in its folder, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineFailed, EngineUsageError
from engines.catalog import adapter
from harness import run
from harness.announce import how_often, title_of
from harness.errors import UsageError
from harness.load.prompts.datasets import load_prompts
from harness.measure.store import RunFolder
from harness.plan.expand import expand
from harness.plan.schema import CompareSection, LoadSection, Plan, WorkloadSection
from harness.prepare import Prepared
from harness.progress import PlainProgress
from harness.stored import read_launches


def prepared() -> Prepared:
    plan = Plan()
    return Prepared(
        name="reference",
        adapter=adapter("reference"),
        plan=plan,
        why="",
        target=None,
        drafter=None,
        urls={},
        prompts=load_prompts(WorkloadSection()),
        cells=expand(plan, "reference", ("baseline",), attached=False),
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (EngineUsageError("k = 0: too few"), "k = 0: too few"),
        (EngineFailed("reference died"), "reference died"),
        (UsageError("no such thing"), "no such thing"),
        (RuntimeError("odd\nand long"), "RuntimeError: odd and long"),
        (KeyboardInterrupt(), None),  # the user's own doing is no failure of the engine
    ],
)
def test_a_start_that_fails_says_why_in_its_record(
    error: BaseException, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def serving(*_: Any) -> Iterator[None]:
        raise error
        yield

    monkeypatch.setattr("harness.serving.serving", serving)
    folder, ready = RunFolder(tmp_path), prepared()
    with pytest.raises(type(error)):
        run.measure_launch(ready, ready.cells[:1], folder, PlainProgress())
    (record,) = read_launches(folder)
    assert record.failure == told


@pytest.mark.parametrize(
    ("attached", "told"),
    [
        (False, "6 starts, 2 load points, each measured 6 times with each variant"),
        (True, "2 load points, each measured 6 times with each variant"),
    ],
)
def test_the_first_line_tells_how_often_a_load_point_is_measured(attached: bool, told: str) -> None:
    plan = Plan(load=LoadSection(concurrency=(1, 4)), compare=CompareSection(launches=3, blocks=2))
    cells = expand(plan, "reference", ("baseline", "speculative"), attached=attached)
    keys = "(compare.launches=3, compare.blocks=2)"
    said = how_often(cells, plan.compare, attached=attached)
    assert said == f"{told} {keys}: 24 cells"
    once = how_often(cells[:1], plan.compare, attached=attached)
    assert "1 load point, each measured once (" in once


def test_progress_numbers_repeats_and_blocks_as_the_cells_name_does() -> None:
    plan = Plan(compare=CompareSection(launches=2, blocks=2))
    cells = expand(plan, "reference", ("baseline",), attached=False)
    assert cells[-1].cell_id.endswith("-r1-b1")
    assert title_of(cells[-1], cells, searching=False).endswith("concurrency 1, repeat 1, block 1")
    assert title_of(cells[0], cells, searching=True).endswith("concurrency 1")
