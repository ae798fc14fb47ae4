"""`vllm bench serve --save-result` or `--append-result`.

Latencies are in milliseconds, the acceptance rate in percent. `itl` is the gap between chunks, this
harness's `icl_s`. `tpot` divides by output tokens - 1, whatever the first chunk held.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.exchange.fields import (
    failed_share,
    figure,
    from_format,
    in_milliseconds,
    listed,
    load_of,
    number,
    plain,
    scaled,
    text,
    whole,
)
from harness.exchange.reading import Document
from harness.exchange.records import Foreign
from harness.history.figures import Figure

NAME = "vllm-bench"
SHOWN = "vLLM bench serve"
LATENCIES = {"ttft_s": "ttft", "tpot_s": "tpot", "icl_s": "itl", "e2el_s": "e2el"}
PLAIN = {
    "output_tokens_per_s": "output_throughput",
    "total_tokens_per_s": "total_token_throughput",
    "requests_per_s": "request_throughput",
    "requests_ok": "completed",
    "requests_failed": "failed",
    "prompt_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "duration_s": "duration",
}


def recognise(document: Document) -> bool:
    """Whether it is one."""
    return {"model_id", "request_throughput", "total_token_throughput"} <= document.keys()


def convert(found: Sequence[Document]) -> list[Foreign]:
    """Each result; a file of several holds one run each."""
    return [_one(document, i) for i, document in enumerate(found)]


def _one(document: Document, run: int) -> Foreign:
    speculated = "spec_decode_acceptance_length" in document
    backend = text(document.get("backend")) or text(document.get("endpoint_type"))
    label = text(document.get("label"))
    rate = number(document.get("request_rate"))  # "inf": all at once, as concurrency allows
    prompts = whole(document.get("num_prompts"))
    burstiness = number(document.get("burstiness"))
    arrival = "poisson" if burstiness in (None, 1.0) else "gamma"
    load = load_of(whole(document.get("max_concurrency")), rate, arrival, burstiness)
    return Foreign(
        engine=_engine(backend),
        workload=NAME if label in (None, backend) else f"{NAME} {label}",
        load=load or f"burst{prompts or ''}",
        figures=tuple(_figures(document)),
        created=from_format(document.get("date"), "%Y%m%d-%H%M%S"),
        variant="speculative" if speculated else None,
        model=text(document.get("model_id")),
        run=run,
    )


def _engine(backend: str | None) -> str:
    """Its backends name a protocol: `openai` and the like are many servers'."""
    return "openai" if backend is None or backend.startswith("openai") else backend


def _figures(document: Document) -> list[Figure]:
    n = whole(document.get("completed"))
    figures = in_milliseconds(document, LATENCIES, n) + plain(document, PLAIN)
    # Some versions wrote the key with a colon at its end.
    for key in ("request_goodput", "request_goodput:"):
        if document.get(key) is not None:
            figures.append(figure("goodput_per_s", number(document[key])))
    figures += failed_share(number(document.get("completed")), number(document.get("failed")))
    return figures + _acceptance(document)


def _acceptance(document: Document) -> list[Figure]:
    if "spec_decode_acceptance_length" not in document:
        return []
    drafts = whole(document.get("spec_decode_num_drafts"))
    length = number(document["spec_decode_acceptance_length"])
    rate = scaled(document.get("spec_decode_acceptance_rate"), 1e-2)
    figures = [
        figure("acceptance_length", length or None, drafts),  # 0: there were no drafts
        figure("acceptance_rate", rate, drafts),
    ]
    for i, share in enumerate(listed(document, "spec_decode_per_position_acceptance_rates")):
        figures.append(figure(f"per_position.{i}", number(share), drafts))
    return figures
