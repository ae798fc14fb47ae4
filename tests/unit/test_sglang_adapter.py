"""The SGLang adapter: its command, environment and checks, without SGLang."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engines import sglang
from engines.base import EngineUsageError, ServeSpec
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
        tensors = {"fc.weight": torch.zeros(8, 24), "lm_head.weight": torch.zeros(32, 8)}
        save_file(tensors, path / "model.safetensors")
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


@pytest.mark.parametrize("what", ["target", "drafter"])
def test_a_config_of_no_model_is_a_usage_error(
    drafted: ServeSpec, tmp_path: Path, what: str
) -> None:
    odd = _folder(tmp_path / "odd", {})
    with pytest.raises(EngineUsageError, match=f"neither architectures nor model_type.* {what}"):
        SglangAdapter().check(replace(drafted, **{what: odd}))


def test_unreadable_config_is_a_usage_error(spec: ServeSpec, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(EngineUsageError, match="cannot be read"):
        SglangAdapter().check(replace(spec, target=tmp_path / "broken"))


def test_a_temperature_beside_a_drafter_is_refused_on_a_cpu(
    spec: ServeSpec, drafted: ServeSpec
) -> None:
    """There SGLang verifies greedily, so a sampled run would compare two different things."""
    hot = replace(drafted, temperature=0.7)
    baseline = replace(spec, temperature=0.7, pair_drafter=drafted.drafter)
    for refused in (hot, baseline):
        with pytest.raises(EngineUsageError, match=r"sampling\.temperature=0"):
            SglangAdapter().check(refused)
    SglangAdapter().check(replace(spec, temperature=0.7))


def test_forced_acceptance_keeps_the_real_draft_tokens(drafted: ServeSpec, tmp_path: Path) -> None:
    adapter = SglangAdapter()
    forced = replace(drafted, forced_length=2.5)
    adapter.check(forced)
    env = adapter.launch(forced, tmp_path).env
    assert env["SGLANG_SIMULATE_ACC_LEN"] == "2.5"
    assert env["SGLANG_SIMULATE_ACC_METHOD"] == "match-expected"
    assert env["SGLANG_SIMULATE_ACC_TOKEN_MODE"] == "real-draft-token"
    for plain in (drafted, replace(forced, drafter=None)):
        told = adapter.launch(plain, tmp_path).env
        assert not [name for name in told if "SIMULATE" in name]
    with pytest.raises(EngineUsageError, match="yields 1 to 4 tokens"):
        adapter.check(replace(drafted, forced_length=5))
