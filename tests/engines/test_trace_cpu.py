"""The trace of vLLM and SGLang themselves on the CPU, held against the reference engine.

The demo pair in float32, k = 3, more requests at once than there are slots; some have their states
doubled by a plugin on the way to the drafter, which the trace must show and no output may.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import stream, token_ids

from engines.base import EngineUsageError, RequestAcceptance, ServeSpec
from engines.catalog import adapter
from engines.install import engine_python
from engines.process import EngineProcess, free_port
from engines.reference.engine import Engine
from engines.reference.loading import load_engine
from engines.reference.sampling import SamplingParams
from engines.trace.base import TraceStep
from engines.trace.launch import begin, traced
from engines.trace.plugin.trace_files import PLUGIN_VARIABLE
from engines.trace.read import Trace, read_whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

K = 3
ENVIRONMENTS = {"vllm": "vllm-cpu", "sglang": "sglang-cpu"}
PLUGIN = Path(__file__).with_name("trace_plugin.py")
LENGTHS = (7, 3, 23, 300, 12, 40)
SPOILED = {2, 5}
NAMES = [f"spoiled-{i}" if i in SPOILED else f"q-{i}" for i in range(len(LENGTHS))]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request as its client saw it."""

    prompt: list[int]
    output: list[int]
    acceptance: RequestAcceptance | None


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 700, (n,), generator=generator).tolist() for n in LENGTHS]


def max_tokens(i: int) -> int:
    return 40 - 4 * i  # they end one after another


def spec_of(engine: str, pair: Path, drafter: str = "mla") -> ServeSpec:
    try:
        engine_python(ENVIRONMENTS[engine])
    except EngineUsageError as error:
        pytest.skip(str(error))
    return ServeSpec(
        target=pair / "target",
        served_name="demo",
        port=free_port(),
        drafter=pair / f"drafter-{drafter}",
        k=K,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        kv_cache_gib=0.5,
    )


def serve(engine: str, spec: ServeSpec, workdir: Path, trace: Path | None) -> list[Answer]:
    """Ask all prompts at once."""
    process = EngineProcess(
        adapter(engine), spec, workdir=workdir, log_path=workdir / "log", deadline_s=1500
    )
    with process:
        process.start()
        process.wait_ready()
        if trace is not None:
            begin(engine, process.base_url, trace)

        def ask(i: int) -> Answer:
            prompt = prompts()[i]
            body: dict[str, Any] = {
                "model": "demo",
                "prompt": prompt,
                "temperature": 0,
                "max_tokens": max_tokens(i),
                "ignore_eos": True,
                **process.adapter.request_fields(speculative=True, endpoint="completions"),
                "stream_options": {"include_usage": True},
            }
            # what a client's X-Request-Id is to vLLM, this field is to SGLang
            body |= {"rid": NAMES[i]} if engine == "sglang" else {"request_id": NAMES[i]}
            payloads = stream(f"{process.base_url}/v1/completions", body)
            acceptance = process.adapter.request_acceptance(payloads)
            return Answer(prompt=prompt, output=token_ids(payloads), acceptance=acceptance)

        with ThreadPoolExecutor(len(LENGTHS)) as pool:
            return list(pool.map(ask, range(len(LENGTHS))))


def reference(pair: Path, drafter: str = "mla") -> Engine:
    return load_engine(
        pair / "target", drafter=pair / f"drafter-{drafter}", dtype="float32", max_len=512, slots=4
    )


def greedy(engine: Engine) -> list[list[int]]:
    """The target's own answers."""
    outputs = []
    for i, prompt in enumerate(prompts()):
        params = SamplingParams(max_tokens=max_tokens(i), temperature=0, ignore_eos=True)
        outputs.append(engine.generate([prompt], params)[0].output)
    return outputs


def traced_with_plugin(engine: str, spec: ServeSpec, folder: Path) -> ServeSpec:
    told = traced(engine, spec, folder)
    env = {**told.extra_env, PLUGIN_VARIABLE: f"{PLUGIN}:spoil_{engine}"}
    return replace(told, extra_env=env)


