"""Stalls and deaths that are known: told by captured log text, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.oom import killed_since, oom_kills
from engines.sglang import SglangAdapter
from engines.signatures import (
    SHOWN_LINES,
    cause_of,
    crash_place,
    nearest_flags,
    relevant_lines,
    stall_advice,
    worker_signal,
)
from engines.vllm import VllmAdapter

SITE = "/env/lib/python3.11/site-packages"
VLLM_OOM = """\
(EngineCore pid=411) INFO 11-03 09:12:41 [core.py:93] Initializing a V1 LLM engine (v0.32.0)
(Worker_TP0 pid=520) ERROR 11-03 09:14:02 [multiproc_executor.py:772] WorkerProc failed to start.
(Worker_TP0 pid=520) ERROR 11-03 09:14:02 [multiproc_executor.py:772] Traceback (most recent call last):
(Worker_TP0 pid=520) ERROR 11-03 09:14:02 [multiproc_executor.py:772]     self.model_runner.load_model()
(Worker_TP0 pid=520) ERROR 11-03 09:14:02 [multiproc_executor.py:772] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacity of 94.97 GiB of which 512.00 MiB is free.
(EngineCore pid=411) ERROR 11-03 09:14:05 [core.py:866] Traceback (most recent call last):
(EngineCore pid=411) ERROR 11-03 09:14:05 [core.py:866] Exception: WorkerProc initialization failed due to an exception in a background process.
"""  # noqa: E501
VLLM_NO_ROOM = """\
(EngineCore pid=411) ERROR 11-03 09:14:05 [core.py:866] Traceback (most recent call last):
(EngineCore pid=411) ERROR 11-03 09:14:05 [core.py:866] ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.
"""  # noqa: E501
SGLANG_OOM = """\
[2026-01-02 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/scheduler.py", line 9, in run
    self.load()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.

[2026-01-02 10:00:01] Received sigquit from a child process.
"""
SGLANG_PORT = """\
INFO:     Started server process [77]
ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): [errno 98] address already in use
"""  # noqa: E501
SGLANG_DEAD = """\
[2026-01-02 10:00:00] Rank 3 scheduler is dead. Please check if there are relevant logs.
[2026-01-02 10:00:00] Exit code: -9
Traceback (most recent call last):
  File "/x/engine.py", line 9, in launch
