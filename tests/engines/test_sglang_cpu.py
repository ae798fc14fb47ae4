"""SGLang itself on the CPU with the demo pair, held against the reference engine.

Greedy, float32, k = 3, the same held-out prompts one at a time: the outputs of both variants are
identical, and the verify steps are the reference engine's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import Answered, ask_all, stream

from engines.base import Adapter, EngineUsageError, ServeSpec
from engines.catalog import adapter
from engines.install import engine_python
from engines.process import EngineProcess, free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

PROMPTS = 20
MAX_TOKENS = 192
K = 3


def totals(served: Answered) -> tuple[int, int]:
    """Verify steps, and draft tokens accepted in them."""
    known = [a for a in served.acceptance if a is not None]
    return sum(a.drafts for a in known), sum(a.accepted for a in known)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    try:
        engine_python("sglang-cpu")
    except EngineUsageError as error:
        pytest.skip(str(error))


def _prompts(pair: Path) -> list[list[int]]:
    """The first held-out prompts as the chat template renders them, in token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    lines = (pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    rendered = [
        tokenizer.apply_chat_template(
            json.loads(line)["messages"], tokenize=False, add_generation_prompt=True
        )
        for line in lines
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in rendered]


def _start(name: str, pair: Path, drafter: str | None, workdir: Path) -> EngineProcess:
    spec = ServeSpec(
        target=pair / "target",
        served_name="demo",
        port=free_port(),
        drafter=None if drafter is None else pair / f"drafter-{drafter}",
        k=K,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
    )
    log_path = workdir / f"{name}-{drafter or 'baseline'}.log"
    return EngineProcess(adapter(name), spec, workdir=workdir, log_path=log_path, deadline_s=900.0)


def _fields(engine: Adapter, *, speculative: bool) -> dict[str, Any]:
    fields = {"return_token_ids": True, **engine.request_fields(speculative=speculative)}
    # The reference engine tells its acceptance beside the usage.
    fields["stream_options"] = {"include_usage": True}
    return {"model": "demo", "temperature": 0, "max_tokens": MAX_TOKENS, **fields}


def _serve(name: str, pair: Path, drafter: str | None, workdir: Path) -> Answered:
    """Start one engine, ask it every prompt in turn, and stop it."""
    with _start(name, pair, drafter, workdir) as engine:
        engine.start()
        engine.wait_ready()
        common = _fields(engine.adapter, speculative=drafter is not None)
        bodies = [{**common, "prompt": prompt} for prompt in _prompts(pair)]
        return ask_all(engine, "/v1/completions", bodies)


@pytest.fixture(scope="module")
def mla(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answered]:
    """Both variants of SGLang and the speculating reference engine, one after another."""
    workdir = tmp_path_factory.mktemp("sglang")
    return {
        "baseline": _serve("sglang", demo_pair, None, workdir),
        "speculative": _serve("sglang", demo_pair, "mla", workdir),
        "reference": _serve("reference", demo_pair, "mla", workdir),
    }


def test_outputs_of_both_variants_are_identical(mla: dict[str, Answered]) -> None:
    assert all(len(ids) > 1 for ids in mla["baseline"].ids)
    assert mla["speculative"].ids == mla["baseline"].ids


def test_outputs_are_the_reference_engines(mla: dict[str, Answered]) -> None:
    assert mla["baseline"].ids == mla["reference"].ids


def test_verify_steps_are_the_reference_engines(mla: dict[str, Answered]) -> None:
    drafts, accepted = totals(mla["speculative"])
    wanted_drafts, wanted_accepted = totals(mla["reference"])
    assert abs(accepted / drafts - wanted_accepted / wanted_drafts) / K < 0.03
    assert (drafts, accepted) == (wanted_drafts, wanted_accepted)


def test_histograms_agree_with_the_totals(mla: dict[str, Answered]) -> None:
    for found in mla["speculative"].acceptance:
        assert found is not None and found.histogram is not None
        assert len(found.histogram) == K + 1 and sum(found.histogram) == found.drafts
        assert sum(j * steps for j, steps in enumerate(found.histogram)) == found.accepted


def test_server_counters_agree_with_the_requests(mla: dict[str, Answered]) -> None:
    for variant in ("baseline", "speculative"):
        served = mla[variant]
        assert served.growth("generation_tokens") == sum(len(ids) for ids in served.ids)
        assert served.growth("requests_finished") == PROMPTS
    assert mla["baseline"].after.drafts is None
    served = mla["speculative"]
    drafts, accepted = totals(served)
    assert served.growth("drafts") == drafts
    # SGLang counts no accepted token; what its steps made is in the tokens after each prefill's.
    made = served.growth("generation_tokens") - served.growth("requests_finished")
    assert made == sum(len(ids) - 1 for ids in served.ids)
    assert 0 <= drafts + accepted - made <= K * PROMPTS  # cut at the answers' ends
    for ids, told in zip(served.ids, served.acceptance, strict=True):
        assert told is not None
        assert 0 <= told.drafts + told.accepted - (len(ids) - 1) <= K


@pytest.mark.full
def test_llama_head_on_an_mla_target(
    make_pair: Callable[..., Path], tmp_path: Path, mla: dict[str, Answered]
) -> None:
    pair = make_pair(drafter="llama")
    speculative = _serve("sglang", pair, "llama", tmp_path)
    reference = _serve("reference", pair, "llama", tmp_path)
    assert speculative.ids == mla["baseline"].ids
    assert totals(speculative) == totals(reference)


@pytest.fixture(scope="module")
def chat(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with _start("sglang", demo_pair, "mla", tmp_path_factory.mktemp("chat")) as engine:
        engine.start()
        engine.wait_ready()
        yield engine


def test_streamed_chat_takes_the_adapters_fields_and_counts_by_usage(
    chat: EngineProcess, demo_pair: Path
) -> None:
    prompt = _prompts(demo_pair)[0]
    line = (demo_pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0]
    body = {
        "model": "demo",
        "messages": json.loads(line)["messages"],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **chat.adapter.request_fields(speculative=True),
    }
    payloads = stream(chat.base_url + "/v1/chat/completions", body)
    usage = [payload["usage"] for payload in payloads if payload.get("usage")]
    assert usage[-1]["prompt_tokens"] == len(prompt)
    found = chat.adapter.request_acceptance(payloads)
    assert found is not None
    # The prefill's token, then one bonus token a step; the last step may be cut by the end.
    assert usage[-1]["completion_tokens"] <= 1 + found.drafts + found.accepted
    assert usage[-1]["completion_tokens"] > found.drafts
