"""The peers: what is installed for each, how it is run, and where its figures stand.

Each is given the same prompts in the shape it reads, a closed loop of so many streams, and its own
defaults for everything else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
MODEL = "scripted"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a peer: `folder` holds its prompts and takes what it writes."""

    python: Path
    url: str
    streams: int
    requests: int
    tokens: int
    tokenizer: Path
    folder: Path

    @property
    def prompts(self) -> Path:
        """One JSON object a line; the key of its text is the peer's own."""
        return self.folder / "prompts.jsonl"

    def script(self, name: str) -> str:
        """A console script of the peer's environment."""
        return str(self.python.with_name(name))


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer reports, in milliseconds; None where it reports none."""

    ttft_ms: float | None
    gap_p99_ms: float | None
    requests: int | None


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One peer. `environment`: under `.venvs/`; `packages` None: installed by other means.

    `offline`: it is told that there is no model hub; one that then reads no local folder is not.
    """

    name: str
    environment: str
    packages: tuple[str, ...] | None
    shown: str
    command: Callable[[Ask], list[str]]
    read: Callable[[Ask], Figures]
    text_key: str = "prompt"
    offline: bool = True


def load(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def plain(name: str) -> Callable[[Ask], list[str]]:
    """`plain_client.py` on one library."""

    def command(ask: Ask) -> list[str]:
        out = str(ask.folder / "figures.json")
        script = str(HERE / "plain_client.py")
        return [str(ask.python), script, name, ask.url, str(ask.streams), str(ask.prompts), out]

    return command


def read_plain(ask: Ask) -> Figures:
    """What `plain_client.py` writes."""
    return Figures(**load(ask.folder / "figures.json"))


VLLM_SERVE = (
    "import argparse, vllm.benchmarks.serve as serve; parser = argparse.ArgumentParser(); "
    "serve.add_cli_args(parser); serve.main(parser.parse_args())"
)


def vllm(ask: Ask) -> list[str]:
    """What `vllm bench serve` runs; the command itself asks for a package of the name vllm."""
    words = [str(ask.python), "-c", VLLM_SERVE, "--backend", "openai-chat"]
    words += ["--base-url", ask.url, "--endpoint", "/v1/chat/completions"]
    words += ["--model", MODEL, "--tokenizer", str(ask.tokenizer)]
    # Its own prompts: reading a file of them takes pandas, which its environment need not have.
    words += ["--dataset-name", "random", "--random-input-len", "16"]
    words += ["--random-output-len", str(ask.tokens)]
    words += ["--num-prompts", str(ask.requests), "--max-concurrency", str(ask.streams)]
    words += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "99", "--disable-tqdm"]
    return [*words, "--save-result", "--result-dir", str(ask.folder), "--result-filename", "r.json"]


def read_vllm(ask: Ask) -> Figures:
    """vLLM's result file."""
    result = load(ask.folder / "r.json")
    return Figures(
        ttft_ms=result.get("mean_ttft_ms"),
        gap_p99_ms=result.get("p99_itl_ms"),
        requests=result.get("completed"),
    )


def guidellm(ask: Ask) -> list[str]:
    """`guidellm run`."""
    backend = f"kind=openai_http,target={ask.url},model={MODEL},max_tokens={ask.tokens}"
    words = [ask.script("guidellm"), "run", "--backend", backend]
    words += ["--profile", f"kind=concurrent,streams={ask.streams}"]
    words += ["--constraint", f"kind=max_requests,count={ask.requests}"]
    words += ["--data", f"kind=json_file,path={ask.prompts}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={ask.tokenizer}"]
    return [*words, "--output", f"kind=json,path={ask.folder / 'r.json'}", "--disable-console"]


def read_guidellm(ask: Ask) -> Figures:
    """GuideLLM's report. Its gap is a mean over each request, so that its p99 hides stalls."""
    metrics = load(ask.folder / "r.json")["benchmarks"][0]["metrics"]
    ttft = metrics["time_to_first_token_ms"]["successful"]
    gap = metrics["inter_token_latency_ms"]["successful"]
    return Figures(
        ttft_ms=ttft["mean"], gap_p99_ms=gap["percentiles"]["p99"], requests=ttft["count"]
    )


def aiperf(ask: Ask) -> list[str]:
    """`aiperf profile`."""
    words = [ask.script("aiperf"), "profile", "--model", MODEL, "--url", ask.url]
    words += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(ask.tokenizer)]
    words += ["--input-file", str(ask.prompts), "--custom-dataset-type", "single_turn"]
    words += ["--concurrency", str(ask.streams), "--request-count", str(ask.requests)]
    words += ["--output-artifact-dir", str(ask.folder), "--ui-type", "none"]
    return [*words, "--no-gpu-telemetry", "--no-server-metrics"]


def read_aiperf(ask: Ask) -> Figures:
    """AIPerf's summary; gaps between chunks where it exports them, else each request's mean."""
    result = load(next(ask.folder.rglob("profile_export_aiperf.json")))
    gap = result.get("inter_chunk_latency") or result.get("inter_token_latency") or {}
    count = (result.get("request_count") or {}).get("avg")
    return Figures(
        ttft_ms=(result.get("time_to_first_token") or {}).get("avg"),
        gap_p99_ms=gap.get("p99"),
        requests=None if count is None else int(count),
    )


PEERS = (
    Peer(
        name="vllm",
        environment="vllm-cpu",
        packages=None,
        shown="vLLM bench serve",
        command=vllm,
        read=read_vllm,
    ),
    Peer(
        name="guidellm",
        environment="peers/guidellm",
        packages=("guidellm==0.8.1",),
        shown="GuideLLM",
        command=guidellm,
        read=read_guidellm,
    ),
    Peer(
        name="aiperf",
        environment="peers/aiperf",
        packages=("aiperf==0.13.0",),
        shown="AIPerf",
        command=aiperf,
        read=read_aiperf,
        text_key="text",
        offline=False,
    ),
    Peer(
        name="httpx",
        environment="peers/httpx",
        packages=("httpx==0.28.1", "uvloop"),
        shown="plain httpx",
        command=plain("httpx"),
        read=read_plain,
    ),
    Peer(
        name="aiohttp",
        environment="peers/aiohttp",
        packages=("aiohttp>=3.12,<4", "uvloop"),
        shown="plain aiohttp",
        command=plain("aiohttp"),
        read=read_plain,
    ),
)


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of single bytes, so that peers who insist on one need no hub."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if (folder / "config.json").exists():
        return folder
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*letters, "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    config = {"model_type": "gpt2", "vocab_size": len(vocab)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def tell(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)
