"""SGLang: how it is started, on a CPU and on GPUs, and how its figures are read.

Read against SGLang 0.5.23. Three of its habits shape what is here:

- It adds 1 to given aux layer ids on Llama-family targets and, on DeepSeek and Kimi targets, only
  where the first id is 1; `drafters.formats` writes the list that ends up right.
- Its gauges of acceptance cover the last log interval only and it counts no accepted tokens, so
  the counters hold verify calls alone and the rest comes from each request's answer.
- Its acceptance length counts the token of the prefill; the draft counts beside it do not.

On a CPU it runs with the `sgl_kernel` module of `engines/sglang_cpu` (see `docs/sglang-cpu.md`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.formats import for_engine, text_config
from drafters.spec import DrafterError
from engines.arguments import check_arguments
from engines.base import (
    EngineUsageError,
    Launch,
    PhaseMark,
    RequestAcceptance,
    ServeSpec,
    SpecCounters,
    check_forced,
)
from engines.cache_size import kv_size, kv_width
from engines.checkpoint import check_named, drop_nulls, read_config
from engines.prometheus import Sample, first, once, parse, rank_counters

KERNEL_PATH = Path(__file__).with_name("sglang_cpu")
CPU_BACKENDS = (
    *("--prefill-attention-backend", "intel_amx"),
    *("--decode-attention-backend", "intel_amx"),
)
CPU_KV_TOKENS = 65536
"""The most KV-cache slots a CPU server is given where the specification names no size."""
CPU_MEMORY_FRACTION = "0.8"
_MOE_KEYS = {"topk_method": '"noaux_tc"', "scoring_func": '"sigmoid"', "moe_layer_freq": "1"}


class SglangAdapter:
    """SGLang in an environment of its own, as `python -m sglang.launch_server`."""

    name = "sglang"
    phases = (
        PhaseMark(phase="start_workers", pattern=r"\bserver_args="),
        PhaseMark(phase="distributed", pattern=r"Init parallel begin"),
        PhaseMark(phase="import_models", pattern=r"Init parallel ends"),
        # Both again for the drafter.
        PhaseMark(phase="load_weights", pattern=r"Load weight begin"),
        PhaseMark(phase="weights_loaded", pattern=r"Load weight end"),
        PhaseMark(phase="kv_cache", pattern=r"KV Cache is allocated"),
        PhaseMark(phase="memory_pool", pattern=r"Memory pool end"),
        PhaseMark(phase="graph_capture", pattern=r"Capture .*graph begin"),
        PhaseMark(phase="graph_captured", pattern=r"Capture .*graph end"),
        PhaseMark(phase="scheduler", pattern=r"\bmax_total_num_tokens="),
        PhaseMark(phase="warmup", pattern=r"Engine startup timings"),
        PhaseMark(phase="ready", pattern=r"The server is fired up and ready to roll"),
    )
    ready_path = "/ready"
    metrics_path: str | None = "/metrics"

    def environment(self, spec: ServeSpec) -> str | None:
        """On a CPU the one with our kernels, elsewhere the one for CUDA."""
        return "sglang-cpu" if spec.device == "cpu" else "sglang"

    def check(self, spec: ServeSpec) -> None:
        """Raise `EngineUsageError` if SGLang is not installed or cannot serve `spec`."""
        check_arguments(self.name, spec.extra_args, Path(_python(spec)))
        config = check_named(spec.target, "target")
        if spec.device == "cpu":
            _check_cpu(spec, config)
        if spec.drafter is not None:
            check_named(spec.drafter, "drafter")
            if spec.k < 1:
                raise EngineUsageError(f"k = {spec.k}: SGLang drafts at least 1 token a step")
            check_forced(spec)

    def launch(self, spec: ServeSpec, workdir: Path) -> Launch:
        """The command for `spec`. A drafter is translated into `workdir`/drafter-sglang."""
        argv = [_python(spec), "-m", "sglang.launch_server", *_common_args(spec)]
        env = {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        if spec.device == "cpu":
            argv += _cpu_args(spec)
            env |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                # Compiling takes longer than this CPU's requests do: the first took 16 s.
                "TORCHDYNAMO_DISABLE": "1",
                "PYTHONPATH": str(KERNEL_PATH),
                # One core computes, the others serve HTTP, tokenise and detokenise.
                "OMP_NUM_THREADS": str(spec.threads or _default_threads()),
            }
        else:
            argv += ["--device", spec.device, "--tp-size", str(spec.tensor_parallel)]
            argv += _node_args(spec)
            if spec.threads is not None:
                env["OMP_NUM_THREADS"] = str(spec.threads)
        if spec.drafter is not None:
            argv += _speculative_args(spec, workdir)
            env |= _forced(spec)
        return Launch(argv=(*argv, *spec.extra_args), env={**env, **spec.extra_env})

    def failure_cause(self, log_text: str) -> str | None:
        """The exception that ended the scheduler, else the last one of the log, else the usage
        error of its command line."""
        scheduler = re.search(r"hit an exception: Traceback.*?(?=^\[20|\Z)", log_text, _BLOCK)
        for text in (scheduler.group(0) if scheduler else "", log_text):
            errors = _EXCEPTION.findall(text)
            if errors:
                return " ".join(errors[-1].split())
        usage = re.search(r"^sglang.*?: error: (.+)$", log_text, re.MULTILINE)
        return usage.group(1) if usage else None

    def counters(self, metrics_text: str) -> SpecCounters | None:
        """Verify calls and traffic; counted by SGLang when a request finishes.

        Accepted and drafted tokens are None: SGLang counts neither. Returns None where the text
        holds no metric of SGLang's.
        """
        samples = once(parse(metrics_text))
        totals = _totals(samples)
        if not totals:
            return None
        return SpecCounters(
            drafts=totals.get("spec_verify_calls_total"),
            generation_tokens=totals.get("generation_tokens_total"),
            prompt_tokens=totals.get("prompt_tokens_total"),
            requests_finished=totals.get("num_requests_total"),
            running=totals.get("num_running_reqs"),
            waiting=totals.get("num_queue_reqs"),
            process_start_s=first(samples, "process_start_time_seconds"),
            ranks=rank_counters(
                samples,
                drafts="sglang:spec_verify_calls_total",
                tokens="sglang:generation_tokens_total",
            ),
        )

    def request_fields(self, *, speculative: bool, endpoint: str = "chat") -> Mapping[str, Any]:
        """Token ids where `endpoint` ("chat" or "completions") can stream them, and acceptance.

        SGLang refuses `return_token_ids` in a streamed chat completion with HTTP 400
        (`entrypoints/openai/serving_chat.py`); there, usage in every chunk gives the counts.
        """
        fields: dict[str, Any] = {}
        if endpoint == "completions":
            fields["return_token_ids"] = True
        if speculative:
            fields["return_spec_tokens_details"] = True
        return fields

    def request_acceptance(self, payloads: list[dict[str, Any]]) -> RequestAcceptance | None:
        """One request's verify steps from `sglext.spec_tokens_details`, sent before the usage.

        The counts of draft tokens are used, never `spec_accept_length`, which divides all output
        tokens, the prefill's first among them, by the verify steps. None for an answer without
        verify steps, such as one of a single token.
        """
        details = _spec_details(payloads)
        steps = int(details.get("spec_verify_ct") or 0) if details else 0
        if not details or steps == 0:
            return None
        drafted = int(details.get("spec_num_proposed_drafts") or 0)
        histogram = [int(n) for n in details.get("spec_correct_drafts_histogram") or []]
        histogram += [0] * (drafted // steps + 1 - len(histogram))
        return RequestAcceptance(
            drafts=steps,
            drafted=drafted or None,
            accepted=int(details.get("spec_num_correct_drafts") or 0),
            histogram=tuple(histogram) if sum(histogram) == steps else None,
        )


_BLOCK = re.DOTALL | re.MULTILINE
# A message that ends with a colon goes on in the next line.
_EXCEPTION = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b(?:.*:\n[^\n]+|.*)$", re.MULTILINE
)


def _python(spec: ServeSpec) -> str:
    """The interpreter of SGLang's environment. Raises `EngineUsageError` if there is none."""
    from engines.install import engine_python

    if spec.python is not None:
        return str(spec.python)
    return str(engine_python("sglang-cpu" if spec.device == "cpu" else "sglang"))


