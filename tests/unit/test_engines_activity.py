"""When a start counts as stalled: what may be quiet, for how long, in which phase."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import activity
from engines.activity import (
    BUSY_BUDGET_S,
    IDLE_BUDGET_S,
    Sample,
    Stall,
    StallWatch,
    budgets,
    sample,
)


def at(second: float, *, cpu: float = 0.0, io: int = 0, log: int = 0, gpu: int = 0) -> Sample:
    return Sample(
        at_s=second,
        processes=frozenset({1}),
        cpu_s=cpu,
        io_bytes=io,
        log_bytes=log,
        gpu_bytes=gpu,
    )


def told(samples: list[Sample], phase: str = "load_weights") -> Stall | None:
    watch = StallWatch()
    return next((stall for s in samples if (stall := watch.feed(s, phase))), None)


def test_nothing_at_all_is_a_stall_once_the_budget_is_used_up() -> None:
    stall = told([at(float(s)) for s in range(100)])
    assert stall is not None
    assert stall.kind == "idle"
    assert IDLE_BUDGET_S < stall.quiet_s <= IDLE_BUDGET_S + 1


def test_spinning_processors_have_a_longer_budget_but_have_one() -> None:
    samples = [at(float(s), cpu=8.0 * s) for s in range(700)]
    stall = told(samples)
    assert stall is not None
    assert stall.kind == "busy"
    assert BUSY_BUDGET_S < stall.quiet_s <= BUSY_BUDGET_S + 1
    assert told(samples, "compile") is None  # which takes long, and says nothing


@pytest.mark.parametrize("trace", ["log", "io", "gpu", "cpu"])
def test_any_trace_of_work_keeps_a_start_alive(trace: str) -> None:
    step = {"log": 80, "io": 1_000_000, "gpu": 1 << 20, "cpu": 1.0}[trace]
    samples = [at(float(s), **{trace: step * s}) for s in range(300)]  # type: ignore[arg-type]
    assert told(samples) is None


def test_polling_is_no_work() -> None:
    samples = [at(float(s), cpu=0.01 * s, io=500 * s) for s in range(100)]
    assert told(samples) is not None


def test_a_new_phase_begins_a_new_budget() -> None:
    watch = StallWatch()
    for second in range(200):
        assert watch.feed(at(float(second)), f"phase {second // 40}") is None


def test_no_patience_never_tells_and_more_patience_tells_later() -> None:
    samples = [at(float(s)) for s in range(200)]
    patient = StallWatch(patience=3.0)
    first = next(s.at_s for s in samples if patient.feed(s, "x"))
    assert 3 * IDLE_BUDGET_S < first <= 3 * IDLE_BUDGET_S + 1
    never = StallWatch(patience=0.0)
    assert not any(never.feed(at(1e6 * s), "x") for s in range(200))


def test_warming_up_may_take_long_under_either_engine_s_name() -> None:
    assert budgets("warmup") == budgets("warm_up") == budgets("compile")


def test_a_machine_whose_cards_count_nothing_has_no_network_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def card(sent: int) -> SimpleNamespace:
        return SimpleNamespace(bytes_sent=sent, bytes_recv=0)

    cards = {"lo": card(9), "eth0": card(0)}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: cards)
    assert activity.network_bytes() is None
    cards["eth0"] = card(5)
    assert activity.network_bytes() == 5


@given(
    st.lists(st.tuples(st.floats(0.5, 20.0), st.booleans()), min_size=1, max_size=60),
    st.sampled_from(["load_weights", "compile", "distributed"]),
)
def test_never_told_before_the_budget_and_always_soon_after(
    steps: list[tuple[float, bool]], phase: str
) -> None:
    watch, now, log, quiet_since = StallWatch(), 0.0, 0, 0.0
    assert watch.feed(at(now), phase) is None
    idle = budgets(phase)[0]
    for gap, works in steps:
        now += gap
        log += works
        quiet_since = now if works else quiet_since
        stall = watch.feed(at(now, log=log), phase)
        assert (stall is not None) is (now - quiet_since > idle)
        if stall is not None:
            return


def test_a_real_tree_is_seen_working_and_sleeping(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    work = "import time; end = time.time() + 600\nwhile time.time() < end: pass"
    log = tmp_path / "log"
    log.write_text("x" * 10)
    with subprocess.Popen([sys.executable, "-c", code, work]) as process:
        try:
            before = after = sample(process.pid, log, 0.0)
            end = time.monotonic() + 300
            while after.cpu_s - before.cpu_s < 0.2 and time.monotonic() < end:
                time.sleep(0.1)
                after = sample(process.pid, log, 1.0)
            assert after.cpu_s - before.cpu_s >= 0.2
            assert len(after.processes) == 1
            assert after.log_bytes == 10
        finally:
            subprocess.run(["pkill", "-P", str(process.pid)], check=False)
            process.kill()
