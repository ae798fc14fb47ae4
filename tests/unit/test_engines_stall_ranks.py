"""A start of several ranks that stalls: through the whole of EngineProcess, with real gloo ranks.

Their log speaks vLLM's phase lines; they are told apart by the names that their lines begin with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gloo_ranks import ENVIRONMENT, await_ranks

from engines.activity import tree
from engines.base import EngineFailed, Launch, ServeSpec
from engines.process import EngineProcess, free_port
from engines.vllm import VllmAdapter

RANKS = """
import datetime, os, subprocess, sys, threading
folder, world = sys.argv[1], int(sys.argv[2])
if len(sys.argv) == 3:
    print("INFO [model.py:1] Resolved architecture: LlamaForCausalLM", flush=True)
    each = [subprocess.Popen([sys.executable, __file__, folder, str(world), str(rank)],
                             env={**os.environ, "NCCL_SOCKET_IFNAME": f"eth{rank // 2}"})
            for rank in range(world)]
    sys.exit(max(one.wait() for one in each))
rank = int(sys.argv[3])
def say(text):
    print(f"(Worker_TP{rank} pid={os.getpid()}) INFO [x.py:1] {text}", flush=True)
import torch
import torch.distributed as dist
from gloo_ranks import tell_once_in
say(f"world_size={world} rank={rank} local_rank={rank} backend=gloo")
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", world), rank=rank,
                        world_size=world, timeout=datetime.timedelta(seconds=600))
say("Starting to load model /models/demo...")
def load_weights():
    say("Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]")
    if rank == 2:
        threading.Event().wait()
def determine_available_memory():
    dist.all_reduce(torch.ones(1))
tell_once_in(folder, rank, "all_reduce", "wait")
load_weights()
determine_available_memory()
"""
WORLD = 4


class Ranks(VllmAdapter):
    """vLLM's phases and causes over the program above."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check(self, spec: ServeSpec) -> None:
        pass

    def launch(self, spec: ServeSpec, workdir: Path) -> Launch:
        program = self.folder / "ranks.py"
        program.write_text(RANKS)
        argv = (sys.executable, str(program), str(self.folder), str(WORLD))
        return Launch(argv=argv, env=ENVIRONMENT)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[EngineProcess]:
    spec = ServeSpec(target=tmp_path, served_name="m", port=free_port())
    with EngineProcess(
        Ranks(tmp_path),
        spec,
        workdir=tmp_path / "work",
        log_path=tmp_path / "engine.log",
        deadline_s=600,
        patience=0.1,  # 4.5 s of standing still while weights are loaded
    ) as engine:
        yield engine


def test_the_odd_rank_is_named_and_nothing_stays(process: EngineProcess, tmp_path: Path) -> None:
    process.start()
    await_ranks(tmp_path, WORLD)  # their start is none of the stall, however long it stands still
    with pytest.raises(EngineFailed) as caught:
        process.wait_ready()
    error, text = caught.value, str(caught.value)
    assert error.kind == "stall"
    assert error.phase == "load_weights"
    assert "3 ranks in all_reduce (torch/distributed/" in text
    assert "rank 2 still in load_weights (ranks.py" in text
    assert "wait for one that never came" in text
    assert "NCCL_P2P_DISABLE" not in text  # these ranks meet over gloo

    stall = tmp_path / "stall"
    tails: Any = (stall / "log-tail.txt").read_text()
    assert all(f"== Worker_TP{rank}\n" in tails for rank in range(WORLD))
    environment = (stall / "environment.txt").read_text()
    assert environment.count("NCCL_SOCKET_IFNAME=eth1") == 2
    assert len(list(stall.glob("stack-*.txt"))) == WORLD + 1
    assert (stall / "kernel.txt").exists()
    assert process.pid is not None
    seen = tree(process.pid)
    assert len(seen) == WORLD + 1
    process.stop()
    _gone, alive = psutil.wait_procs(seen, timeout=120)
    assert not alive
    assert not os.path.exists(f"/proc/{process.pid}")