def _default_threads() -> int:
    return max(1, (os.cpu_count() or 2) // 2)


def _check_cpu(spec: ServeSpec, config: dict[str, Any]) -> None:
    """What SGLang's CPU path cannot do, or would do wrong."""
    if spec.tensor_parallel != 1:
        raise EngineUsageError(
            f"tensor_parallel = {spec.tensor_parallel}: SGLang runs on this CPU as one process; "
            "set it to 1"
        )
    if spec.temperature > 0 and (spec.drafter or spec.pair_drafter) is not None:
        raise EngineUsageError(
            f"temperature = {spec.temperature:g}: with a drafter SGLang verifies greedily on a "
            "CPU, whatever the temperature; set sampling.temperature=0, or use another engine"
        )
    text = text_config(config)
    if "kv_lora_rank" not in text:
        return
    where = spec.target / "config.json"
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) not in ("yarn", "deepseek_yarn"):
        raise EngineUsageError(
            f"{where}: SGLang serves latent attention on a CPU with YaRN rope only; serve this "
            "target with another engine, or with YaRN rope parameters"
        )
    missing = [key for key in _MOE_KEYS if text.get("n_routed_experts") and key not in text]
    if missing:
        wanted = ", ".join(f'"{key}": {_MOE_KEYS[key]}' for key in missing)
        raise EngineUsageError(f"{where} lacks what SGLang reads of it: add {wanted}")


