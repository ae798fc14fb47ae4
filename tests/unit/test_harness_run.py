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
from harness.errors import UsageError
from harness.load.prompts.datasets import load_prompts
from harness.measure.store import RunFolder
from harness.plan.expand import expand
from harness.plan.schema import Plan, WorkloadSection
from harness.prepare import Prepared
from harness.progress import PlainProgress


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

    monkeypatch.setattr(run, "serving", serving)
    folder, ready = RunFolder(tmp_path), prepared()
    with pytest.raises(type(error)):
        run.measure_launch(ready, ready.cells[:1], folder, PlainProgress())
    (record,) = run.read_launches(folder)
    assert record.failure == told
