"""Start-ups compared: stages that are the same for all engines, and times that add up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_run import summary, write_run

from harness.records import LaunchRecord, Phase
from harness.report.html import write_report
from harness.report.startup import (
    DRAFTER,
    SPEED,
    TOTAL,
    Start,
    phase_table,
    seconds_by_stage,
    side_by_side,
    size,
    staged,
    starts_of,
)
from harness.report.words import DASH

GB = 10**9


def phases(*named: tuple[str, float], **last: float | int | None) -> tuple[Phase, ...]:
    """Phases one after another, by name and seconds; `last` changes the last one."""
    found, now = [], 0.0
    for name, seconds in named:
        found.append(Phase(phase=name, start_s=now, end_s=now + seconds))
        now += seconds
    return (*found[:-1], msgspec.structs.replace(found[-1], **last))


VLLM = phases(
    ("launch", 12.0), ("configure", 1.0), ("engine_core", 9.0), ("distributed", 0.5),
    ("load_model", 1.5), ("load_weights", 4.0), ("process_weights", 0.5), ("load_drafter", 0.25),
    ("load_weights", 1.0), ("process_weights", 0.25), ("kv_cache", 2.0), ("start_server", 1.0),
)  # fmt: skip
SGLANG = phases(
    ("launch", 10.0), ("start_workers", 5.0), ("distributed", 1.0), ("import_models", 2.0),
    ("load_weights", 8.0), ("weights_loaded", 1.0), ("kv_cache", 1.0), ("load_weights", 2.0),
    ("weights_loaded", 0.5), ("odd_phase", 3.0), ("ready", 0.5),
)  # fmt: skip


def start(engine: str, told: tuple[Phase, ...], **more: object) -> Start:
    values: dict[str, object] = {
        "engine": engine, "variant": "speculative", "repeat": 0, "phases": told, "wall_s": None,
    }  # fmt: skip
    return Start(**{**values, **more})  # type: ignore[arg-type]


def test_what_is_loaded_a_second_time_is_the_drafters() -> None:
    assert seconds_by_stage(start("vllm", VLLM))[DRAFTER] == 1.5
    assert seconds_by_stage(start("vllm", VLLM))["target's weights"] == 4.0
    assert seconds_by_stage(start("sglang", SGLANG))[DRAFTER] == 2.5
    assert seconds_by_stage(start("sglang", SGLANG))["after the weights"] == 1.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["load_weights", "load_drafter", "compile", "cache", "new_phase"]),
            st.floats(0.0, 100.0),
        ),
        min_size=1,
    )
)
def test_the_stages_add_up_to_the_whole(named: list[tuple[str, float]]) -> None:
    told = phases(*named)
    assert sum(seconds_by_stage(start("x", told)).values()) == pytest.approx(
        sum(seconds for _, seconds in named)
    )
    assert [p for _, p in staged(told)] == list(told)


def test_engines_stand_side_by_side_by_stage() -> None:
    loaded = msgspec.structs.replace(VLLM[5], weight_bytes=8 * GB)
    vllm = (*VLLM[:5], loaded, *VLLM[6:])
    again = tuple(msgspec.structs.replace(p, end_s=p.end_s) for p in vllm[:-1])
    again = (*again, msgspec.structs.replace(vllm[-1], end_s=(vllm[-1].end_s or 0.0) + 2.0))
    stuck = (*VLLM[:5], msgspec.structs.replace(VLLM[5], end_s=None))
    columns, rows = side_by_side(
        [
            start("vllm", vllm),
            start("vllm", again, repeat=1),
            start("vllm", stuck, repeat=2),
            start("sglang", SGLANG),
        ]
    )
    assert columns == ("stage", "vllm, speculative (n = 2)", "sglang, speculative (n = 1)")
    table = {row[0]: row[1:] for row in rows}
    assert table["distributed init"] == ("0.50", "1.00")
    assert table["odd_phase"] == (DASH, "3.00")  # known by no stage: told under its own name
    assert table["server"] == (f"2.00 (1.00{DASH}3.00)", "0.50")
    assert table[TOTAL] == (f"34.00 (33.00{DASH}35.00)", "34.00")
    assert table[SPEED] == ("2.00 GB/s", DASH)
    assert "compilation" not in table


@pytest.mark.parametrize(("took", "said"), [(0.00007, DASH), (0.9, DASH), (1.0, "19.0 MB/s")])
def test_a_load_too_short_to_be_timed_has_no_speed(took: float, said: str) -> None:
    (row,) = phase_table(start("x", phases(("load_target", took), weight_bytes=19_000_000)))
    assert row[5] == said


def test_a_start_that_never_came_up_is_told_as_such() -> None:
    stuck = start("vllm", phases(("launch", 3.0), ("load_weights", 9.0), end_s=None), wall_s=12.0)
    columns, rows = side_by_side([stuck])
    assert columns[1] == "vllm, speculative (did not come up)"
    assert dict(rows)[TOTAL] == "3.00"
    first, last = phase_table(stuck)
    assert first[:3] == ("launch", "3.00", "25.0%")
    assert last[:3] == ("load_weights", "9.00, not ended", DASH)


def test_what_a_phase_used_is_told_with_units_and_a_dash_where_unknown() -> None:
    told = phases(
        ("load_weights", 20.0),
        weight_bytes=547 * GB,
        progress=(64, 64),
        cpu_s=30.5,
        read_bytes=547 * GB,
        network_bytes=2_500_000,
        rss_bytes=1_250_000_000,
    )
    (row,) = phase_table(start("vllm", told))
    assert row == (
        *("load_weights", "20.00", "100.0%", "30.50", "547 GB", "27.4 GB/s"),
        *("2.50 MB", "1.25 GB", DASH, "64 of 64"),
    )
    assert (size(None), size(0), size(999), size(1000)) == (DASH, "0 B", "999 B", "1.00 kB")


def test_cells_of_one_start_tell_it_once_and_failed_starts_are_not_forgotten() -> None:
    run = summary()
    launch = LaunchRecord(
        name="vllm-baseline-r9",
        engine="vllm",
        variant="baseline",
        repeat=9,
        argv=(),
        phases=VLLM[:3],
        ready_s=None,
    )
    every = starts_of(run, (), [launch, launch])
    keys = [(s.engine, s.variant, s.repeat) for s in every]
    assert len(keys) == len(set(keys))
    assert ("vllm", "baseline", 9) in keys


def test_the_pages_have_both_tables(tmp_path: Path) -> None:
    write_run(tmp_path, summary())
    write_report(tmp_path)
    html, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert 'href="#startup"' in html
    assert "Phase by phase" in html
    assert "## Start-up" in text
    assert "in all" in text
