"""How many starts and how long, before a run begins; and what it cannot show."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from harness_records import counters, scaled, timeline

from harness import run
from harness.measure.store import RunFolder, to_json, write_atomic
from harness.pace import announced, words_of
from harness.plan.schema import CompareSection, Plan
from harness.prepare import Prepared, Request
from harness.records import LaunchRecord


def earlier_run(prepared: Prepared, out: Path, *, ready_s: float, cell_s: float) -> RunFolder:
    folder = run.begin(Request(out=out), [prepared])
    for cell in prepared.cells:
        launch = folder.new_launch(f"{cell.variant}-r{cell.repeat}")
        record = LaunchRecord(
            name=launch.name,
            engine=cell.engine,
            variant=cell.variant,
            repeat=cell.repeat,
            argv=(),
            phases=(),
            ready_s=ready_s,
        )
        write_atomic(launch / "launch.json", to_json(record))
        end = timeline(window_start_ns=0, window_end_ns=int(cell_s * 1e9))
        folder.save_cell(cell.cell_id, scaled(1.0), counters(), end, None)
    return folder


def ready(launches: int = 3, *, attached: bool = False, **fields: object) -> Prepared:
    from engines.catalog import adapter
    from harness.plan.expand import expand
    from harness.records import VARIANTS

    plan = Plan(compare=CompareSection(launches=launches, **fields))  # type: ignore[arg-type]
    return Prepared(
        name="reference",
        adapter=adapter("reference"),
        plan=plan,
        why="as asked",
        target=Path("/m/target"),
        drafter=None,
        urls=dict.fromkeys(VARIANTS, "http://x") if attached else {},
        prompts=[],
        cells=expand(plan, "reference", VARIANTS, attached=attached),
    )


def test_without_an_earlier_run_the_time_is_not_known(tmp_path: Path) -> None:
    first, second = announced(ready(), tmp_path)
    assert first.startswith("reference: as asked; target /m/target, no drafter; 6 starts, ")
    assert first.endswith(": 6 cells")
    assert "is not known" in second


def test_an_earlier_run_tells_the_time(tmp_path: Path) -> None:
    earlier_run(ready(2), tmp_path, ready_s=1500, cell_s=300)
    _, told = announced(ready(), tmp_path)
    assert told == (
        "reference: about 3.0 h in all, 2.5 h of it for coming up, judging by one earlier run"
    )
    other = msgspec.structs.replace(ready(), target=Path("/m/other"))
    assert "is not known" in announced(other, tmp_path)[1]


def test_other_loads_leave_the_cells_time_unknown(tmp_path: Path) -> None:
    folder = earlier_run(ready(2), tmp_path, ready_s=20, cell_s=300)
    for cell in folder.manifest().cells:
        (folder.cell(cell.cell_id) / "timeline.json").unlink()
    _, told = announced(ready(), tmp_path)
    assert "coming up takes about 2 min in all" in told
    assert "how long the cells take is not known" in told


def test_a_broken_earlier_run_is_none(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.json").write_text("{")
    assert "is not known" in announced(ready(), tmp_path)[1]


def test_one_start_of_each_is_said_to_be_undecided_at_best(tmp_path: Path) -> None:
    assert "`undecided` at best" in announced(ready(1), tmp_path)[-1]
    assert "two starts of each" in announced(ready(2), tmp_path)[-1]
    assert len(announced(ready(3), tmp_path)) == 2
    alone = ready(1)
    alone = msgspec.structs.replace(alone, cells=alone.cells[:1])
    assert len(announced(alone, tmp_path)) == 2  # one variant: nothing is compared


def test_repeats_of_running_servers_need_no_time_to_come_up(tmp_path: Path) -> None:
    first, second = announced(ready(1, attached=True, blocks=4), tmp_path)
    assert "each measured 4 times" in first
    assert first.endswith(": 8 cells")
    assert "how long the cells take is not known" in second


def test_a_precision_says_how_many_it_may_become(tmp_path: Path) -> None:
    first, *_ = announced(ready(precision=0.03, max_launches=12), tmp_path)
    assert "6 starts, " in first
    assert "more until the precision is reached, up to 12 starts of each variant" in first


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (89, "89 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_lengths_of_time(seconds: float, said: str) -> None:
    assert words_of(seconds) == said
