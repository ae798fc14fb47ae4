"""Log-probabilities as servers tell them, and every way in which they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.logprobs import LogprobReader, NoLogprobs, gap_of

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]
SCORED = {
    "choices": [
        {
            "text": " a b",
            "logprobs": {
                "tokens": [" a", " b"],
                "token_logprobs": [-0.5, -1.0],
                "top_logprobs": [{" a": -0.5, " c": -2.0}, None],
            },
        }
    ]
}


def reader(answer: Answer, seen: list[dict[str, Any]] | None = None) -> LogprobReader:
    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if seen is not None:
            seen.append({"path": request.url.path, **body})
        status, told = answer(request.url.path, body)
        data = told if isinstance(told, bytes) else json.dumps(told).encode()
        return httpx.Response(status, content=data)

    http = httpx.Client(transport=httpx.MockTransport(handle))
    return LogprobReader(http, "http://server", "m")


def test_a_greedy_continuation_is_read() -> None:
    seen: list[dict[str, Any]] = []
    found = reader(lambda path, body: (200, SCORED), seen).greedy("prose", "Once", 2)
    assert found.tokens == (" a", " b")
    assert found.logprobs == (-0.5, -1.0)
    assert found.top == ({" a": -0.5, " c": -2.0}, {})
    (asked,) = seen
    assert asked["path"] == "/v1/completions"
    assert (asked["temperature"], asked["max_tokens"], asked["model"]) == (0, 2, "m")
    assert "return_tokens_as_token_ids" not in asked  # names are what engines share


@pytest.mark.parametrize(
    ("status", "told", "needle"),
    [
        (404, {}, "answers 404"),
        (200, b"<html>", "no JSON"),
        (200, b"[1]", "no JSON object"),
        (200, {}, "no choice"),
        (200, {"choices": []}, "no choice"),
        (200, {"choices": ["x"]}, "no choice"),
        (200, {"choices": [{"text": "a"}]}, "no log-probabilities"),
        (200, {"choices": [{"logprobs": None}]}, "no log-probabilities"),
        (200, {"choices": [{"logprobs": {"tokens": [], "token_logprobs": [],
                                         "top_logprobs": []}}]}, "no log-probabilities"),
        (200, {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [None],
                                         "top_logprobs": [{}]}}]}, "no log-probabilities"),
        (200, b"\xff", "no JSON"),
    ],
)  # fmt: skip
def test_what_is_of_no_use_is_said_in_a_line(status: int, told: Any, needle: str) -> None:
    with pytest.raises(NoLogprobs, match=needle) as raised:
        reader(lambda path, body: (status, told)).greedy("prose", "Once", 2)
    assert "\n" not in str(raised.value)


def test_a_server_that_does_not_answer_is_no_crash() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    http = httpx.Client(transport=httpx.MockTransport(refuse))
    with pytest.raises(NoLogprobs, match="refused"):
        LogprobReader(http, "http://server", "m").greedy("prose", "Once", 2)


def test_the_next_token_by_ids() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert body["return_tokens_as_token_ids"] is True
        assert body["prompt"] == [5, 6]
        return 200, {"choices": [{"logprobs": {"top_logprobs": [{"token_id:7": -0.1}]}}]}

    assert reader(answer).next_token([5, 6]) == {7: -0.1}


def test_sglang_is_asked_by_its_own_endpoint() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/completions":  # it names tokens by their texts
            return 200, {"choices": [{"logprobs": {"top_logprobs": [{" a": -0.1}]}}]}
        assert path == "/generate"
        assert body["input_ids"] == [5, 6]
        top = [[[-0.1, 7, " a"], [-3.0, 8, None]]]
        return 200, {"text": " a", "meta_info": {"output_top_logprobs": top}}

    assert reader(answer).next_token([5, 6]) == {7: -0.1, 8: -3.0}
    with pytest.raises(NoLogprobs, match="404"):
        reader(lambda path, body: (404, {})).next_token([5, 6])
    with pytest.raises(NoLogprobs, match="no token ids"):
        reader(lambda path, body: (200, {"meta_info": {}})).next_token([5, 6])


def test_the_prompts_tokens_stand_in_either_place() -> None:
    whole = reader(lambda path, body: (200, {"choices": [{}], "prompt_token_ids": [1, 2]}))
    assert whole.prompt_ids("/v1/chat/completions", {}) == [1, 2]
    inner = reader(lambda path, body: (200, {"choices": [{"prompt_token_ids": [3]}]}))
    assert inner.prompt_ids("/v1/completions", {}) == [3]
    for odd in (None, [], ["a"], "12"):
        silent = reader(lambda path, body, odd=odd: (200, {"choices": [{"prompt_token_ids": odd}]}))
        with pytest.raises(NoLogprobs, match="prompt's tokens"):
            silent.prompt_ids("/v1/completions", {})


def test_gaps() -> None:
    best = {1: -0.1, 2: -0.4, 3: -5.0}
    assert gap_of(best, (1, 2), 0.5) == pytest.approx(0.3)
    assert gap_of(best, (2, 3), 0.5) == pytest.approx(4.9)
    assert gap_of(best, (1, 9), 0.5) == pytest.approx(4.9)  # at least that far below
    assert gap_of({1: -0.1, 2: -0.2}, (1, 9), 0.5) is None  # it may lie just below the second
    assert gap_of({}, (1, 2), 0.5) is None


@given(
    st.dictionaries(st.integers(0, 20), st.floats(-20, 0), min_size=1, max_size=10),
    st.integers(0, 30),
    st.integers(0, 30),
    st.floats(0.001, 1),
)
def test_a_gap_is_none_or_not_negative(
    best: dict[int, float], one: int, other: int, bound: float
) -> None:
    gap = gap_of(best, (one, other), bound)
    assert gap is None or gap >= 0
    if one in best and other in best:
        assert gap == gap_of(best, (other, one), bound)


def completion(**choice: Any) -> dict[str, Any]:
    return {"choices": [choice]}


def test_a_prompt_is_scored_in_vllms_form() -> None:
    seen: list[dict[str, Any]] = []
    entries = [None, {"7": {"logprob": -0.5}, "3": {"logprob": -0.1}}, {"9": {"logprob": -2.0}}]
    answer = (200, completion(prompt_logprobs=entries))
    assert reader(lambda path, body: answer, seen).scored([5, 7, 9]) == [None, -0.5, -2.0]
    assert seen[0]["prompt_logprobs"] == 0
    assert seen[0]["prompt"] == [5, 7, 9]


def test_a_prompt_is_scored_in_sglangs_form() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/generate":
            return 200, completion(text="", logprobs=None)
        assert body["logprob_start_len"] == 0
        told = [[None, 5, None], [-0.25, 7, None]]
        return 200, {"meta_info": {"input_token_logprobs": told}}

    assert reader(answer).scored([5, 7]) == [None, -0.25]


@pytest.mark.parametrize(
    "entries",
    [[None], [None, {"8": {"logprob": -1.0}}], [None, {"7": {"logprob": float("nan")}}], "x", None],
)
def test_a_score_that_is_not_of_every_token_is_none(entries: Any) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (404, {}) if path == "/generate" else (200, completion(prompt_logprobs=entries))

    with pytest.raises(NoLogprobs):
        reader(answer).scored([5, 7])


def test_a_continuation_has_ids_and_log_probabilities_in_both_forms() -> None:
    scored = {"tokens": ["token_id:4", "token_id:6"], "token_logprobs": [-0.5, -1.5]}
    first = reader(lambda path, body: (200, completion(logprobs=scored)))
    assert first.continued([1, 2], 2) == ([4, 6], [-0.5, -1.5])

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/generate":
            named = {"tokens": [" a", " b"], "token_logprobs": [-0.5, -1.5]}
            return 200, completion(logprobs=named)
        told = {"output_token_logprobs": [[-0.5, 4, None], [-1.5, 6, None]]}
        return 200, {"meta_info": told}

    assert reader(answer).continued([1, 2], 2) == ([4, 6], [-0.5, -1.5])