def _common_args(spec: ServeSpec) -> list[str]:
    args = ["--model-path", str(spec.target.resolve()), "--served-model-name", spec.served_name]
    args += ["--host", spec.host, "--port", str(spec.port), "--dtype", spec.dtype]
    args += ["--context-length", str(spec.max_model_len)]
    if spec.max_num_seqs is not None:
        args += ["--max-running-requests", str(spec.max_num_seqs)]
    args += ["--random-seed", str(spec.seed), "--enable-metrics", "--log-level-http", "warning"]
    # A prefix cached by one variant's warm-up must not help it over the other.
    args.append("--disable-radix-cache")
    if spec.kv_cache_gib is not None:
        args += ["--max-total-tokens", str(_kv_tokens(spec))]
    if spec.trust_remote_code:
        args.append("--trust-remote-code")
    if spec.reasoning_parser is not None:
        args += ["--reasoning-parser", spec.reasoning_parser]
    return args


def _cpu_args(spec: ServeSpec) -> list[str]:
    args = ["--device", "cpu", *CPU_BACKENDS, "--mem-fraction-static", CPU_MEMORY_FRACTION]
    # An idle scheduler otherwise spins on a core, also while the other variant is measured.
    args.append("--sleep-on-idle")
    if spec.kv_cache_gib is None:
        # Room for every sequence's draft tokens beside its own.
        each = spec.max_model_len + 2 * (spec.k + 1)
        most = max(CPU_KV_TOKENS, each)
        tokens = most if spec.max_num_seqs is None else min(spec.max_num_seqs * each, most)
        args += ["--max-total-tokens", str(tokens)]
    return args


def _node_args(spec: ServeSpec) -> list[str]:
    """SGLang's launcher for several nodes: the same command on each, but for the rank."""
    if spec.nodes == 1:
        return []
    args = ["--nnodes", str(spec.nodes), "--node-rank", str(spec.node_rank)]
    return [*args, "--dist-init-addr", ":".join(spec.head_address())]


def _kv_tokens(spec: ServeSpec) -> int:
    """How many tokens' keys and values fit into `kv_cache_gib` on each device."""
    assert spec.kv_cache_gib is not None
    text = text_config(read_config(spec.target, "target"))
    try:
        layers = int(text["num_hidden_layers"]) + (spec.drafter is not None)
        width, _ = kv_width(text, spec.tensor_parallel)
        bytes_a_token = layers * width * kv_size(text, spec)
        return max(1, int(spec.kv_cache_gib * 2**30) // bytes_a_token)
    except KeyError as error:
        raise EngineUsageError(f"{spec.target / 'config.json'} lacks the key {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise EngineUsageError(
            f"{spec.target / 'config.json'}: the model's sizes cannot be read: {error}"
        ) from None


def _speculative_args(spec: ServeSpec, workdir: Path) -> list[str]:
    """Chain drafting of `k` tokens: one branch, k steps, k + 1 tokens verified."""
    folder = _translated(spec, workdir)
    args = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder)]
    args += ["--speculative-num-steps", str(spec.k), "--speculative-eagle-topk", "1"]
    args += ["--speculative-num-draft-tokens", str(spec.k + 1)]
    if spec.device == "cpu":
        args += ["--speculative-draft-attention-backend", "intel_amx"]
    return args


def _translated(spec: ServeSpec, workdir: Path) -> Path:
    """The drafter folder as SGLang reads it. Raises `EngineUsageError`."""
    assert spec.drafter is not None
    if spec.as_given:
        return spec.drafter
    try:
        out = workdir.resolve() / "drafter-sglang"
        folder = for_engine(spec.drafter, "sglang", spec.target, out)
    except DrafterError as error:
        raise EngineUsageError(str(error)) from None
    drop_nulls(folder / "config.json")
    return folder


def _forced(spec: ServeSpec) -> dict[str, str]:
    """What makes SGLang accept so many tokens: the floor or the ceiling of the length a step.

    One draw a step for the whole batch. Its default puts token 100 in place of every draft; the
    real draft tokens keep the experts and the drafter busy as they would be.
    """
    if spec.forced_length is None:
        return {}
    return {
        "SGLANG_SIMULATE_ACC_LEN": f"{spec.forced_length:g}",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }


def _totals(samples: list[Sample]) -> dict[str, int]:
    """SGLang's own metrics by name without the prefix, summed over labels."""
    totals: dict[str, float] = {}
    for sample in samples:
        if not sample.name.startswith("sglang:"):
            continue
        name = sample.name.removeprefix("sglang:")
        totals[name] = totals.get(name, 0.0) + sample.value
    return {name: round(value) for name, value in totals.items() if math.isfinite(value)}


def _spec_details(payloads: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The last `spec_tokens_details` of the answer's objects; of several choices, the first."""
    for payload in reversed(payloads):
        details = (payload.get("sglext") or {}).get("spec_tokens_details")
        if isinstance(details, list):
            details = details[0] if details else None
        if isinstance(details, dict):
            return details
    return None
