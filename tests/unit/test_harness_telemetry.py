"""Telemetry: NVML by made-up values, series as files, figures and cautions, and the sampler."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from harness_records import cell, request, run_of
from hypothesis import given
from hypothesis import strategies as st

from engines.gauges import read_gauges
from harness.analyse.data import CellData, RunData
from harness.analyse.summary import summarise
from harness.errors import UsageError
from harness.findings import CellSummary, Telemetry
from harness.measure.hardware import NO_DRIVER, Gpus, Host, load_nvml
from harness.measure.series import Row, Series, read_series, series_of, write_series
from harness.plan.schema import EngineSection, Plan
from harness.sampler import Orders, Ticker
from harness.telemetry import Watch

S = 1_000_000_000
MIB = 2**20


class MadeUpNvml:
    """Made-up answers: of a GPU that tells everything, and of one that tells little (a slice)."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {
            "Name": ["NVIDIA H200", "NVIDIA H200 MIG 1g.18gb"],
            "UUID": ["GPU-5a", None],
            "EnforcedPowerLimit": [700_000, None],
            "PowerUsage": [612_345, None],
            "TotalEnergyConsumption": [9_876_543_210, None],
            "MemoryInfo": [SimpleNamespace(total=143_771 * MIB, used=98_000 * MIB)] * 2,
            "UtilizationRates": [SimpleNamespace(gpu=97, memory=61), None],
            "CurrentClocksThrottleReasons": [0x4, None],
            "ComputeRunningProcesses": [
                [SimpleNamespace(pid=11, usedGpuMemory=90_000 * MIB)],
                [SimpleNamespace(pid=99, usedGpuMemory=None)],
            ],
        }

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        if handle:
            raise self.NVMLError("Not Supported")
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        if handle:
            raise self.NVMLError("Not Supported")
        return 71

    def __getattr__(self, name: str) -> Any:
        def answer(handle: int) -> Any:
            told = self.answers[name.removeprefix("nvmlDeviceGet")][handle]
            if told is None:
                raise self.NVMLError("Not Supported")
            return told

        return answer


def test_a_gpu_is_read_in_si_units() -> None:
    first = Gpus(MadeUpNvml()).read(frozenset({11}))["0"]
    assert first == {
        "power_w": 612.345,
        "energy_j": 9_876_543.21,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "throttle_reasons": 4,
        "memory_used_bytes": 98_000 * MIB,
        "utilisation": 0.97,
        "memory_utilisation": 0.61,
        "temperature_c": 71,
        "engine_memory_bytes": 90_000 * MIB,
    }


def test_what_a_gpu_does_not_support_is_absent_and_never_zero() -> None:
    gpus = Gpus(MadeUpNvml())
    assert gpus.read(frozenset({11}))["1"] == {
        "memory_used_bytes": 98_000 * MIB,
        "engine_memory_bytes": 0,
    }
    assert gpus.describe()["1"]["power_limit_w"] is None
    assert gpus.describe()["0"]["power_limit_w"] == 700
    assert "engine_memory_bytes" not in gpus.read(frozenset())["0"]  # no process to look for
    assert "engine_memory_bytes" not in gpus.read(frozenset({99}))["1"]  # it tells no memory


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver here")
def test_a_machine_without_a_driver_says_so() -> None:
    assert load_nvml() == (None, NO_DRIVER)


def test_the_host_is_read() -> None:
    host = Host()
    sum(range(200_000))
    told = host.read()
    assert 0 <= told["cpu_share"] <= told["busiest_core_share"] <= 1
    assert 0 < told["memory_used_bytes"] < psutil.virtual_memory().total


VLLM = """
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 2.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:num_preemptions_total{engine="0"} 4.0
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_hits_total{engine="0"} 40.0
"""
SGLANG = """
sglang:num_running_reqs{tp_rank="0"} 5.0
sglang:num_running_reqs{tp_rank="1"} 5.0
sglang:num_queue_reqs{tp_rank="0"} 2.0
sglang:token_usage{tp_rank="0"} 0.5
sglang:num_retracted_requests_total{tp_rank="0"} 1.0
sglang:cached_tokens_total{cache_source="device"} 30.0
sglang:cached_tokens_total{cache_source="total"} 30.0
sglang:prompt_tokens_total 90.0
"""


