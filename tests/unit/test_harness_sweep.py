"""A sweep's starts without an engine: order, failures, and baselines under several names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness_records import counters, request, timeline

from engines.base import EngineFailed, Launch, ServeSpec
from harness import sweep
from harness.analyse.sweep import Sweep
from harness.errors import UsageError
from harness.measure.store import RunFolder, to_json
from harness.plan.expand import expand
from harness.plan.schema import (
    CompareSection,
    EngineSection,
    Plan,
    SamplingSection,
    SpeculativeSection,
)
from harness.prepare import Prepared, Request
from harness.progress import PlainProgress
from harness.records import VARIANTS, Cell, Setting
from harness.report.sweep import write_report


class Adapter:
    """Says how it would serve the baseline; the drafter's kernels decide one word of it."""

    name = "reference"

    def launch(self, spec: ServeSpec, workdir: Path) -> Launch:
        kernels = spec.pair_drafter.name if spec.pair_drafter else "none"
        return Launch(argv=("serve", str(spec.k), str(spec.port), kernels), env={})


def prepared(plan: Plan, drafter: str = "d") -> Prepared:
    adapter: Any = Adapter()
    return Prepared(
        name="reference",
        adapter=adapter,
        plan=plan,
        why="",
        target=Path("/t"),
        drafter=Path(drafter),
        urls={},
        prompts=[],
        cells=expand(plan, "reference", VARIANTS, attached=False),
    )


def plan_of(k: int = 3, temperature: float = 0.0, launches: int = 2) -> Plan:
    return Plan(
        engine=EngineSection(max_model_len=64),
        speculative=SpeculativeSection(k=k),
        sampling=SamplingSection(temperature=temperature),
        compare=CompareSection(launches=launches),
    )


def part(name: str, baseline: str, k: int) -> sweep.Part:
    setting = Setting(name=name, choice=(), condition=(), run=f"runs/{name}", baseline=baseline)
    return sweep.Part(setting=setting, request=Request(), prepared=[prepared(plan_of(k))])


def test_baselines_are_shared_where_the_plan_and_the_command_are_the_same() -> None:
    key = sweep.baseline_key([prepared(plan_of(k=1))])
    assert sweep.baseline_key([prepared(plan_of(k=5))]) == key
    forced = SpeculativeSection(k=3, forced_length=2.0)
    other = msgspec.structs.replace(plan_of(), speculative=forced)
    assert sweep.baseline_key([prepared(other)]) == key
    assert sweep.baseline_key([prepared(plan_of(temperature=0.7))]) != key
    assert sweep.baseline_key([prepared(plan_of(launches=3))]) != key
    # Another drafter has the engine serve the baseline by other kernels.
    assert sweep.baseline_key([prepared(plan_of(), "llama")]) != key


def starts(
    parts: list[sweep.Part], failing: set[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[list[str], int]:
    """The starts made, as run folder and cell's variant and repeat; how many failed."""
    made: list[str] = []

    def measure(p: Prepared, cells: list[Cell], run: RunFolder, progress: Any) -> None:
        sign = "-" if cells[0].variant == "baseline" else "+"
        made.append(f"{cells[0].repeat}{sign}{run.path.name}")
        if made[-1] in failing:
            raise EngineFailed("it died")

    monkeypatch.setattr(sweep, "measure_launch", measure)
    errors = sweep._measure_engine(folder, parts, 0, PlainProgress())
    return made, len(errors)


def test_a_setting_that_fails_ends_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = [part("a", "a", 1), part("b", "a", 2)]
    made, errors = starts(parts, {"0+a"}, monkeypatch, tmp_path)
    assert (made, errors) == (["0-a", "0+a", "0+b", "1+b", "1-a"], 1)


def test_without_its_baseline_no_setting_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = [part("a", "a", 1), part("b", "a", 2), part("c", "c", 3)]
    made, errors = starts(parts, {"0-a"}, monkeypatch, tmp_path)
    assert (made, errors) == (["0-a", "0-c", "0+c", "1+c", "1-c"], 1)


def save(run: RunFolder, cell_id: str, text: str, **changes: Any) -> None:
    run.save_cell(cell_id, [request(text=text)], counters(), timeline(**changes), None)


def test_a_baseline_is_linked_once_and_again_after_it_was_cut_short(tmp_path: Path) -> None:
    parts = [part("a", "a", 1), part("b", "a", 2)]
    source, target = (RunFolder(tmp_path / p.setting.run) for p in parts)
    cell = next(c.cell_id for c in sweep._cells(parts[0]) if c.variant == "baseline")
    save(source, cell, "cut", interrupted="a signal")
    sweep._share(tmp_path, parts)
    assert not target.has_cell(cell)
    assert target.requests(cell)[0].text == "cut"
    save(source, cell, "whole")
    for _ in range(2):
        sweep._share(tmp_path, parts)
        assert target.requests(cell)[0].text == "whole"
    files = [run.cell(cell) / "requests.parquet" for run in (source, target)]
    assert files[0].samefile(files[1])
    assert [p.name for p in (target.path / "cells").iterdir()] == [cell]


def test_a_setting_lacks_what_neither_it_nor_its_shared_baseline_has(tmp_path: Path) -> None:
    parts = [part("a", "a", 1), part("b", "a", 3)]

    def lacking() -> list[str]:
        return [p.setting.name for p in parts if sweep._lacks(tmp_path, p, parts)]

    def measure(name: str, variant: str) -> None:
        for c in sweep._cells(parts[0]):
            if c.variant == variant:
                save(RunFolder(tmp_path / "runs" / name), c.cell_id, "whole")

    assert lacking() == ["a", "b"]
    measure("a", "speculative")
    measure("b", "speculative")
    assert lacking() == ["a", "b"]
    measure("a", "baseline")
    assert lacking() == []


def test_a_sweep_of_another_major_version_is_refused(tmp_path: Path) -> None:
    told = Sweep(schema_version="1.0", sweep_id="s", request={}, axes=(), settings=())
    (tmp_path / sweep.SWEEP).write_bytes(to_json(told))
    assert sweep.read_sweep(tmp_path) == told
    (tmp_path / sweep.SWEEP).write_bytes(
        to_json(msgspec.structs.replace(told, schema_version="7.0"))
    )
    with pytest.raises(UsageError, match=r"schema 7\.0"):
        sweep.read_sweep(tmp_path)


def test_a_sweeps_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    told = Sweep(schema_version="1.2", sweep_id="s", request={}, axes=(), settings=())
    (tmp_path / sweep.SWEEP).write_bytes(to_json(told))
    (tmp_path / "report.html" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError):
        write_report(tmp_path)
    assert not list(tmp_path.glob("*.part"))
