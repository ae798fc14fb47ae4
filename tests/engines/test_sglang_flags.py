"""Every flag the SGLang adapter writes is one that the installed SGLang's own parser takes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from engines.base import EngineUsageError, ServeSpec
from engines.install import engine_python
from engines.sglang import SglangAdapter

pytestmark = pytest.mark.engine

PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
read = []
for argv in json.load(sys.stdin):
    args = vars(parser.parse_args(argv))
    read.append({key: args[key] for key in (
        "model_path", "served_model_name", "host", "port", "dtype", "context_length", "tp_size",
        "max_running_requests", "random_seed", "enable_metrics", "disable_radix_cache", "device",
        "max_total_tokens", "reasoning_parser", "speculative_num_steps", "speculative_eagle_topk",
        "speculative_num_draft_tokens", "speculative_algorithm", "speculative_draft_model_path",
        "mem_fraction_static", "sleep_on_idle", "log_level_http", "trust_remote_code")})
json.dump(read, sys.stdout)
"""


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return engine_python("sglang-cpu")
    except EngineUsageError as error:
        pytest.skip(str(error))


def test_sglangs_parser_reads_what_the_adapter_meant(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The GPU environment cannot be here; the parser is the same.
    monkeypatch.setattr("engines.sglang._python", lambda spec: str(python))
    monkeypatch.setattr("engines.sglang.for_engine", lambda src, engine, target, out: out)
    monkeypatch.setattr("engines.sglang.drop_nulls", lambda path: None)
    baseline = ServeSpec(
        target=tmp_path, served_name="m", port=4321, dtype="float32", max_model_len=512, seed=7
    )
    speculative = replace(baseline, drafter=tmp_path, k=5)
    gpu = replace(
        speculative,
        device="cuda",
        tensor_parallel=8,
        trust_remote_code=True,
        reasoning_parser="kimi_k2",
        extra_args=("--mem-fraction-static", "0.9", "--attention-backend", "flashinfer"),
    )
    adapter = SglangAdapter()
    specs = (baseline, speculative, gpu)
    argvs = [list(adapter.launch(spec, tmp_path / "work").argv[3:]) for spec in specs]
    done = subprocess.run(
        [python, "-c", PARSE],
        input=json.dumps(argvs),
        env={**adapter.launch(baseline, tmp_path).env, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read = json.loads(done.stdout.splitlines()[-1])
    for args in read:
        assert args["model_path"] == str(tmp_path) and args["served_model_name"] == "m"
        assert (args["host"], args["port"], args["dtype"]) == ("127.0.0.1", 4321, "float32")
        assert (args["context_length"], args["max_running_requests"]) == (512, 16)
        assert args["random_seed"] == 7 and args["log_level_http"] == "warning"
        assert args["enable_metrics"] and args["disable_radix_cache"]
    assert read[0]["speculative_algorithm"] is None and read[0]["device"] == "cpu"
    for args in read[1:]:
        assert args["speculative_algorithm"] == "EAGLE3"
        assert (args["speculative_num_steps"], args["speculative_eagle_topk"]) == (5, 1)
        assert args["speculative_num_draft_tokens"] == 6
        assert args["speculative_draft_model_path"] == str(tmp_path / "work" / "drafter-sglang")
    assert (read[2]["tp_size"], read[2]["device"]) == (8, "cuda")
    assert read[2]["trust_remote_code"] and read[2]["reasoning_parser"] == "kimi_k2"
    assert read[2]["mem_fraction_static"] == 0.9