def test_gauges_are_summed_over_ranks_that_serve_different_requests() -> None:
    assert read_gauges(VLLM) == {
        "running": 5, "waiting": 0, "kv_usage": 0.75, "preemptions": 4,
        "prefix_queries": 100, "prefix_hits": 40,
    }  # fmt: skip
    assert read_gauges(SGLANG) == {
        "running": 5, "waiting": 2, "kv_usage": 0.5, "preemptions": 1,
        "prefix_queries": 90, "prefix_hits": 30,
    }  # fmt: skip
    assert read_gauges("up 1\n") == {}


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=6)
rows = st.lists(
    st.builds(
        Row,
        at_ns=st.integers(0, 2**62),
        source=st.sampled_from(["gpu", "host", "engine"]),
        device=st.sampled_from(["", "0", "1", "10"]),
        values=st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    ),
    max_size=12,
)


@given(rows)
def test_a_series_comes_back_from_its_file(tmp_path_factory: Any, told: list[Row]) -> None:
    path = tmp_path_factory.mktemp("series") / "telemetry.parquet"
    series = series_of(told, interval_s=0.5, missing={"gpu": NO_DRIVER}, gpus={"0": {"name": "x"}})
    write_series(path, series)
    back = read_series(path)
    assert back.tracks.keys() == series.tracks.keys()
    for key, track in series.tracks.items():
        assert (back.tracks[key].at_ns == track.at_ns).all()
        assert sorted(back.tracks[key].values) == sorted(track.values)
    assert (back.interval_s, back.missing, back.gpus) == (0.5, series.missing, series.gpus)


def test_a_file_that_is_no_telemetry_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.parquet"
    path.write_bytes(b"PAR1 no")
    with pytest.raises(UsageError, match=r"telemetry\.parquet: cannot be read as telemetry"):
        read_series(path)


GPU_PLAN = Plan(engine=EngineSection(device="cuda"))
RECORD = request(sent_ns=1 * S, chunk_ns=(2 * S, 3 * S, 5 * S), end_ns=5 * S)
"""Its window: from 1 to 5 s; 6 output tokens."""


def sampled(*told: Row, missing: dict[str, str] | None = None) -> CellData:
    data = cell("speculative", 0, [RECORD])
    return msgspec.structs.replace(
        data, telemetry=series_of(told, interval_s=1.0, missing=missing or {})
    )


def gpu_rows(index: str = "0", **changes: Any) -> list[Row]:
    """300 W from 0 to 6 s; the counter says the same."""
    base = {"power_w": 300.0, "sm_clock_mhz": 1900.0, "throttle_reasons": 0.0}
    return [
        Row(at * S, "gpu", index, {**base, "energy_j": 1000.0 + 300 * at, **changes})
        for at in range(7)
    ]


def found_in(run: RunData) -> tuple[CellSummary, Telemetry]:
    (told,) = summarise(run).cells
    assert told.telemetry is not None
    return told, told.telemetry


def codes(told: CellSummary) -> set[str]:
    return {caution.code for caution in told.cautions}


def test_joules_a_token_are_of_the_window_alone() -> None:
    run = run_of([sampled(*gpu_rows(), *gpu_rows("1"))], plan=GPU_PLAN)
    _, found = found_in(run)
    assert [gpu.energy_by for gpu in found.gpus] == ["counter", "counter"]
    assert found.energy_j == pytest.approx(2 * 4 * 300)
    assert found.energy_of == "all 2 GPUs of the machine"
    assert found.joules_per_output_token == pytest.approx(2400 / 6)


def test_the_engine_s_own_gpus_are_taken_where_its_processes_are_seen() -> None:
    idle = gpu_rows("1", engine_memory_bytes=0.0)
    run = run_of([sampled(*gpu_rows(engine_memory_bytes=5e9), *idle)], plan=GPU_PLAN)
    _, found = found_in(run)
    assert found.energy_j == pytest.approx(4 * 300)
    assert found.energy_of == "the engine's GPU"