EOFError
"""
NO_KERNEL = """\
[2026-01-02 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/scheduler.py", line 9, in run
    self.forward()
RuntimeError: CUDA error: no kernel image is available for execution on the device
"""


@pytest.mark.parametrize(
    ("adapter", "log", "kind", "cause", "advice"),
    [
        (VllmAdapter(), VLLM_OOM, "out_of_memory", "CUDA out of memory", "engine.kv_cache_gib"),
        (VllmAdapter(), VLLM_NO_ROOM, "out_of_memory", "cache blocks", "engine.max_model_len"),
        (SglangAdapter(), SGLANG_OOM, "out_of_memory", "CUDA out of memory", "nvidia-smi"),
        (SglangAdapter(), SGLANG_PORT, "port", "already in use", "another engine.port"),
        (SglangAdapter(), NO_KERNEL, "kernel", "no kernel image", "doctor --kernels"),
    ],
)
def test_a_known_death_has_its_kind_and_advice(
    adapter: VllmAdapter | SglangAdapter, log: str, kind: str, cause: str, advice: str
) -> None:
    death = cause_of(log, adapter.failure_cause(log), signal_name=None, starved=None)
    assert death.kind == kind
    assert cause in (death.cause or "")
    assert advice in (death.advice or "")


def test_lines_that_were_survived_are_no_cause() -> None:
    log = "WARNING: port 8080: address already in use, taking 8081\n"
    death = cause_of(log, "ValueError: rope", signal_name=None, starved=None)
    assert (death.kind, death.cause, death.advice) == (None, "ValueError: rope", None)
    assert cause_of("all is well\n", None, signal_name=None, starved=None).kind is None


def test_an_error_behind_a_progress_bar_is_told_without_the_bar() -> None:
    bar = "".join(f"Loading shards:  {n}%|#   | {n}/100 [00:01<00:07]\r" for n in range(50))
    death = cause_of(
        f"{bar}RuntimeError: CUDA out of memory\n", None, signal_name=None, starved=None
    )
    assert death.cause == "RuntimeError: CUDA out of memory"


def test_a_worker_that_was_killed_is_told_by_its_parents_message() -> None:
    assert worker_signal("Exit code: -9") == "SIGKILL"
    assert worker_signal("exitcode -11") == "SIGSEGV"
    assert worker_signal("exit code 1") is None
    assert worker_signal("exit code: -4000") is None
    death = cause_of(SGLANG_DEAD, None, signal_name=None, starved=None)
    assert death.advice == "a worker was ended by SIGKILL (often: out of memory)"
    starved = cause_of(SGLANG_DEAD, None, signal_name=None, starved="the kernel killed 1 process")
    assert starved.kind == "out_of_memory"
    assert "the kernel killed 1 process" in (starved.advice or "")


CRASH = """\
Loading
Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/x/kernels.py", line 31 in launch
  File "/x/model.py", line 7 in forward
"""


def test_a_crash_of_native_code_is_placed_by_the_fault_handlers_stack() -> None:
    death = cause_of(CRASH, None, signal_name="SIGSEGV", starved=None)
    assert death.cause == "Segmentation fault in launch (kernels.py:31)"
    assert death.kind == "crash"
    assert crash_place("no such line") is None
    assert "another one" in (cause_of("", None, signal_name="SIGILL", starved=None).advice or "")


USAGE = """\
usage: api_server.py [-h] [--max-model-len N] [--max-num-seqs N] [--dtype TYPE]
api_server.py: error: unrecognized arguments: --max-modle-len 2048 --frobnicate
"""


def test_a_misspelt_flag_has_its_nearest() -> None:
    death = cause_of(USAGE, None, signal_name=None, starved=None)
    assert death.kind == "flag"
    assert "--max-modle-len may be meant as --max-model-len;" in (death.advice or "")
    assert "--frobnicate" not in (death.advice or "")
    assert nearest_flags("error: argument --dtype: invalid choice: 'x'", USAGE) is None


@pytest.mark.parametrize(
    ("functions", "files", "log", "phase", "told"),
    [
        ("all_reduce (pynccl.py:9)", "", "vLLM is using nccl==2.27.7", "x", "NCCL_P2P_DISABLE=1"),
        ("", "", "", "weights_loaded", "sglang issue 15608"),
        ("register_graph_buffers (c.py:1)", "", "", "x", "--disable-custom-all-reduce"),
        (
            "acquire (_api.py:9)\nbuild (core.py:2)",
            f"{SITE}/flashinfer/jit/core.py",
            "",
            "x",
            "~/.cache/flashinfer",
        ),
        ("http_get (file_download.py:3)", "", "", "x", "HF_HUB_OFFLINE=1"),
        ("", "", "No available shared memory broadcast block found", "x", "engine core waits"),
        ("init_process_group (c10d.py:3)", "", "", "distributed", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_a_known_stall_has_its_advice(
    functions: str, files: str, log: str, phase: str, told: str
) -> None:
    assert told in " ".join(stall_advice(functions=functions, files=files, log=log, phase=phase))


def test_ranks_that_meet_over_gloo_are_not_sent_to_nccl() -> None:
    advice = stall_advice(functions="all_reduce (c10d.py:1)", files="", log="gloo", phase="x")
    assert len(advice) == 1
    assert "NCCL_P2P_DISABLE" not in advice[0]
    assert stall_advice(functions="acquire (x.py:1)", files="/x.py", log="", phase="x") == []


@given(st.lists(st.text(alphabet="ab", max_size=3), max_size=40), st.integers(1, 30))
def test_the_relevant_lines_end_with_the_last_and_hold_the_cause(lines: list[str], at: int) -> None:
    text = [*lines[:at], "THE CAUSE", *lines[at:]]
    shown = relevant_lines("\n".join(text), "THE CAUSE", 20)[-SHOWN_LINES:]
    assert "THE CAUSE" in shown
    assert shown[-1] == [line for line in text if line.strip()][-1]
    without = relevant_lines("\n".join(text), None, 20)
    assert without == tuple(line for line in text if line.strip())[-20:]


def counters(root: Path, *, group: int | None, machine: int, version: int = 2) -> dict[str, int]:
    """The counters as a kernel lays them out, for a process in the group /a/b."""
    proc, cgroups = root / "proc", root / "cgroup"
    name = "memory.events" if version == 2 else "memory.oom_control"
    line = "0::/a/b\n" if version == 2 else "5:devices:/\n4:memory:/a/b\n0::/\n"
    own = cgroups / "a/b" if version == 2 else cgroups / "memory/a/b"
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "self" / "cgroup").write_text(line)
    (proc / "vmstat").write_text(f"nr_free_pages 7\noom_kill {machine}\n")
    if group is not None:
        own.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(f"oom 9\noom_kill {group}\n")
    return oom_kills(proc, cgroups)


@pytest.mark.parametrize("version", [1, 2])
def test_what_the_kernel_killed_is_read_from_its_counters(tmp_path: Path, version: int) -> None:
    before = counters(tmp_path, group=3, machine=10, version=version)
    assert before == {"control group": 3, "machine": 10}
    after = counters(tmp_path, group=5, machine=12, version=version)
    assert killed_since(before, after) == (
        "the kernel killed 2 processes of its control group for want of memory"
    )
    assert killed_since(before, before) is None


def test_without_a_group_the_machines_count_is_told(tmp_path: Path) -> None:
    before = counters(tmp_path, group=None, machine=10)
    after = counters(tmp_path, group=None, machine=11)
    assert killed_since(before, after) == (
        "the kernel killed 1 process of this machine for want of memory"
    )
    assert oom_kills(tmp_path / "none", tmp_path / "none") == {}
    assert killed_since({}, after) is None  # nothing to compare with
