"""SGLang's `bench_serving` (now `sglang.benchmark.serving`): a line of JSON each run.

Latencies are in milliseconds. `itl` is a chunk's gap shared out over the tokens in it with SGLang's
own protocol, and the plain gap between chunks with others: only those become `icl_s`. The file does
not say when it was measured. `accept_length` is all output tokens by verify steps as the server
averages it over its last log interval, which is another figure than `acceptance_length` and kept
under a name of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.exchange.fields import (
    figure,
    in_milliseconds,
    inside,
    load_of,
    number,
    plain,
    text,
    whole,
)
from harness.exchange.reading import Document
from harness.exchange.records import Foreign, ForeignVariant
from harness.history.figures import Figure

NAME = "sglang-bench"
SHOWN = "SGLang bench_serving"
LATENCIES = {"ttft_s": "ttft", "tpot_s": "tpot", "e2el_s": "e2e_latency"}
OWN_PROTOCOL = ("sglang", "sglang-native")
PLAIN = {
    "output_tokens_per_s": "output_throughput",
    "prompt_tokens_per_s": "input_throughput",
    "total_tokens_per_s": "total_throughput",
    "requests_per_s": "request_throughput",
    "requests_ok": "completed",
    "prompt_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "duration_s": "duration",
    "goodput_per_s": "request_goodput",
    "goodput_share": "slo_attainment",
}


def recognise(document: Document) -> bool:
    """Whether it is one; older versions wrote fewer keys."""
    return {"mean_e2e_latency_ms", "output_throughput", "backend"} <= document.keys()


def convert(found: Sequence[Document]) -> list[Foreign]:
    """Each line is a run."""
    return [_one(document, i) for i, document in enumerate(found)]


def _one(document: Document, run: int) -> Foreign:
    info = document.get("server_info")
    backend = text(document.get("backend")) or "sglang"
    is_sglang = inside(info, "version") is not None or backend.startswith("sglang")
    rate = number(document.get("request_rate"))  # Infinity: all at once, as concurrency allows
    load = load_of(whole(document.get("max_concurrency")), rate, "poisson")
    if document.get("request_rate") == "trace":
        load = "trace"
    return Foreign(
        engine="sglang" if is_sglang else backend,
        workload=_workload(document),
        load=load or f"burst{whole(document.get('completed')) or ''}",
        figures=tuple(_figures(document, backend)),
        variant=_variant(document),
        model=text(inside(info, "served_model_name")) or text(inside(info, "model_path")),
        drafter=text(inside(info, "speculative_draft_model_path")),
        engine_version=text(inside(info, "version")),
        run=run,
    )


def _workload(document: Document) -> str:
    name = text(document.get("dataset_name")) or "?"
    if name.startswith("random"):
        lengths = document.get("random_input_len"), document.get("random_output_len")
        name = "-".join([name, *(str(n) for n in lengths if whole(n) is not None)])
    tag = text(document.get("tag"))
    return " ".join([NAME, name, *([tag] if tag else [])])


def _variant(document: Document) -> ForeignVariant | None:
    """The server's own settings say it; of a server that told none, its acceptance does."""
    info = document.get("server_info")
    if isinstance(info, dict) and "speculative_algorithm" in info:
        return "speculative" if info["speculative_algorithm"] else "baseline"
    return "speculative" if number(document.get("accept_length")) else None


def _figures(document: Document, backend: str) -> list[Figure]:
    n = whole(document.get("completed"))
    accepted = number(document.get("accept_length"))
    names = dict(LATENCIES)
    if backend not in OWN_PROTOCOL and not accepted:  # else gaps are divided among tokens
        names["icl_s"] = "itl"
    figures = in_milliseconds(document, names, n) + plain(document, PLAIN)
    if accepted:
        figures.append(figure("server_accept_length", accepted))
    return figures