def test_without_an_energy_counter_power_is_summed_up() -> None:
    told = [
        Row(r.at_ns, "gpu", "0", {"power_w": 100.0 * (r.at_ns // S)}) for r in gpu_rows()
    ]  # a ramp: 100 W more each second
    _, found = found_in(run_of([sampled(*told)], plan=GPU_PLAN))
    assert found.gpus[0].energy_by == "power"
    assert found.energy_j == pytest.approx(4 * 300)  # 100 to 500 W over four seconds


@pytest.mark.parametrize(
    "told",
    [
        gpu_rows()[2:],  # begins within the window
        gpu_rows()[:4],  # ends within it
        [*gpu_rows()[:3], *(r._replace(values={"energy_j": 5.0}) for r in gpu_rows()[3:])],
    ],
    ids=["late", "short", "reset"],
)
def test_energy_that_is_not_known_is_missing_and_never_less(told: list[Row]) -> None:
    told = [r._replace(values={"energy_j": r.values["energy_j"]}) for r in told]
    _, found = found_in(run_of([sampled(*told)], plan=GPU_PLAN))
    assert found.energy_j is None
    assert found.joules_per_output_token is None


def test_gpus_here_are_not_the_engine_s_where_it_runs_on_the_cpu() -> None:
    _, found = found_in(run_of([sampled(*gpu_rows())]))
    assert found.joules_per_output_token is None
    assert found.gpus[0].energy_j == pytest.approx(1200)


def test_no_driver_is_stated_and_no_figure_is_made_up() -> None:
    host = [Row(at * S, "host", "", {"cpu_share": 0.5}) for at in range(7)]
    _, found = found_in(run_of([sampled(*host, missing={"gpu": NO_DRIVER})]))
    assert found.missing == {"gpu": NO_DRIVER}
    assert found.gpus == ()
    assert found.energy_j is None
    assert found.preemptions is None
    assert found.host["cpu_share"].n == 5


def test_a_cell_that_was_not_sampled_has_no_telemetry() -> None:
    (told,) = summarise(run_of([cell("baseline", 0, [RECORD])])).cells
    assert told.telemetry is None


@pytest.mark.parametrize(
    ("bits", "code"),
    [(0x4, "gpu_power_limited"), (0x40, "gpu_throttled"), (0x80, "gpu_throttled"), (0x1, None)],
)
def test_clocks_held_back_are_a_caution(bits: int, code: str | None) -> None:
    told, found = found_in(
        run_of([sampled(*gpu_rows(throttle_reasons=float(bits)))], plan=GPU_PLAN)
    )
    assert codes(told) & {"gpu_power_limited", "gpu_throttled"} == ({code} if code else set())
    assert found.gpus[0].throttled == ({} if code is None else found.gpus[0].throttled)


@pytest.mark.parametrize(
    ("plan", "held", "told"),
    [
        (GPU_PLAN, (5e9, 0.0), False),  # the slowed one is another's
        (GPU_PLAN, (0.0, 0.0), True),  # process ids are another namespace's: any may be its
        (Plan(engine=EngineSection(device="cpu")), (0.0, 0.0), False),
    ],
)
def test_clocks_are_looked_at_where_the_engine_may_run(
    plan: Plan, held: tuple[float, float], told: bool
) -> None:
    rows = gpu_rows(engine_memory_bytes=held[0])
    rows += gpu_rows("1", engine_memory_bytes=held[1], throttle_reasons=float(0x40))
    summary, _ = found_in(run_of([sampled(*rows)], plan=plan))
    assert ("gpu_throttled" in codes(summary)) == told


def engine_rows(preemptions: float = 0.0) -> list[Row]:
    return [
        Row(at * S, "engine", "", {
            "running": 4.0, "waiting": float(at), "kv_usage": 0.9,
            "preemptions": 3.0 + (preemptions if at > 2 else 0.0),
            "prefix_queries": 100.0 * at, "prefix_hits": 25.0 * at,
        })
        for at in range(7)
    ]  # fmt: skip


def test_preemptions_in_the_window_are_a_caution() -> None:
    told, found = found_in(run_of([sampled(*engine_rows(2))]))
    assert found.preemptions == 2
    assert "preempted" in codes(told)
    text = next(c.text for c in told.cautions if c.code == "preempted")
    assert "2 times" in text
    assert "90%" in text
    calm, found = found_in(run_of([sampled(*engine_rows())]))
    assert found.preemptions == 0
    assert "preempted" not in codes(calm)


def test_engine_gauges_are_of_the_window() -> None:
    _, found = found_in(run_of([sampled(*engine_rows())]))
    assert found.prefix_hit_rate == pytest.approx(0.25)
    assert (found.engine["waiting"].least, found.engine["waiting"].most) == (1, 5)
    assert "prefix_queries" not in found.engine


def test_a_window_without_a_sample_is_told_as_missing() -> None:
    early = [row for row in engine_rows() if row.at_ns < 1 * S]
    _, found = found_in(run_of([sampled(*early)]))
    assert found.engine == {}
    assert found.missing == {"engine": "no sample fell into a window of 4 s, sampled every 1 s"}
    _, whole = found_in(run_of([sampled(*engine_rows())]))
    assert whole.missing == {}


@pytest.mark.parametrize(("plan", "warned"), [(GPU_PLAN, True), (Plan(), False)])
def test_a_saturated_host_is_a_caution_where_the_model_runs_on_gpus(
    plan: Plan, warned: bool
) -> None:
    busy = [Row(at * S, "host", "", {"cpu_share": 0.99}) for at in range(7)]
    told, _ = found_in(run_of([sampled(*busy)], plan=plan))
    assert ("host_cpu_saturated" in codes(told)) is warned


@pytest.fixture
def page() -> Iterator[str]:
    """A server with vLLM's gauges."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = VLLM.encode()
            self.send_response(200 if self.headers["Authorization"] == "Bearer k" else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.telemetry.SAMPLE_S", 300.0)


def watched(orders: Orders, seconds: float = 0.3) -> Series:
    watch = Watch(orders)
    try:
        watch.begin()
        begun = time.perf_counter_ns()
        time.sleep(seconds)
        watch.end()
        series = watch.series()
        for track in series.tracks.values():
            assert (np.diff(track.at_ns) >= 0).all()
            assert track.at_ns[0] < begun
        return series
    finally:
        watch.close()


def test_the_sampling_process_brackets_a_cell_however_short(page: str) -> None:
    series = watched(Orders(interval_s=3600, metrics_url=page, api_key="k"))
    running = series.track("engine", "running")
    cpu = series.track("host", "cpu_share")
    assert running is not None
    assert cpu is not None
    assert len(running.at_ns) >= 2  # one before, one behind, though the interval is an hour
    assert len(cpu.at_ns) >= 2
    assert set(running.values) == {5.0}


def test_a_page_that_refuses_is_told_and_the_host_is_sampled_all_the_same(page: str) -> None:
    series = watched(Orders(interval_s=0.1, metrics_url=page, api_key="wrong"))
    assert "HTTP 401" in series.missing["engine"]
    assert series.names("engine") == []
    assert series.track("host", "cpu_share") is not None


def test_readings_that_failed_are_told_of_their_own_cell_alone(page: str) -> None:
    watch = Watch(Orders(interval_s=3600, metrics_url=page, api_key="k"))
    try:
        watch.begin()
        watch._take_line(b'{"failed":{"engine":"HTTP 500"}}')
        watch._take_line(b'{"failed":{"engine":"HTTP 503"}}')
        watch.end()
        assert watch.series().missing["engine"] == "2 readings failed: HTTP 503"
        watch.begin()
        watch.end()
        assert "engine" not in watch.series().missing
    finally:
        watch.close()


def test_a_line_that_was_cut_is_passed_over() -> None:
    watch = Watch(Orders(interval_s=3600, metrics_url=None))
    try:
        watch.begin()
        assert watch._spool is not None
        cut = b'[1,"gpu","0",{"power_w":3[2,"host","",{}]\n\n{"missing":4}\n'
        os.pwrite(watch._spool.fileno(), cut, watch._read)
        watch._take_in()
        assert watch.series().devices("gpu") == []
    finally:
        watch.close()


def test_a_source_that_raises_is_told_and_sampled_again() -> None:
    told: list[Exception] = []
    again = threading.Event()

    def sample() -> None:
        if told:
            again.set()
        raise ValueError("no such counter")

    Ticker(sample, 0.01, told.append)
    assert again.wait(60)
    assert str(told[0]) == "no such counter"


def test_a_killed_sampler_costs_its_samples_and_nothing_else() -> None:
    watch = Watch(Orders(interval_s=0.1, metrics_url=None))
    try:
        assert watch._process is not None
        watch._process.send_signal(signal.SIGKILL)
        watch._process.wait()
        watch.begin()
        watch.end()
        assert "ended" in watch.series().missing["all"]
    finally:
        watch.close()


def test_the_sampler_goes_when_its_reader_is_gone() -> None:
    watch = Watch(Orders(interval_s=0.1, metrics_url=None))
    process = watch._process
    assert process is not None
    assert process.stdin is not None
    files = f"/proc/{process.pid}/fd"
    names = [os.readlink(f"{files}/{number}") for number in (1, 2)]
    assert all(name.endswith("(deleted)") for name in names)  # so that nothing is left of them
    process.stdin.close()  # as when the harness is killed
    assert process.wait(timeout=300) == 0
    watch.close()
