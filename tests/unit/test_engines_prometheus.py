"""Metrics pages as servers should not send them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from engines.catalog import adapter, names
from engines.prometheus import parse, total, total_by_position
from harness.attach import Served, served_models
from harness.measure import fetch as fetch_module
from harness.measure.counters import CounterReader
from harness.measure.fetch import FetchError, fetch
from harness.measure.told import read_acceptance_of

NAME = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def test_values_that_are_no_counts_are_left_out() -> None:
    text = 'a 1\na NaN\na +Inf\na -Inf\na 1e300\na x\na\na{b="}" } 2\n'
    assert total(parse(text), "a") == 3


def test_absurd_positions_are_left_out() -> None:
    lines = [f'{NAME}{{position="{p}"}} 5' for p in ("0", "99999999999999", "-1", "x", "²")]
    assert total_by_position(parse("\n".join(lines)), NAME) == (5,)


@pytest.mark.parametrize("name", [n for n in names() if adapter(n).metrics_path])
@pytest.mark.parametrize(
    "text", ["", "<html>", "vllm:generation_tokens_total +Inf\n", "sglang:x NaN\n", "\0\ufffd"]
)
def test_counters_of_a_strange_page_are_none_or_numbers(name: str, text: str) -> None:
    reader = CounterReader(adapter(name), "http://127.0.0.1:1", httpx.Client())
    reader._http = answering(lambda request: httpx.Response(200, text=text))
    found = reader.read()
    assert found is None or found.generation_tokens is None
    reader.close()


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    "told",
    [
        7,
        "x",
        [],
        {"speculative_decoding": 7},
        {"speculative_decoding": {"num_spec_steps": 1}},
        {
            "speculative_decoding": {
                "num_spec_steps": "3",
                "num_draft_tokens": 10**30,
                "num_accepted_draft_tokens": None,
                "acceptance_histogram": [1, "x"],
            }
        },
        {"spec_tokens_details": {"spec_verify_ct": "x"}},
        {"spec_tokens_details": {"spec_verify_ct": 10**30, "spec_num_correct_drafts": -3}},
        {
            "speculative_decoding": {
                "num_spec_steps": 2**62,
                "num_draft_tokens": 2**62,
                "num_accepted_draft_tokens": 2**62,
                "acceptance_histogram": [0, 2**62],
            }
        },
    ],
)
def test_acceptance_in_a_strange_shape_is_none(name: str, told: object) -> None:
    payloads = [{"metrics": told, "sglext": told, "choices": []}]
    assert read_acceptance_of(adapter(name), payloads) is None


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def test_a_fetch_is_bounded_in_bytes_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 1000

    monkeypatch.setattr(fetch_module, "MAX_BYTES", 5000)
    with (
        answering(lambda _: httpx.Response(200, content=endless())) as client,
        pytest.raises(FetchError, match="longer than"),
    ):
        fetch(client, "http://h/", deadline_s=60)
    monkeypatch.setattr(fetch_module, "MAX_BYTES", 10**12)
    with (
        answering(lambda _: httpx.Response(200, content=endless())) as client,
        pytest.raises(FetchError, match="no whole answer"),
    ):
        fetch(client, "http://h/", deadline_s=0.02)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[" * 100_000,
        b"\xff\xfe",
        b"[1]",
        b'{"data": {"id": "x"}}',
        b'{"data": "abc"}',
        b'{"data": []}',
        b'{"data": [{"id": null}]}',
        b'{"data": [{"id": ""}]}',
        json.dumps({"data": [{"id": "\x1b[31m"}]}).encode(),
        json.dumps({"data": [{"id": "m" * 10_000}]}).encode(),
    ],
)
def test_no_model_in_a_strange_answer(body: bytes) -> None:
    assert served_models(body) == []


def test_models_are_named_with_their_context() -> None:
    body = (
        b'{"object": "list", "data": [{"id": "a", "root": 1, "max_model_len": 2048}, {"id": "b"}, '
        b'{"id": "c", "max_model_len": "4k"}, {"id": "d", "max_model_len": -1}]}'
    )
    assert served_models(body) == [
        Served(name="a", context=2048), Served(name="b"), Served(name="c"), Served(name="d"),
    ]  # fmt: skip
