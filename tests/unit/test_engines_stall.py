"""What a stalled start is said to hang on: from made stacks, and from real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from gloo_ranks import ENVIRONMENT, await_ranks

import engines.stall
from engines.activity import Stall, tree
from engines.stall import Stack, dissect, reading

IDLE = Stall(kind="idle", phase="load_weights", quiet_s=47.0, budget_s=45.0)
SITE = "/env/lib/python3.11/site-packages"


def stack(rank: int, *frames: tuple[str, str], state: str = "sleeping") -> Stack:
    return Stack(
        pid=100 + rank,
        name=f"VLLM::Worker_TP{rank}",
        rank=rank,
        state=state,
        frames=tuple(f"{name} ({Path(path).name}:7)" for name, path in frames),
        paths=tuple(path for _, path in frames),
    )


REDUCE = (
    ("wait", "/usr/lib/python3.11/threading.py"),
    ("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py"),
    ("determine_available_memory", f"{SITE}/vllm/worker.py"),
)
LOAD = (
    ("read", "/usr/lib/python3.11/socket.py"),
    ("load_weights", f"{SITE}/vllm/loader.py"),
    ("load_model", f"{SITE}/vllm/runner.py"),
)


def test_the_majority_and_the_odd_one_out() -> None:
    stacks = [stack(r, *(LOAD if r == 3 else REDUCE)) for r in range(8)]
    text = reading(IDLE, stacks, "")
    assert "7 ranks in all_reduce (distributed_c10d.py:7), rank 3 still in load_weights" in text
    assert "nothing moves since 47 s in the start-up phase 'load_weights'" in text
    assert "wait for one that never came" in text


def test_ranks_that_agree_are_one_and_ranks_that_all_differ_are_each_told() -> None:
    assert "all 4 ranks in load_weights" in reading(IDLE, [stack(r, *LOAD) for r in range(4)], "")
    text = reading(IDLE, [stack(0, *LOAD), stack(1, *REDUCE)], "")
    assert "rank 0 in load_weights (loader.py:7) < load_model (runner.py:7)" in text
    assert "rank 1 in all_reduce" in text


def test_stopped_processes_and_stacks_that_cannot_be_read_are_said() -> None:
    stopped = stack(1, *LOAD, state=psutil.STATUS_STOPPED)
    unread = Stack(pid=9, name="x", rank=None, state="sleeping", error="Permission denied")
    text = reading(IDLE, [stopped, unread], "")
    assert "rank 1 stopped by a signal" in text
    assert "no stack of x (9): Permission denied" in text


def test_a_download_is_known_by_its_functions() -> None:
    frames = (
        ("recv_into", "/usr/lib/python3.11/socket.py"),
        ("http_get", f"{SITE}/huggingface_hub/file_download.py"),
        ("snapshot_download", f"{SITE}/huggingface_hub/_snapshot_download.py"),
    )
    text = reading(IDLE, [stack(0, *frames)], "")
    assert "in http_get" in text
    assert "HF_HUB_OFFLINE=1" in text


RANKS = """
import os, sys, time, datetime
import torch.distributed as dist, torch
from gloo_ranks import tell_once_in
rank, world, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.FileStore(where, world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world,
                        timeout=datetime.timedelta(seconds=300))
# A line of its own: Gloo writes its greetings into the same file in pieces.
print(f"\\n(Worker_TP{rank} pid={os.getpid()}) Starting to load model", flush=True)
def load_weights():
    if rank == world - 1:
        time.sleep(600)
def profile_memory():
    dist.all_reduce(torch.ones(1))
