"""The SGLang adapter: command, environment, phases, failures and figures, without SGLang."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engines import sglang
from engines.base import EngineUsageError, ServeSpec
from engines.process import PhaseTracker
from engines.sglang import SglangAdapter

TARGET: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "dtype": "float32",
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
}
DRAFTER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "draft_vocab_size": 32,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]},
}


def _folder(path: Path, config: dict[str, Any], *, weights: bool = False) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if weights:
        save_file({"fc.weight": torch.zeros(8, 24)}, path / "model.safetensors")
    return path


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's environment is taken to be there; only its interpreter's path is needed."""
    monkeypatch.setattr(sglang, "_python", lambda spec: f"/env/{spec.device}/python")


@pytest.fixture
def spec(tmp_path: Path) -> ServeSpec:
    return ServeSpec(
        target=_folder(tmp_path / "target", TARGET),
        served_name="demo",
        port=4321,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        seed=7,
    )


@pytest.fixture
def drafted(spec: ServeSpec, tmp_path: Path) -> ServeSpec:
    return replace(spec, drafter=_folder(tmp_path / "drafter", DRAFTER, weights=True), k=3)


def _value(argv: tuple[str, ...], flag: str) -> str:
    assert argv.count(flag) == 1, f"{flag} in {argv}"
    return argv[argv.index(flag) + 1]


def test_baseline_command_on_a_cpu(spec: ServeSpec, tmp_path: Path) -> None:
    launch = SglangAdapter().launch(spec, tmp_path)
    assert launch.argv[:3] == ("/env/cpu/python", "-m", "sglang.launch_server")
    expected = {
        "--model-path": str(spec.target),
        "--served-model-name": "demo",
        "--host": "127.0.0.1",
        "--port": "4321",
        "--dtype": "float32",
        "--context-length": "512",
        "--max-running-requests": "4",
        "--random-seed": "7",
        "--device": "cpu",
        "--prefill-attention-backend": "intel_amx",
        "--decode-attention-backend": "intel_amx",
        "--max-total-tokens": str(4 * (512 + 8)),
    }
    assert {flag: _value(launch.argv, flag) for flag in expected} == expected
    assert {"--enable-metrics", "--disable-radix-cache", "--sleep-on-idle"} <= set(launch.argv)
    assert not [flag for flag in launch.argv if "speculative" in flag]
    assert launch.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert launch.env["TORCHDYNAMO_DISABLE"] == "1"
    assert (Path(launch.env["PYTHONPATH"]) / "sgl_kernel" / "__init__.py").is_file()


def test_speculative_command_differs_from_the_baseline_by_the_drafter_alone(
    spec: ServeSpec, drafted: ServeSpec, tmp_path: Path
) -> None:
    adapter = SglangAdapter()
    baseline, launch = adapter.launch(spec, tmp_path), adapter.launch(drafted, tmp_path)
    assert launch.env == baseline.env
    added = launch.argv[len(baseline.argv) :]
    assert launch.argv[: len(baseline.argv)] == baseline.argv
    assert dict(zip(added[::2], added[1::2], strict=True)) == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(tmp_path / "drafter-sglang"),
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
        "--speculative-draft-attention-backend": "intel_amx",
    }


@pytest.mark.parametrize(
    ("architecture", "ids"),
    [("DeepseekV3ForCausalLM", [2, 3, 5]), ("LlamaForCausalLM", [1, 2, 4])],
)
def test_layer_ids_are_written_in_sglangs_reading(
    drafted: ServeSpec, tmp_path: Path, architecture: str, ids: list[int]
) -> None:
    target = _folder(tmp_path / "other", {**TARGET, "architectures": [architecture]})
    launch = SglangAdapter().launch(replace(drafted, target=target), tmp_path / "work")
    folder = Path(_value(launch.argv, "--speculative-draft-model-path"))
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
    assert (folder / "model.safetensors").exists()


