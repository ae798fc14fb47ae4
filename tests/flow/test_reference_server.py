"""The reference server as a process: what clients of it see, and that it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from reference_models import build_drafter, build_target, byte_tokenizer, greedy

from drafters.checkpoint import save
from engines.process import free_port
from engines.reference.adapter import ReferenceAdapter
from harness.analyse.requests import past_end
from harness.measure.columns import Drafts, Ints
from harness.measure.told import read_acceptance_of

VOCAB = 300
PROMPT = {"prompt": "hello", "temperature": 0, "max_tokens": 20, "return_token_ids": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def _start(repo: Path, folder: Path, *more: str) -> tuple[subprocess.Popen[str], int]:
    port = free_port()
    command = [sys.executable, "-m", "engines.reference", "--model", str(folder / "target")]
    command += ["--served-model-name", "m", "--port", str(port), "--max-num-seqs", "3", *more]
    process = subprocess.Popen(
        command,
        cwd=repo,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return process, port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    target = build_target("deepseek", path / "target", vocab_size=VOCAB)
    byte_tokenizer(path / "target")
    drafter = build_drafter("mla", vocab_size=VOCAB, draft_vocab_size=VOCAB, aux_layers=(0, 1, 2))
    save(drafter, path / "drafter")
    from engines.reference.tokenizer import Tokenizer

    ids = Tokenizer(path / "target").encode("hello", special=True)
    (path / "answer.json").write_text(json.dumps(greedy(target, ids, 20)))
    return path


@pytest.fixture(scope="module")
def client(folder: Path, repo: Path) -> Iterator[httpx.Client]:
    process, port = _start(repo, folder, "--drafter", str(folder / "drafter"), "--k", "3")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
        _await_ready(process, http)
        yield http
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 0
    assert process.stdout is not None
    phases = [line.split("] ")[1].split(":")[0] for line in process.stdout if "[reference" in line]
    assert phases == [
        "reading config",
        "loading target",
        "loading drafter",
        "allocating cache",
        "ready",
    ]


def _await_ready(process: subprocess.Popen[str], http: httpx.Client) -> None:
    for _ in range(1200):
        assert process.poll() is None, process.stdout and process.stdout.read()
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("not ready")


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("body", "status", "needle"),
    [
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"a":' * 100_000, 400, "not JSON"),
        (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, "not JSON"),
        (b"\xff\0", 400, "not JSON"),
        (b'{"x": "' + b"y" * 33_000_000 + b'"}', 413, "longer than"),
    ],
)
def test_a_hostile_body_is_refused(
    path: str, body: bytes, status: int, needle: str, client: httpx.Client
) -> None:
    answer = client.post(path, content=body)
    assert (answer.status_code, needle in answer.json()["error"]["message"]) == (status, True)
    assert client.post("/v1/completions", json=PROMPT).status_code == 200


@pytest.mark.parametrize("name", ["messages", "self", "add_generation_prompt"])
def test_template_variables_cannot_take_the_messages_place(name: str, client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = client.post(
        "/v1/chat/completions", json={**body, "chat_template_kwargs": {name: False}}
    )
    assert answer.status_code == (200 if name == "add_generation_prompt" else 400)


def test_a_text_far_too_long_is_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "x" * 5_000_000})
    assert answer.status_code == 400
    assert "maximum context length" in answer.json()["error"]["message"]


def test_a_stop_ends_the_requests_under_way_and_says_nothing_alarming(
    folder: Path, repo: Path
) -> None:
    process, port = _start(repo, folder)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
        _await_ready(process, http)
        half = socket.create_connection(("127.0.0.1", port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{}")
        half.close()
        body = {**PROMPT, "max_tokens": 240, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "Traceback" not in out


def test_models_and_errors(client: httpx.Client) -> None:
    model = client.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("m", 256)
    for body, status, param in (
        ({"prompt": "x", "model": "y"}, 404, "model"),
        ({"prompt": "x", "n": 3}, 400, "n"),
        ({"prompt": "x" * 300}, 400, "prompt"),
    ):
        answer = client.post("/v1/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, status, param)
        assert error["message"] and error["type"]
    assert client.post("/v1/completions", content=b"{").status_code == 400
    assert client.get("/nothing").status_code == 404
    assert client.get("/v1/completions").status_code == 405


def test_whole_and_streamed_completions_equal_transformers(
    client: httpx.Client, folder: Path
) -> None:
    expected = json.loads((folder / "answer.json").read_text())
    whole = client.post("/v1/completions", json=PROMPT).json()
    choice = whole["choices"][0]
    assert choice["token_ids"] == expected
    assert whole["usage"]["completion_tokens"] == len(expected)
    events = _events(client.post("/v1/completions", json={**PROMPT, **USAGE}).text)
    choices = [e["choices"][0] for e in events[:-1]]
    assert [i for c in choices for i in c["token_ids"]] == expected
    assert "".join(c["text"] for c in choices) == choice["text"]
    assert choices[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    speculative = events[-1]["metrics"]["speculative_decoding"]
    assert speculative == whole["metrics"]["speculative_decoding"]
    # one chunk for the prefill's token and one for every verify step
    assert len(choices) == 1 + speculative["num_spec_steps"]
    per_step = [len(c["token_ids"]) - 1 for c in choices[1:]]
    assert per_step[:-1] == speculative["per_step_accepted"][:-1]


def test_chat_streamed_and_whole(client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    whole = client.post("/v1/chat/completions", json=body).json()
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant"
    events = _events(client.post("/v1/chat/completions", json={**body, **USAGE}).text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    choices = [e["choices"][0] for e in events[1:-1]]
    assert "".join(c["delta"]["content"] for c in choices) == message["content"]
    assert [i for c in choices for i in c["token_ids"]] == whole["choices"][0]["token_ids"]
    content = [entry for c in choices for entry in c["logprobs"]["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_counters_equal_the_requests_own_figures(client: httpx.Client) -> None:
    adapter = ReferenceAdapter()
    before = adapter.counters(client.get("/metrics").text)
    bodies = [{**PROMPT, "prompt": "word " * n, "ignore_eos": True} for n in range(1, 8)]
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda b: client.post("/v1/completions", json=b).json(), bodies))
    after = adapter.counters(client.get("/metrics").text)
    assert before is not None and after is not None
    told = [adapter.request_acceptance([answer]) for answer in answers]
    for name in ("drafts", "drafted", "accepted"):
        total = sum(getattr(one, name) for one in told)
        assert getattr(after, name) - getattr(before, name) == total
    assert after.generation_tokens is not None and before.generation_tokens is not None
    assert after.generation_tokens - before.generation_tokens == 7 * 20
    assert after.running == after.waiting == 0
    grown = (after.accepted_past_end or 0) - (before.accepted_past_end or 0)
    assert grown == sum(one.past_end or 0 for one in told if one is not None)
    positions = zip(
        after.accepted_per_position or (), before.accepted_per_position or (), strict=True
    )
    pooled = [sum(one.histogram[j] for one in told if one and one.histogram) for j in range(4)]
    assert [a - b for a, b in positions] == [sum(pooled[j:]) for j in range(1, 4)]
    # batched with others or alone, the output is the same
    alone = client.post("/v1/completions", json=bodies[4]).json()
    assert alone["choices"][0]["token_ids"] == answers[4]["choices"][0]["token_ids"]


def test_what_stood_behind_the_end_can_be_told_from_the_counts(client: httpx.Client) -> None:
    """As it must be for vLLM and SGLang, which do not tell it: here the engine says whether so."""
    seen = set()
    for tokens in range(1, 25):
        body = {**PROMPT, "max_tokens": tokens, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
        told = read_acceptance_of(ReferenceAdapter(), [answer])
        assert told is not None and told.steps is not None and told.past_end is not None
        assert len(told.steps) == told.drafts and sum(told.steps) == told.accepted
        silent = msgspec.structs.replace(told, past_end=None)
        found = past_end(Drafts.of([silent]), Ints.of([tokens]))
        assert found.python() == [told.past_end]
        seen.add(told.past_end)
    assert 0 in seen


def test_a_client_that_leaves_frees_its_slot(client: httpx.Client) -> None:
    adapter = ReferenceAdapter()
    long = {**PROMPT, "max_tokens": 250, "ignore_eos": True, "stream": True}

    def ended() -> dict[str, float]:
        """How many requests have ended so far, by their reason."""
        found = re.findall(r'finished_reason="(\w+)".*? (\S+)$', client.get("/metrics").text, re.M)
        return {reason: float(count) for reason, count in found}

    before = ended()
    for left in range(1, 31):  # a client that this machine holds up leaves when all was said
        with client.stream("POST", "/v1/completions", json=long) as answer:
            next(answer.iter_lines())
        deadline = time.monotonic() + 300
        while sum((now := ended()).values()) < sum(before.values()) + left:
            assert time.monotonic() < deadline, "the slot was not freed"
            time.sleep(0.05)
        while (told := adapter.counters(client.get("/metrics").text)) and told.running:
            assert time.monotonic() < deadline, "the slot was not freed"
            time.sleep(0.05)
        if now.get("abort", 0) > before.get("abort", 0):
            return
    raise AssertionError("no request was given up when its client left")


def test_a_port_in_use_and_a_missing_model_end_with_one_line(folder: Path, repo: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process, _ = _start(repo, folder, "--port", str(port))
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert [line for line in output.splitlines() if str(port) in line and "error" in line]
    assert "Traceback" not in output
    process, _ = _start(repo, folder, "--model", str(folder / "none"))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2 and "no such folder" in output and "Traceback" not in output
