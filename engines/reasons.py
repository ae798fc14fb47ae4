"""Why the adapters write each argument and variable: what `engines show` prints beside it.

A reason may name a key of the plan: where the profile gives a reason for that key, it stands in
place of the one here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """`key`: the key of the plan that the value comes from, where it comes from one."""

    text: str
    key: str | None = None


_SERVER = {
    "--served-model-name": Reason("the model's name in requests", "target.served_name"),
    "--host": Reason("only this machine's clients: the load is driven from here"),
    "--port": Reason("the plan's, else a free one at each start", "engine.port"),
    "--dtype": Reason("precision of weights and activations; both variants alike", "engine.dtype"),
    "--trust-remote-code": Reason(
        "the checkpoint brings code of its own for config or tokenizer", "engine.trust_remote_code"
    ),
    "--reasoning-parser": Reason(
        "reasoning and answer are told apart in the stream", "engine.reasoning_parser"
    ),
}
_SEED = Reason("the same in both variants and at every start", "seed")
_CONTEXT = Reason("longest prompt and answer together, in tokens", "engine.max_model_len")
_BATCH = Reason("requests computed at once; above every concurrency", "engine.max_num_seqs")
_TENSOR = Reason("each layer is cut over so many GPUs", "engine.tensor_parallel")
_OFFLINE = Reason("a start never waits for the network: the checkpoints are on disk")
_NODES = Reason("machines that serve the model together", "engine.nodes")
_RANK = Reason("this machine's number; the first, 0, answers requests")
_HEAD = Reason("where the machines meet: the first one", "engine.head")
_THREADS = Reason("cores that compute", "engine.threads")
_KV = Reason("room for keys and values", "engine.kv_cache_gib")
_FORCED = Reason("acceptance is forced: the output is wrong", "speculative.forced_length")
_NO_PREFIX_CACHE = Reason(
    "a prompt that comes back costs what it cost the first time, in both variants"
)

_VLLM = {
    **_SERVER,
    "--model": Reason("the target", "target.path"),
    "--max-model-len": _CONTEXT,
    "--max-num-seqs": _BATCH,
    "--seed": _SEED,
    "--no-enable-prefix-caching": _NO_PREFIX_CACHE,
    "--disable-uvicorn-access-log": Reason("a line a request would bury the start-up phases"),
    "--kv-cache-memory-bytes": _KV,
    "--tensor-parallel-size": _TENSOR,
    "--distributed-executor-backend": Reason("vLLM's own worker processes, no Ray"),
    "--nnodes": _NODES,
    "--node-rank": _RANK,
    "--master-addr": _HEAD,
    "--master-port": _HEAD,
    "--headless": Reason("workers alone: the first machine has the API server"),
    "--enforce-eager": Reason("on a CPU compiling takes longer than what is measured"),
    "--attention-backend": Reason("the CPU's exact one; with AMX vLLM takes one of bfloat16 alone"),
    "--speculative-config": Reason(
        "EAGLE-3, so many draft tokens a verify step, and the drafter's folder", "speculative.k"
    ),
    "--per-request-spec-decode-metrics": Reason("acceptance of each request, step by step"),
    "HF_HUB_OFFLINE": _OFFLINE,
    "VLLM_NO_USAGE_STATS": Reason("nothing is sent to anyone"),
    "PYTHONPATH": Reason("nothing of the harness is seen by the engine"),
    "VLLM_CPU_KVCACHE_SPACE": _KV,
    "VLLM_CPU_OMP_THREADS_BIND": _THREADS,
    "VLLM_MLA_DISABLE": Reason("a Llama head and MLA share no block size on a CPU"),
    "LD_PRELOAD": Reason("Intel's OpenMP: verify steps are slow without it"),
}
_SGLANG = {
    **_SERVER,
    "--model-path": Reason("the target", "target.path"),
    "--context-length": _CONTEXT,
    "--max-running-requests": _BATCH,
    "--random-seed": _SEED,
    "--enable-metrics": Reason("the counters of verify steps and tokens"),
    "--log-level-http": Reason("a line a request would bury the start-up phases"),
    "--disable-radix-cache": _NO_PREFIX_CACHE,
    "--max-total-tokens": _KV,
    "--device": Reason("where it computes", "engine.device"),
    "--tp-size": _TENSOR,
    "--nnodes": _NODES,
    "--node-rank": _RANK,
    "--dist-init-addr": _HEAD,
    "--prefill-attention-backend": Reason("the one that verifies drafts on a CPU"),
    "--decode-attention-backend": Reason("the one that verifies drafts on a CPU"),
    "--mem-fraction-static": Reason("of the machine's memory: room for weights and cache"),
    "--sleep-on-idle": Reason("an idle scheduler would spin on a core"),
    "--speculative-algorithm": Reason("the drafter is an EAGLE-3 head; EAGLE would accept nothing"),
    "--speculative-draft-model-path": Reason("the drafter, as SGLang reads it", "drafter.path"),
    "--speculative-num-steps": Reason("draft tokens a verify step", "speculative.k"),
    "--speculative-eagle-topk": Reason("one branch: a chain of drafts, as vLLM makes it"),
    "--speculative-num-draft-tokens": Reason("a chain of k drafts and the token before them"),
    "--speculative-draft-attention-backend": Reason("the drafter's, the same as the target's"),
    "HF_HUB_OFFLINE": _OFFLINE,
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": Reason("asking for its health generates no token"),
    "SGLANG_USE_CPU_ENGINE": Reason("the CPU's code paths"),
    "TORCHDYNAMO_DISABLE": Reason("on a CPU compiling takes longer than what is measured"),
    "PYTHONPATH": Reason("the CPU's kernels, which come with the harness"),
    "OMP_NUM_THREADS": _THREADS,
    "SGLANG_SIMULATE_ACC_LEN": _FORCED,
    "SGLANG_SIMULATE_ACC_METHOD": _FORCED,
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": _FORCED,
}
_REFERENCE = {
    **_SERVER,
    "--model": Reason("the target", "target.path"),
    "--device": Reason("where it computes", "engine.device"),
    "--max-model-len": _CONTEXT,
    "--seed": _SEED,
    "--max-num-seqs": _BATCH,
    "--drafter": Reason("the EAGLE-3 head", "drafter.path"),
    "--k": Reason("draft tokens a verify step", "speculative.k"),
    "--forced-length": _FORCED,
    "--threads": _THREADS,
    "PYTHONUNBUFFERED": Reason("start-up phases are told by log lines as they come"),
    "HF_HUB_OFFLINE": _OFFLINE,
}
REASONS: dict[str, Mapping[str, Reason]] = {
    "vllm": _VLLM,
    "sglang": _SGLANG,
    "reference": _REFERENCE,
}