def test_nulls_are_left_out_of_the_drafters_config(drafted: ServeSpec, tmp_path: Path) -> None:
    drafter = _folder(tmp_path / "d", {**DRAFTER, "n_routed_experts": None}, weights=True)
    SglangAdapter().launch(replace(drafted, drafter=drafter), tmp_path)
    config = json.loads((tmp_path / "drafter-sglang" / "config.json").read_text())
    assert "n_routed_experts" not in config
    assert config["hidden_size"] == DRAFTER["hidden_size"]


def test_a_drafter_sglang_cannot_express_is_a_usage_error(
    drafted: ServeSpec, tmp_path: Path
) -> None:
    config = {**DRAFTER, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}
    drafter = _folder(tmp_path / "one", config, weights=True)
    with pytest.raises(EngineUsageError, match="begins with 1"):
        SglangAdapter().launch(replace(drafted, drafter=drafter), tmp_path)


def test_gpu_command_leaves_backends_to_the_profile(drafted: ServeSpec, tmp_path: Path) -> None:
    spec = replace(
        drafted,
        device="cuda",
        tensor_parallel=8,
        trust_remote_code=True,
        reasoning_parser="kimi_k2",
        extra_args=("--mem-fraction-static", "0.9"),
        extra_env={"NCCL_P2P_DISABLE": "1"},
    )
    launch = SglangAdapter().launch(spec, tmp_path)
    assert launch.argv[0] == "/env/cuda/python"
    assert _value(launch.argv, "--tp-size") == "8"
    assert _value(launch.argv, "--reasoning-parser") == "kimi_k2"
    assert launch.argv[-2:] == ("--mem-fraction-static", "0.9")
    assert "--trust-remote-code" in launch.argv
    assert not [flag for flag in launch.argv if "attention-backend" in flag]
    assert launch.env["NCCL_P2P_DISABLE"] == "1"
    assert not {"SGLANG_USE_CPU_ENGINE", "PYTHONPATH"} & set(launch.env)