def assert_counts(steps: list[TraceStep], answer: Answer) -> None:
    """The engine's own figures, step for step."""
    told = answer.acceptance
    assert told is not None
    decode = [step for step in steps if step.kind == "decode"]
    accepted = [step.valid - 1 for step in decode]
    assert len(accepted) == told.drafts
    assert sum(accepted) == told.accepted
    if told.histogram is not None:
        assert told.histogram == tuple(accepted.count(j) for j in range(K + 1))
    if told.steps is not None:
        assert told.steps == tuple(accepted)


def assert_covered(steps: list[TraceStep], answer: Answer) -> list[int]:
    """Every row that counts once and in order; every decode step feeds what was proposed."""
    assert [step.step for step in steps] == list(range(len(steps)))
    positions = torch.cat([step.positions[: step.valid] for step in steps]).tolist()
    assert positions == list(range(len(positions)))
    ids = torch.cat([step.token_ids[: step.valid] for step in steps]).tolist()
    text = answer.prompt + answer.output
    assert len(ids) >= len(text) - 1
    assert ids[: len(text)] == text[: len(ids)]
    for before, step in itertools.pairwise(steps):
        if step.kind == "decode":
            assert step.token_ids.tolist() == [before.next_token, *before.drafts.tolist()]
    return [int(token) for token in ids]


def assert_states(engine: Engine, steps: list[TraceStep], ids: list[int], scale: float) -> None:
    assert engine.proposer is not None
    wanted = engine.capture(ids, engine.proposer.aux_layers)  # [T, n, H]
    found = torch.cat([step.aux[: step.valid] for step in steps]).view_as(wanted)
    cosine = torch.cosine_similarity(found, wanted, dim=-1)
    assert cosine.min() > 0.999
    ratio = found.norm(dim=-1) / wanted.norm(dim=-1)
    assert (ratio - scale).abs().max() < 0.02 * scale


def assert_trace(trace: Trace, answers: list[Answer], engine: Engine) -> None:
    assert trace.problems == ()
    for i, answer in enumerate(answers):
        steps = trace.steps[NAMES[i]]
        ids = assert_covered(steps, answer)
        assert_counts(steps, answer)
        assert_states(engine, steps, ids, 2.0 if i in SPOILED else 1.0)
    batches = {step.batch for name in NAMES for step in trace.steps[name]}
    assert max(batches) > 1


@pytest.mark.full  # every day the diagnosis of a healthy pair rests on the same trace
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_trace_is_what_the_engine_did(engine: str, demo_pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    spec = traced_with_plugin(engine, spec_of(engine, demo_pair), folder)
    answers = serve(engine, spec, tmp_path, folder)
    ours = reference(demo_pair)
    assert [answer.output for answer in answers] == greedy(ours)
    assert_trace(read_whole(folder), answers, ours)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_traced_engine_answers_as_one_that_is_not(
    engine: str, demo_pair: Path, tmp_path: Path
) -> None:
    spec = spec_of(engine, demo_pair)
    plain = serve(engine, spec, tmp_path / "plain", None)
    folder = tmp_path / "trace"
    told = traced(engine, replace(spec, port=free_port()), folder)
    with_trace = serve(engine, told, tmp_path / "traced", folder)
    assert [a.output for a in with_trace] == [a.output for a in plain]
    assert [a.acceptance for a in with_trace] == [a.acceptance for a in plain]


CHUNKED: dict[str, tuple[str, ...]] = {
    "vllm": ("--max-num-batched-tokens", "96", "--enable-chunked-prefill"),
    "sglang": ("--chunked-prefill-size", "96"),
}


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_prompt_in_chunks_has_a_step_for_each(
    engine: str, make_pair: Callable[..., Path], tmp_path: Path
) -> None:
    """A Llama target: for latent attention vLLM prefills whole prompts on a CPU."""
    pair = make_pair(target="llama", drafter="llama")
    folder = tmp_path / "trace"
    spec = replace(spec_of(engine, pair, "llama"), extra_args=CHUNKED[engine])
    answers = serve(engine, traced_with_plugin(engine, spec, folder), tmp_path, folder)
    trace = read_whole(folder)
    assert_trace(trace, answers, reference(pair, "llama"))
    chunks = [step for step in trace.steps[NAMES[3]] if step.kind == "prefill"]
    assert len(chunks) >= 4
    for chunk in chunks[:-1]:
        assert (chunk.next_token, chunk.drafts.tolist()) == (None, [])