tell_once_in(os.path.dirname(where), rank, "all_reduce", "load_weights")
load_weights()
profile_memory()
"""


@contextmanager
def ranks(world: int, folder: Path) -> Iterator[tuple[int, Path]]:
    """A parent with `world` ranks below it, the last of which never reaches the reduction."""
    program, log = folder / "ranks.py", folder / "engine.log"
    program.write_text(RANKS)
    parent = (
        "import os, subprocess, sys\n"
        "each = [subprocess.Popen([f'VLLM::Worker_TP{r}', *sys.argv[1:2], str(r), *sys.argv[2:]],"
        " executable=sys.executable) for r in range(int(sys.argv[2]))]\n"
        "[p.wait() for p in each]\n"
    )
    command = [sys.executable, "-c", parent, str(program), str(world), str(folder / "store")]
    # Under another name Python does not find its own virtual environment: its path is said.
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **ENVIRONMENT}
        )
    try:
        await_ranks(folder, world)
        yield process.pid, log
    finally:
        for child in tree(process.pid):
            child.send_signal(signal.SIGKILL)
        process.kill()
        process.wait()


def test_real_ranks_that_wait_for_one_are_told_apart(tmp_path: Path) -> None:
    with ranks(4, tmp_path) as (pid, log):
        text = dissect(pid, IDLE, folder=tmp_path / "stall", log_path=log, argv=("ranks",))
    assert "3 ranks in all_reduce" in text, text
    assert "rank 3 still in load_weights (ranks.py" in text
    tails = (tmp_path / "stall" / "log-tail.txt").read_text()
    assert all(f"== Worker_TP{r}\n" in tails for r in range(4))
    assert len(list((tmp_path / "stall").glob("stack-*.txt"))) == 4
    assert (tmp_path / "stall" / "reading.txt").read_text() == text + "\n"


def test_processes_are_looked_at_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=300)

    def dump(pid: int, *, stopped: bool) -> tuple[str, list[dict[str, Any]], str | None]:
        together.wait()  # one after the other would wait in vain
        return f"stack of {pid}\n", [], None

    monkeypatch.setattr(engines.stall, "_dump", dump)
    log = tmp_path / "engine.log"
    log.touch()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    two = f"import subprocess; [p.wait() for p in [subprocess.Popen({sleep!r}) for _ in 'ab']]"
    child = subprocess.Popen([sys.executable, "-c", two])
    try:
        while len(tree(child.pid)) < 2:
            time.sleep(0.05)
        dissect(child.pid, IDLE, folder=tmp_path / "stall", log_path=log, argv=())
    finally:
        for one in tree(child.pid):
            one.kill()
        child.wait()
    assert len(list((tmp_path / "stall").glob("stack-*.txt"))) == 2


def test_a_stopped_rank_is_named_with_its_stack(tmp_path: Path) -> None:
    with ranks(2, tmp_path) as (pid, log):
        last = next(p for p in tree(pid) if p.cmdline()[0].endswith("TP1"))
        last.send_signal(signal.SIGSTOP)
        while last.status() != psutil.STATUS_STOPPED:
            time.sleep(0.02)
        text = dissect(pid, IDLE, folder=tmp_path / "stall", log_path=log, argv=("ranks",))
    assert "rank 1 stopped by a signal" in text
    assert "rank 1 in load_weights" in text


def test_secrets_stay_out_of_the_folder(tmp_path: Path) -> None:
    code = "import time; time.sleep(600)"
    command = [
        sys.executable,
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}, "
        "'--api-key', 'hf_secret', '--seed', '3'])",
    ]
    environment = {**os.environ, "HF_TOKEN": "hf_secret", "NCCL_DEBUG": "INFO"}
    with subprocess.Popen(command, env=environment) as process:
        try:
            # One that has been forked only has its parent's command line still.
            while not any("--seed" in child.cmdline() for child in tree(process.pid)):
                time.sleep(0.05)
            log = tmp_path / "no.log"
            argv = ("env", "HF_TOKEN=hf_secret", "x", "--api-key=hf_secret")
            dissect(process.pid, IDLE, folder=tmp_path / "s", log_path=log, argv=argv)
        finally:
            for child in tree(process.pid):
                child.kill()
            process.kill()
    everything = "".join(f.read_text() for f in (tmp_path / "s").iterdir())
    assert "hf_secret" not in everything
    assert "--seed 3" in (tmp_path / "s" / "processes.txt").read_text()
    assert "NCCL_DEBUG=INFO" in (tmp_path / "s" / "environment.txt").read_text()