def test_cache_size_in_gib_becomes_tokens(drafted: ServeSpec, tmp_path: Path) -> None:
    launch = SglangAdapter().launch(replace(drafted, kv_cache_gib=0.5), tmp_path)
    # 6 layers and the drafter's one, 512 + 64 values of 4 bytes
    assert _value(launch.argv, "--max-total-tokens") == str(2**29 // (7 * 576 * 4))


def test_extra_arguments_come_last_and_threads_are_passed_on(
    spec: ServeSpec, tmp_path: Path
) -> None:
    spec = replace(spec, threads=3, extra_args=("--log-level", "debug"), extra_env={"A": "b"})
    launch = SglangAdapter().launch(spec, tmp_path)
    assert launch.argv[-2:] == ("--log-level", "debug")
    assert launch.env["OMP_NUM_THREADS"] == "3" and launch.env["A"] == "b"


def test_check_takes_a_good_specification(drafted: ServeSpec) -> None:
    SglangAdapter().check(drafted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel = 2"),
        ({"k": 0}, "k = 0"),
        ({"target": Path("/nowhere")}, "target /nowhere has no config.json"),
        ({"drafter": Path("/nowhere")}, "drafter /nowhere has no config.json"),
    ],
)
def test_check_refuses(drafted: ServeSpec, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineUsageError, match=message):
        SglangAdapter().check(replace(drafted, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, "YaRN rope only"),
        ({"rope_parameters": None}, "YaRN rope only"),
        ({"moe_layer_freq": ...}, 'add "moe_layer_freq": 1'),
        ({"topk_method": ..., "scoring_func": ...}, '"topk_method": "noaux_tc", "scoring_func"'),
    ],
)
def test_check_refuses_a_target_the_cpu_path_cannot_serve(
    spec: ServeSpec, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = {key: value for key, value in {**TARGET, **change}.items() if value is not ...}
    target = _folder(tmp_path / "changed", config)
    with pytest.raises(EngineUsageError, match=message):
        SglangAdapter().check(replace(spec, target=target))


def test_unreadable_config_is_a_usage_error(spec: ServeSpec, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(EngineUsageError, match="cannot be read"):
        SglangAdapter().check(replace(spec, target=tmp_path / "broken"))


LOG = """\
[2026-01-01 10:00:00] server_args={'model_path': 'x'}
[2026-01-01 10:00:03] Init parallel begin.
[2026-01-01 10:00:03] Init parallel ends. elapsed=0.02 s
[2026-01-01 10:00:05] Load weight begin. avail mem=20.49 GB
[2026-01-01 10:00:06] Load weight end. elapsed=0.12 s, type=DeepseekV3ForCausalLM
[2026-01-01 10:00:06] Load weight begin. avail mem=20.45 GB
[2026-01-01 10:00:07] Load weight end. elapsed=0.01 s, type=Eagle3DeepseekV2ForCausalLM
[2026-01-01 10:00:07] KV Cache is allocated. dtype: torch.float32, #tokens: 16384
[2026-01-01 10:00:07] Memory pool end. avail mem=20.35 GB
[2026-01-01 10:00:08] Capture draft decode CUDA graph begin. backend=full, bs=[1, 2]
[2026-01-01 10:00:09] Capture draft decode CUDA graph end. elapsed=1.00 s
[2026-01-01 10:00:09] max_total_num_tokens=16384, chunked_prefill_size=4096
[2026-01-01 10:00:09] Engine startup timings (s): load_weight=0.13
[2026-01-01 10:00:10] The server is fired up and ready to roll!
"""


def test_phases_follow_the_log() -> None:
    tracker = PhaseTracker(SglangAdapter.phases)
    for second, line in enumerate(LOG.splitlines(), start=1):
        tracker.feed(line, float(second))
    assert [timing.phase for timing in tracker.timings(None)] == [
        "launch",
        "start_workers",
        "distributed",
        "import_models",
        "load_weights",
        "weights_loaded",
        "load_weights",
        "weights_loaded",
        "kv_cache",
        "memory_pool",
        "graph_capture",
        "graph_captured",
        "scheduler",
        "warmup",
        "ready",
    ]


SCHEDULER_DEATH = """\
[2026-01-01 10:00:01] Responses API disabled: failed (ModuleNotFoundError: No module named 'x')
[2026-01-01 10:00:07] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 6368, in run_scheduler_process
    scheduler.run_event_loop()
RuntimeError: Expected size for first two dimensions of batch2 tensor to be: [4, 128]

[2026-01-01 10:00:07] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
Traceback (most recent call last):
  File "launch_server.py", line 1
EOFError: the pipe closed
"""
CHAINED = """\
Traceback (most recent call last):
  File "hub.py", line 1
huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "hub.py", line 595
OSError: /nowhere is no model
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            SCHEDULER_DEATH,
            "RuntimeError: Expected size for first two dimensions of batch2 tensor to be: [4, 128]",
        ),
        (CHAINED, "OSError: /nowhere is no model"),
        (
            "usage: sglang serve [-h]\nsglang serve: error: unrecognized arguments: --bogus 3\n",
            "unrecognized arguments: --bogus 3",
        ),
        (
            "Traceback (most recent call last):\nhub.errors.FieldError: Invalid 'experts':\n"
            "    TypeError: expected int, got NoneType\n",
            "hub.errors.FieldError: Invalid 'experts': TypeError: expected int, got NoneType",
        ),
        (LOG, None),
        ("", None),
    ],
)
def test_failure_cause(log: str, cause: str | None) -> None:
    assert SglangAdapter().failure_cause(log) == cause


METRICS = """\
# HELP sglang:spec_verify_calls_total Number of speculative decoding verification calls.
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{engine_type="unified",model_name="m"} 7.0
# HELP sglang:generation_tokens_total x
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 28.0
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 8.0
# HELP sglang:prompt_tokens_total x
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 11.0
# HELP sglang:num_requests_total x
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{is_streaming="true",model_name="m"} 2.0
# HELP sglang:num_running_reqs x
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",pp_rank="0",tp_rank="0",dp_rank="0"} 1.0
sglang:num_running_reqs{model_name="m",pp_rank="0",tp_rank="0",dp_rank="1"} 2.0
sglang:num_running_reqs{model_name="m",pp_rank="0",tp_rank="1",dp_rank="0"} 1.0
# HELP sglang:num_queue_reqs x
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",pp_rank="0",tp_rank="0"} 0.0
"""


def test_counters_sum_labels_and_data_parallel_ranks_only() -> None:
    counters = SglangAdapter().counters(METRICS)
    assert counters is not None
    assert (counters.drafts, counters.generation_tokens, counters.prompt_tokens) == (7, 36, 11)
    assert (counters.requests_finished, counters.running, counters.waiting) == (2, 3, 0)
    assert counters.drafted is None and counters.accepted is None
    assert counters.accepted_per_position is None


def test_counters_of_a_baseline_have_no_drafts_and_foreign_text_is_none() -> None:
    adapter = SglangAdapter()
    lines = [line for line in METRICS.splitlines() if "spec_verify" not in line]
    counters = adapter.counters("\n".join(lines) + "\n")
    assert counters is not None and counters.drafts is None
    assert adapter.counters("# TYPE other gauge\nother 1\n") is None


def test_request_fields_ask_for_ids_only_where_they_can_be_streamed() -> None:
    adapter = SglangAdapter()
    assert adapter.request_fields(speculative=False) == {}
    assert adapter.request_fields(speculative=True) == {"return_spec_tokens_details": True}
    assert adapter.request_fields(speculative=False, endpoint="completions") == {
        "return_token_ids": True
    }


def _payloads(details: Any) -> list[dict[str, Any]]:
    return [
        {"choices": [{"text": "a"}], "usage": None},
        {"choices": [], "usage": None, "sglext": {"spec_tokens_details": details}},
        {"choices": [], "usage": {"completion_tokens": 48}},
    ]


def test_request_acceptance_leaves_the_prefills_token_out() -> None:
    # 48 tokens of 38 verify steps: SGLang says length 48/38, the drafts say 1 + 9/38 = 47/38.
    details = {
        "spec_accept_length": 48 / 38,
        "spec_num_correct_drafts": 9,
        "spec_num_proposed_drafts": 114,
        "spec_verify_ct": 38,
        "spec_correct_drafts_histogram": [30, 7, 1],
    }
    found = SglangAdapter().request_acceptance(_payloads(details))
    assert found is not None
    assert (found.drafts, found.drafted, found.accepted) == (38, 114, 9)
    assert found.histogram == (30, 7, 1, 0)
    assert 1 + found.accepted / found.drafts == pytest.approx(47 / 38)
    assert SglangAdapter().request_acceptance(_payloads([details])) == found


@pytest.mark.parametrize("details", [None, {}, [], {"spec_verify_ct": 0}])
def test_request_acceptance_of_an_answer_without_verify_steps_is_none(details: Any) -> None:
    assert SglangAdapter().request_acceptance(_payloads(details)) is None
    assert SglangAdapter().request_acceptance([]) is None


@given(st.integers(1, 8), st.lists(st.integers(0, 8), min_size=1, max_size=50))
def test_request_acceptance_agrees_with_the_steps_it_was_made_of(k: int, steps: list[int]) -> None:
    steps = [min(step, k) for step in steps]
    histogram = [steps.count(j) for j in range(max(steps) + 1)]
    details = {
        "spec_num_correct_drafts": sum(steps),
        "spec_num_proposed_drafts": k * len(steps),
        "spec_verify_ct": len(steps),
        "spec_correct_drafts_histogram": histogram,
    }
    found = SglangAdapter().request_acceptance(_payloads(details))
    assert found is not None and found.histogram is not None
    assert len(found.histogram) == k + 1 and sum(found.histogram) == found.drafts
    assert sum(j * n for j, n in enumerate(found.histogram)) == found.accepted == sum(steps)


def test_a_histogram_that_contradicts_the_steps_is_dropped() -> None:
    details = {"spec_verify_ct": 5, "spec_num_proposed_drafts": 15, "spec_num_correct_drafts": 2}
    found = SglangAdapter().request_acceptance(_payloads(details))
    assert found is not None and found.histogram is None and found.accepted == 2
