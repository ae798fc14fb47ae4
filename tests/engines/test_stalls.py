"""Stalls planted in real engines: seen in time, named, and nothing of the engine left behind.

A patience of 0.3 makes the budget 13 s of standing still instead of 45.
"""

from __future__ import annotations

import contextlib
import fcntl
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engines.activity import budgets, tree
from engines.base import EngineFailed, EngineUsageError, ServeSpec
from engines.catalog import adapter
from engines.install import engine_python
from engines.phases import weights_size
from engines.process import EngineProcess, check_port, free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

PATIENCE = 0.3
PLANTED = Path(__file__).with_name("stalling")
ENGINES = ("vllm", "sglang")
# What every rank of the engine does on its way to readiness, by which a stop finds it loading.
LOADING = {"vllm": "load_model", "sglang": "load_weights"}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    try:
        engine_python(f"{request.param}-cpu")
    except EngineUsageError as error:
        pytest.skip(str(error))
    return str(request.param)


def started(
    engine: str, pair: Path, folder: Path, *, patience: float = PATIENCE, **env: str
) -> EngineProcess:
    own = adapter(engine).launch(_spec(pair, {}), folder / "probe").env.get("PYTHONPATH", "")
    path = ":".join(part for part in (str(PLANTED), own) if part)
    spec = _spec(pair, {"PYTHONPATH": path, **env})
    return EngineProcess(
        adapter(engine),
        spec,
        workdir=folder / "work",
        log_path=folder / "engine.log",
        deadline_s=900.0,
        patience=patience,
    )


def _spec(pair: Path, env: dict[str, str]) -> ServeSpec:
    return ServeSpec(
        target=pair / "target",
        served_name="demo",
        port=free_port(),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_gib=1.0,
        extra_env=env,
    )


def stalled(process: EngineProcess, after: Path | None = None) -> str:
    """Start, and the message of the failure; afterwards nothing of the engine may be left.

    `after`: the file with which the stall begins. How long the engine took until then, and how
    long it stood still meanwhile, is this machine's affair.
    """
    seen: list[psutil.Process] = []
    with process:
        process.start()
        while after is not None and not after.exists():
            assert process.alive(), process.failure()
            time.sleep(0.05)
        with pytest.raises(EngineFailed) as failed:
            process.wait_ready()
        assert process.pid is not None
        seen = tree(process.pid)
    _gone, alive = psutil.wait_procs(seen, timeout=60)
    assert not alive
    check_port(process.spec.host, process.spec.port)
    assert (process.log_path.parent / "stall" / "reading.txt").exists()
    return str(failed.value)


def assert_in_time(text: str, process: EngineProcess) -> None:
    phase, _began = process._tracker.current
    idle = PATIENCE * budgets(phase)[0]
    quiet = float(text.partition(" since ")[2].partition(" s ")[0])
    assert idle - 1 <= quiet <= idle + 10, text


def test_a_deadlock_after_the_weights(engine: str, demo_pair: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    process = started(engine, demo_pair, tmp_path, STALL="deadlock", STALL_FILE=str(locked))
    text = stalled(process, after=locked)
    assert "stalled: nothing moves" in text
    assert "_lock_twice (sitecustomize.py" in text
    assert "after_weights_are_loaded" in text
    assert_in_time(text, process)


@pytest.mark.full
def test_a_worker_that_was_stopped_while_it_loads(
    engine: str, demo_pair: Path, tmp_path: Path
) -> None:
    process = started(engine, demo_pair, tmp_path)
    stopper = threading.Thread(target=_stop_all_at, args=(process, LOADING[engine]))
    stopper.start()
    text = stalled(process)
    stopper.join()
    assert "stopped by a signal (SIGSTOP or a debugger)" in text


def _stop_all_at(process: EngineProcess, phase: str) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        # Or later: the demo's weights are read between two looks at the log.
        if process.pid is not None and phase in {p.phase for p in process.phases}:
            for child in tree(process.pid):
                with contextlib.suppress(psutil.Error):
                    child.send_signal(signal.SIGSTOP)
            return
        time.sleep(0.02)


@pytest.mark.full
def test_a_file_lock_that_another_process_holds(
    engine: str, demo_pair: Path, tmp_path: Path
) -> None:
    lock = tmp_path / "held.lock"
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = started(engine, demo_pair, tmp_path, STALL="lock", STALL_FILE=str(lock))
        text = stalled(process)
    assert "wait_for_the_file_lock (sitecustomize.py" in text


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accepts, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/model.safetensors"


@pytest.mark.full
def test_a_download_that_gets_no_bytes(engine: str, demo_pair: Path, tmp_path: Path) -> None:
    with silent_server() as url:
        process = started(engine, demo_pair, tmp_path, STALL="download", STALL_URL=url)
        text = stalled(process)
    assert "snapshot_download (sitecustomize.py" in text
    assert "HF_HUB_OFFLINE=1" in text


@pytest.mark.full
@pytest.mark.parametrize("attempt", range(10))
def test_clean_starts_raise_no_false_alarm(
    engine: str, demo_pair: Path, tmp_path: Path, attempt: int
) -> None:
    with started(engine, demo_pair, tmp_path, patience=1.0) as process:
        process.start()
        phases = process.wait_ready()
    assert process.ready_s is not None
    told = sum((p.end_s or 0.0) - p.start_s for p in phases)
    assert abs(told - process.ready_s) <= 0.02 * process.ready_s
    loads = [p for p in phases if p.weight_bytes is not None]
    assert [p.weight_bytes for p in loads] == [weights_size(demo_pair / "target")]
    # What begins and ends between two looks, as 19 MB of weights do, has no sample of its own.
    uses = [p.use for p in phases if (p.end_s or 0.0) - p.start_s >= 2.0]
    assert uses and all(use is not None and use.rss_bytes > 0 for use in uses)
    assert not (tmp_path / "stall").exists()
