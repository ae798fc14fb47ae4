"""Request bodies, answers, tokenizer and adapter: everything around the engine but the sockets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import build_target, byte_tokenizer, load_target

from engines.base import EngineUsageError, ServeSpec
from engines.reference.adapter import ReferenceAdapter
from engines.reference.answers import Answer
from engines.reference.engine import Engine, Request, SamplingParams
from engines.reference.metrics import EngineMetrics
from engines.reference.protocol import RequestError, read_job
from engines.reference.tokenizer import Detokenizer, TemplateError, Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    build_target("llama", path, vocab_size=300)
    byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(load_target(folder), tokenizer=Tokenizer(folder), max_len=64, slots=2)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@given(st.text(), st.data())
@settings(max_examples=80, deadline=None)
def test_pieces_of_text_never_split_a_character(tokenizer: Tokenizer, text: str, data: Any) -> None:
    ids = tokenizer.encode(text, special=False)
    pieces, detokenizer = [], Detokenizer(tokenizer)
    while ids:
        count = data.draw(st.integers(1, 5))
        pieces.append(detokenizer.push(ids[:count]))
        ids = ids[count:]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, detokenizer.finish()]) == text


def test_bytes_that_are_no_character_come_out_in_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("né", special=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) in ("", "n")
    assert detokenizer.finish().endswith("\ufffd")


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render(messages) == "[user]hi\n[assistant]"
    assert tokenizer.render(messages, add_generation_prompt=False) == "[user]hi\n"
    with pytest.raises(TemplateError, match="no tools"):
        tokenizer.render([{"role": "tool", "content": "x"}])


REFUSED = [
    ({}, "prompt must be", 400),
    ({"prompt": ""}, "maximum context length", 400),
    ({"prompt": "x" * 64}, "maximum context length is 64 tokens.* has 64 tokens", 400),
    ({"prompt": "x", "model": "other"}, "`other` does not exist", 404),
    ({"prompt": "x", "n": 2}, "n=2", 400),
    ({"prompt": "x", "logit_bias": {"1": 5}}, "logit_bias", 400),
    ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty", 400),
    ({"prompt": "x", "temprature": 0}, "temprature", 400),
    ({"prompt": "x", "temperature": "hot"}, "temperature must be a number", 400),
    ({"prompt": "x", "temperature": -1}, "temperature must be within", 400),
    ({"prompt": "x", "top_p": 0}, "top_p", 400),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", 400),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens must be a whole number", 400),
    ({"prompt": "x", "stop": [""]}, "stop must be", 400),
    ({"prompt": "x", "stream": 1}, "stream must be true or false", 400),
    ({"prompt": "x", "stream_options": {}}, "stream_options needs", 400),
    ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, "cannot be streamed", 400),
    ({"prompt": ["a", "b"]}, "one prompt a request", 400),
    ({"prompt": [1, 300]}, "token id 300", 400),
    ({"prompt": "x", "stop_token_ids": ["a"]}, "stop_token_ids", 400),
]


@pytest.mark.parametrize(("body", "words", "status"), REFUSED)
def test_what_cannot_be_honoured_is_refused(
    engine: Engine, body: Any, words: str, status: int
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        read_job(body, engine, "m", chat=False)
    assert caught.value.status == status


def test_a_whole_body_is_understood(engine: Engine) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_k": -1,
        "n": 1,
        "user": "somebody",
        "stop": "x",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    job = read_job(body, engine, "m", chat=True)
    assert engine.tokenizer is not None
    assert engine.tokenizer.decode(job.prompt) == "[user]hi\n[assistant]"
    assert job.params == SamplingParams(max_tokens=7, temperature=0.5, stop=("x",), logprobs=2)
    assert job.stream and job.include_usage and job.continuous_usage and job.return_token_ids
    unlimited = read_job({"messages": body["messages"]}, engine, "m", chat=True)
    assert unlimited.params.max_tokens == 64 - len(job.prompt)
    assert read_job({"prompt": [5, 6]}, engine, "m", chat=False).params.max_tokens == 16


def test_streamed_logprob_offsets_and_usage_add_up(engine: Engine) -> None:
    body = {
        "prompt": "ab",
        "temperature": 0,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "logprobs": 1,
        "return_token_ids": True,
    }
    job = read_job(body, engine, "m", chat=False)
    deltas: list[Any] = []
    request = Request(job.prompt, job.params, tokenizer=engine.tokenizer, on_delta=deltas.append)
    engine.submit(request)
    while not request.finished:
        engine.step()
    assert engine.tokenizer is not None
    answer = Answer(job, request, engine.tokenizer)
    chunks = [chunk for delta in deltas for chunk in answer.chunks(delta)] + answer.closing()
    choices = [c["choices"][0] for c in chunks[:-1]]
    assert [i for c in choices for i in c["token_ids"]] == request.output
    assert choices[0]["prompt_token_ids"] == job.prompt and "prompt_token_ids" not in choices[1]
    assert "".join(c["text"] for c in choices) == request.text
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 4, 5, 5]
    offsets = [o for c in choices for o in c["logprobs"]["text_offset"]]
    lengths = [len(t) for c in choices for t in c["logprobs"]["tokens"]]
    assert offsets == [sum(lengths[:i]) for i in range(5)]
    assert choices[-1]["finish_reason"] == "length" and "metrics" not in chunks[-1]


# -- adapter ---------------------------------------------------------------------------------


def _spec(folder: Path, **changes: Any) -> ServeSpec:
    fields = {"target": folder, "served_name": "m", "port": 1234, "max_model_len": 64, **changes}
    return ServeSpec(**fields)


def test_adapter_launches_this_interpreter(folder: Path, tmp_path: Path) -> None:
    adapter = ReferenceAdapter()
    adapter.check(_spec(folder))
    spec = _spec(folder, drafter=tmp_path, k=5, threads=1, extra_args=("--seed", "9"))
    launch = adapter.launch(spec, tmp_path)
    argv = list(launch.argv)
    assert argv[:3] == [sys.executable, "-m", "engines.reference"]
    assert argv[argv.index("--k") + 1] == "5" and argv[argv.index("--port") + 1] == "1234"
    assert argv[-2:] == ["--seed", "9"]
    assert launch.cwd is not None and (launch.cwd / "engines").is_dir()


def test_adapter_check_names_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    adapter = ReferenceAdapter()
    with pytest.raises(EngineUsageError, match="no such file"):
        adapter.check(_spec(tmp_path / "none"))
    with pytest.raises(EngineUsageError, match=r"engine\.max_model_len=999"):
        adapter.check(_spec(folder, max_model_len=999))
    with pytest.raises(EngineUsageError, match=r"speculative\.k=9"):
        adapter.check(_spec(folder, drafter=tmp_path, k=9))
    with pytest.raises(EngineUsageError, match=str(tmp_path)):
        adapter.check(_spec(folder, drafter=tmp_path))


def test_adapter_reads_the_engines_own_figures() -> None:
    adapter = ReferenceAdapter()
    metrics = EngineMetrics("m", 3)
    metrics.observe_verify(3, 2, 0)
    metrics.observe_verify(3, 0, 1)
    metrics.generation_tokens.inc(5)
    told = adapter.counters(metrics.text().decode())
    assert told is not None
    assert (told.drafts, told.drafted, told.accepted) == (2, 6, 2)
    assert told.accepted_per_position == (1, 1, 0) and told.generation_tokens == 5
    assert (told.running, told.requests_finished) == (0, 0)
    baseline = adapter.counters(EngineMetrics("m", None).text().decode())
    assert baseline is not None
    assert baseline.drafts is None and baseline.accepted_per_position is None
    assert adapter.counters("nothing here") is None
    payload = {
        "num_spec_steps": 2,
        "num_draft_tokens": 6,
        "num_accepted_draft_tokens": 2,
        "acceptance_histogram": [1, 0, 1, 0],
    }
    chunks: list[dict[str, Any]] = [
        {"metrics": None},
        {"metrics": {"speculative_decoding": payload}},
        {},
    ]
    acceptance = adapter.request_acceptance(chunks)
    assert acceptance is not None
    assert (acceptance.drafts, acceptance.accepted, acceptance.histogram) == (2, 2, (1, 0, 1, 0))
    assert adapter.request_acceptance([{}]) is None


def test_adapter_finds_the_cause_of_a_failure() -> None:
    adapter = ReferenceAdapter()
    assert adapter.failure_cause("x\n[reference] error: port 1 is used\n") == "port 1 is used"
    traceback = "Traceback (most recent call last):\n  File\nRuntimeError: out of memory\n"
    assert adapter.failure_cause(traceback) == "RuntimeError: out of memory"
    assert adapter.failure_cause("all is well") is None


def test_adapter_imports_nothing_heavy(repo: Path) -> None:
    import subprocess

    code = (
        "import sys, json, engines.reference.adapter;"
        "print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, check=True)
    assert json.loads(out.stdout) == []


def test_adapter_forces_acceptance_for_the_drafted_variant_alone(
    folder: Path, tmp_path: Path
) -> None:
    adapter = ReferenceAdapter()
    spec = _spec(folder, drafter=tmp_path, k=3, forced_length=2.5)
    argv = list(adapter.launch(spec, tmp_path).argv)
    assert argv[argv.index("--forced-length") + 1] == "2.5"
    assert "--forced-length" not in adapter.launch(_spec(folder, forced_length=2.5), tmp_path).argv
    with pytest.raises(EngineUsageError, match="yields 1 to 4 tokens"):
        adapter.check(_spec(folder, drafter=tmp_path, k=3, forced_length=4.5))
