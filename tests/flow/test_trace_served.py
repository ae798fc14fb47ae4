"""The reference engine as a server that traces: its option, its plugin, the clients' own ids."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engines.base import ServeSpec
from engines.catalog import adapter
from engines.process import EngineProcess, free_port
from engines.trace.launch import begin, traced
from engines.trace.read import read_whole

PLUGIN = """
class Doubled:
    def __init__(self, inner):
        self.inner, self.k, self.aux_layers = inner, inner.k, inner.aux_layers

    def begin(self, slot, tokens, aux):
        self.inner.begin(slot, tokens, aux * 2)

    def record(self, starts, accepted, tokens, aux):
        self.inner.record(starts, accepted, tokens, aux * 2)

    def move(self, source, target):
        self.inner.move(source, target)

    def propose(self, rows, params, uniform):
        return self.inner.propose(rows, params, uniform)


def plant(engine):
    engine.proposer = Doubled(engine.proposer)
"""


def ask(url: str, request: str, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 12}
    body |= {"ignore_eos": True, "return_token_ids": True}
    headers = {"content-type": "application/json", "X-Request-Id": request}
    http = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(http, timeout=300) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def test_a_traced_server_with_a_plugin(demo_pair: Path, tmp_path: Path) -> None:
    plugin, folder = tmp_path / "plugin.py", tmp_path / "trace"
    plugin.write_text(PLUGIN)
    spec = ServeSpec(
        target=demo_pair / "target",
        served_name="m",
        port=free_port(),
        drafter=demo_pair / "drafter-mla",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        extra_args=("--plugin", f"{plugin}:plant"),
    )
    told = traced("reference", spec, folder)
    told = replace(told, threads=1)
    log = tmp_path / "log"
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(5, 700, (n,), generator=generator).tolist() for n in (9, 30, 4)]
    with EngineProcess(
        adapter("reference"), told, workdir=tmp_path, log_path=log, deadline_s=600
    ) as engine:
        engine.start()
        engine.wait_ready()
        begin("reference", engine.base_url, folder)
        with ThreadPoolExecutor(3) as pool:
            answers = list(
                pool.map(ask, [engine.base_url] * 3, ["run-0", "run-1", "run-2"], prompts)
            )
        trace = read_whole(folder)  # whole before the engine has ended
    assert trace.problems == ()
    assert set(trace.steps) == {"run-0", "run-1", "run-2"}
    from engines.reference.loading import load_engine

    ours = load_engine(demo_pair / "target", dtype="float32", max_len=256, slots=1)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        steps = trace.steps[f"run-{i}"]
        ids = torch.cat([step.token_ids[: step.valid] for step in steps]).tolist()
        text = prompt + answer["choices"][0]["token_ids"]
        assert ids[: len(text)] == text[: len(ids)]
        figures = answer["metrics"]["speculative_decoding"]
        assert [step.valid - 1 for step in steps[1:]] == figures["per_step_accepted"]
        wanted = ours.capture(ids, (2, 4, 5)).flatten(1) * 2
        found = torch.cat([step.aux[: step.valid] for step in steps])
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
