"""Starts are added until the ratio is known well enough, or a limit ends it; and gone on with."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from harness_records import counters, scaled, timeline

from engines.catalog import adapter
from harness import run
from harness.errors import UsageError
from harness.findings import Summary
from harness.load.prompts.datasets import load_prompts
from harness.measure.store import RunFolder
from harness.options import parse_precision
from harness.plan.expand import expand
from harness.plan.schema import CompareSection, Plan, WorkloadSection
from harness.precision import by_engine, check_precision, grown
from harness.prepare import Prepared, Request
from harness.progress import PlainProgress
from harness.records import VARIANTS, Cell, Variant


def prepared(
    compare: CompareSection, *, variants: tuple[Variant, ...] = VARIANTS, name: str = "reference"
) -> Prepared:
    plan = Plan(compare=compare)
    return Prepared(
        name=name,
        adapter=adapter("reference"),
        plan=plan,
        why="",
        target=None,
        drafter=None,
        urls={},
        prompts=load_prompts(WorkloadSection()),
        cells=expand(plan, name, variants, attached=False),
    )


def measured(
    engines: list[Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, noise: float
) -> tuple[RunFolder, Summary]:
    """The run with a simulated engine: twice as fast with speculation, but for the noise."""

    def launch(_: Prepared, cells: list[Cell], folder: RunFolder, __: object) -> None:
        for cell in cells:
            random_ = random.Random(cell.cell_id)
            factor = 0.5 if cell.variant == "speculative" else 1.0
            records = scaled(factor * math.exp(random_.gauss(0, noise)))
            folder.save_cell(cell.cell_id, records, counters(), timeline(), None)

    monkeypatch.setattr(run, "measure_launch", launch)
    folder = run.begin(Request(out=tmp_path), engines)
    return folder, run.measure(engines, folder, PlainProgress()).summary


def starts(folder: RunFolder, engine: str = "reference") -> int:
    return len({c.repeat for c in folder.manifest().cells if c.engine == engine})


def test_quiet_runs_stop_at_once_and_noisy_ones_go_on_until_they_are_precise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = CompareSection(launches=1, precision=0.03)
    quiet, _ = measured([prepared(compare)], tmp_path, monkeypatch, noise=0.0005)
    assert starts(quiet) == 3
    noisy, summary = measured([prepared(compare)], tmp_path, monkeypatch, noise=0.015)
    assert 3 < starts(noisy) < 20
    speed = summary.comparisons[0]
    assert speed.ci_low is not None
    assert speed.ci_high is not None
    assert math.sqrt(speed.ci_high / speed.ci_low) - 1 <= 0.03
    assert speed.pairs == starts(noisy)
    assert speed.confidence == 0.979
    assert "stopped by its width" in speed.method
    assert "precision_not_reached" not in {c.code for c in summary.cautions}


def test_the_most_launches_end_it_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = CompareSection(precision=0.03, max_launches=5)
    folder, summary = measured([prepared(compare)], tmp_path, monkeypatch, noise=0.3)
    assert starts(folder) == 5
    (caution,) = [c for c in summary.cautions if c.code == "precision_not_reached"]
    assert "3.0% to either side were wanted" in caution.text


def test_the_time_limit_ends_it_before_a_start_that_would_pass_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.precision._turn_s", lambda *_: 100.0)
    compare = CompareSection(precision=0.03, time_limit_s=99.0)
    folder, _ = measured([prepared(compare)], tmp_path, monkeypatch, noise=0.3)
    assert starts(folder) == 3


def test_each_engine_grows_for_itself_and_a_resumed_run_knows_its_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = CompareSection(precision=0.03, max_launches=6)
    engines = [prepared(compare), prepared(compare, name="vllm")]
    folder, _ = measured(engines, tmp_path, monkeypatch, noise=0.02)
    manifest = folder.manifest()
    assert starts(folder) > 3
    assert len({c.cell_id for c in manifest.cells}) == len(manifest.cells)
    again = [grown(prepared(compare), manifest), grown(prepared(compare, name="vllm"), manifest)]
    assert [c for p in again for c in p.cells] == by_engine(manifest.cells, again)
    alone = expand(again[0].plan, "reference", VARIANTS, attached=False)
    assert again[0].cells[: len(alone)] == alone  # what more launches add comes after it


def test_without_a_precision_nothing_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, summary = measured([prepared(CompareSection())], tmp_path, monkeypatch, noise=0.3)
    assert starts(folder) == 3
    assert summary.comparisons[0].confidence == 0.95


def test_what_cannot_be_is_said_before_anything_is_measured() -> None:
    with pytest.raises(UsageError, match="both variants"):
        check_precision(prepared(CompareSection(precision=0.03), variants=("baseline",)))
    with pytest.raises(UsageError, match=r"max_launches=4: fewer than compare\.launches, 5"):
        check_precision(prepared(CompareSection(precision=0.03, launches=5, max_launches=4)))


def test_a_precision_is_a_share_or_a_percentage() -> None:
    assert parse_precision(None) == []
    assert parse_precision("3%") == ["compare.precision=0.03"]
    assert parse_precision("0.015") == ["compare.precision=0.015"]


@pytest.mark.parametrize("text", ["", "3", "0", "nan", "-3%", "3%x", "100%", "three"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--precision"):
        parse_precision(text)


def test_turns_of_running_servers_begin_with_what_the_plan_says() -> None:
    for launches, blocks, turns in ((1, 4, 4), (1, 2, 4), (2, 2, 4), (1, 1, 3)):
        plan = Plan(compare=CompareSection(launches=launches, blocks=blocks, precision=0.03))
        cells = expand(plan, "openai", VARIANTS, attached=True)
        assert len({c.repeat for c in cells}) == turns
        assert {c.block for c in cells} == {0}
