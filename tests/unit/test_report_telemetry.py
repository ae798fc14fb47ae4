"""Telemetry in the report: figures over time, rows beside the others, and what is missing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import report_run

from harness.findings import Gauge, GpuFigures, Telemetry
from harness.measure.hardware import NO_DRIVER
from harness.measure.series import Row, series_of, write_series
from harness.report import view
from harness.report.html import write_report
from harness.report.telemetry import missing_words, telemetry_rows
from harness.report.words import DASH

S = 1_000_000_000


def gauge(mean: float) -> Gauge:
    return Gauge(mean=mean, least=mean, most=mean, n=5)


def telemetry(joules: float | None, **missing: str) -> Telemetry:
    gpu = GpuFigures(
        index="0", name="NVIDIA H200", engine=True, energy_j=100.0, energy_by="counter",
        gauges={"power_w": gauge(612.3), "sm_clock_mhz": gauge(1890.0)}, throttled={},
    )  # fmt: skip
    return Telemetry(
        interval_s=1.0, missing=missing, engine={"waiting": gauge(3.0), "kv_usage": gauge(0.5)},
        preemptions=2, prefix_hit_rate=None, host={}, host_totals={},
        gpus=() if missing else (gpu,), energy_j=joules, energy_of=None,
        joules_per_output_token=joules,
    )  # fmt: skip


def test_rows_are_of_what_was_told() -> None:
    told = report_run.summary()
    joules = {"baseline": 4.0, "speculative": None}
    cells = tuple(
        msgspec.structs.replace(c, telemetry=telemetry(joules[c.variant])) for c in told.cells
    )
    (group,) = view.groups(msgspec.structs.replace(told, cells=cells))
    rows = {label: both for label, *both in telemetry_rows(group)}
    assert rows["J per output token (GPUs)"] == ["4.00", DASH]
    assert rows["GPU power, mean, W"] == ["612", "612"]
    assert rows["preemptions"] == ["2", "2"]
    blocks = [sum(c.variant == v for c in cells) for v in ("baseline", "speculative")]
    assert rows["samples of the engine"] == [str(5 * n) for n in blocks]
    assert rows["KV cache in use, most"] == ["50.0%", "50.0%"]
    assert "prefix cache hits" not in rows


def test_what_was_sampled_once_has_no_most() -> None:
    told = report_run.summary()
    seldom = telemetry(None)
    once = {name: msgspec.structs.replace(g, most=0.0, n=1) for name, g in seldom.engine.items()}
    first = next(c for c in told.cells if c.variant == "speculative")
    cells = [msgspec.structs.replace(c, telemetry=telemetry(None)) for c in told.cells]
    cells = [c for c in cells if c.variant == "baseline"]
    alone = msgspec.structs.replace(first, telemetry=msgspec.structs.replace(seldom, engine=once))
    for speculative, most in (((alone,), DASH), ((alone, alone), "0.0%")):
        shown = msgspec.structs.replace(told, cells=(*cells, *speculative))
        (group,) = view.groups(shown)
        rows = {label: both for label, *both in telemetry_rows(group)}
        assert rows["KV cache in use, most"] == ["50.0%", most]
        assert rows["waiting requests, most"] == ["3", DASH if most == DASH else "0"]
        assert rows["samples of the engine"][1] == str(len(speculative))


def test_a_run_without_telemetry_has_no_row_and_no_sentence() -> None:
    told = report_run.summary()
    (group,) = view.groups(told)
    assert telemetry_rows(group) == []
    assert missing_words(told) == ""


def test_the_page_draws_gauges_and_power_and_says_what_is_missing(tmp_path: Path) -> None:
    told = report_run.summary()
    cells = tuple(msgspec.structs.replace(c, telemetry=telemetry(None, gpu=NO_DRIVER))
                  for c in told.cells)  # fmt: skip
    run = report_run.write_run(tmp_path / "run", msgspec.structs.replace(told, cells=cells))
    rows = [
        Row(at * S, source, device, values)
        for at in range(10)
        for source, device, values in (
            ("engine", "", {"running": float(at), "waiting": 0.0, "kv_usage": at / 10}),
            ("gpu", "0", {"power_w": 300.0 + at, "sm_clock_mhz": 1900.0}),
            ("gpu", "1", {"power_w": 200.0, "sm_clock_mhz": 1700.0}),
        )
    ]
    for cell in told.cells:
        write_series(run / "cells" / cell.cell_id / "telemetry.parquet", series_of(rows))
    page = write_report(run).read_text()
    assert f"Not sampled: GPUs ({NO_DRIVER})." in page
    drawn = {path.stem.partition("-reference")[0] for path in (run / "plots").glob("*.svg")}
    assert {"gauges", "power"} <= drawn
    power = next((run / "plots").glob("power-*.svg")).read_text()
    assert "GPU power, W, all GPUs, baseline: mean 505" in power  # 300 to 309, and 200 beside it
    assert "SM clock, MHz, mean, speculative: mean 1,800" in power


def test_a_variant_with_a_single_sample_is_not_in_the_legend_and_said_so(tmp_path: Path) -> None:
    told = report_run.summary()
    run = report_run.write_run(tmp_path / "run", told)
    for cell in told.cells:
        times = range(10) if cell.variant == "baseline" else range(1)
        rows = [Row(at * S, "engine", "", {"running": 1.0}) for at in times]
        write_series(run / "cells" / cell.cell_id / "telemetry.parquet", series_of(rows))
    page = write_report(run).read_text()
    assert "Not drawn: speculative, with fewer than two samples in its block." in page
    gauges = next((run / "plots").glob("gauges-*.svg")).read_text()
    assert ">baseline</text>" in gauges and ">speculative</text>" not in gauges


def test_a_broken_file_is_a_caution_and_the_page_is_made(tmp_path: Path) -> None:
    run = report_run.write_run(tmp_path / "run", report_run.summary())
    broken = next((run / "cells").iterdir()) / "telemetry.parquet"
    broken.write_bytes(b"nothing of the kind")
    assert (
        f"{broken.parent.name}/telemetry.parquet could not be read" in write_report(run).read_text()
    )
