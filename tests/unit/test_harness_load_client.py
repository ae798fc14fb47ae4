"""The client against a scripted server: faults, counts, clocks."""

from __future__ import annotations

import asyncio
import itertools
import json
from time import perf_counter_ns
from typing import Any

import pytest
from harness_scripted import (
    CLOSE,
    END,
    RESET,
    SSE_HEAD,
    Script,
    Seen,
    chunked,
    event,
    serve,
    stream,
    token,
    whole,
)
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.load.prompts.datasets import Prompt
from harness.load.streaming.answer import Answer, AnswerReader, split_reasoning
from harness.load.streaming.client import (
    Asking,
    Client,
    check_prompts,
    request_body,
    with_acceptance,
)
from harness.load.streaming.origin import Origin
from harness.plan.schema import SamplingSection
from harness.records import DraftCounts, RequestRecord

PROMPT = Prompt(id="p1", category="sum", messages=({"role": "user", "content": "1+1"},), answer="2")


def asking(url: str, **more: Any) -> Asking:
    fields: dict[str, Any] = {
        "url": url,
        "model": "m",
        "endpoint": "chat",
        "max_tokens": 8,
        "sampling": SamplingSection(),
        "timeout_s": 60.0,
    }
    return Asking(**{**fields, **more})


def ask(script: Script, times: int = 1, **more: Any) -> tuple[list[RequestRecord], Seen]:
    async def go() -> tuple[list[RequestRecord], Seen]:
        async with serve(script) as (url, seen):
            client = Client(asking(url, **more), "cell")
            records = [await client.ask(i, PROMPT, None) for i in range(times)]
            await client.aclose()
            return records, seen

    return asyncio.run(go())


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


GOOD = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], **usage(5, 0)},
    token([1], "so</think>"),
    token([2, 3], "2"),
    token([4], "", choice={"finish_reason": "stop"}),
    {"choices": [], **usage(5, 4)},
]


def test_counts_come_from_token_ids_and_chunks_are_not_tokens() -> None:
    (record,), seen = ask(lambda n, body: stream(GOOD))
    assert record.status == "ok"
    assert record.chunk_tokens == (1, 2, 1)
    assert record.token_ids == (1, 2, 3, 4)
    assert (record.output_tokens, record.token_source, record.prompt_tokens) == (4, "token_ids", 5)
    assert (record.text, record.reasoning, record.correct) == ("2", "so", True)
    assert record.finish_reason == "stop"
    assert record.sent_ns is not None
    assert record.sent_ns < record.chunk_ns[0] <= record.chunk_ns[-1]
    assert seen.bodies[0]["stream_options"]["continuous_usage_stats"] is True


def test_each_answer_can_be_had_as_it_comes_with_its_first_payload() -> None:
    async def go() -> None:
        answers: dict[int, Answer] = {}
        first = {**GOOD[0], "prompt_token_ids": [7, 8]}

        def script(number: int, body: dict[str, Any]) -> Any:
            return stream([first, *GOOD[1:]]) if number == 0 else [whole("500 No", "{}")]

        async with serve(script) as (url, _):
            client = Client(asking(url), "cell", on_answer=answers.__setitem__)
            for index in (3, 4):
                record = await client.ask(index, PROMPT, None)
                assert answers[index].error == record.error
            await client.aclose()
        assert json.loads(answers[3].head or b"") == first
        assert answers[4].head is None and answers[4].error is not None

    asyncio.run(go())


def test_an_error_that_repeats_a_secret_is_recorded_without() -> None:
    said = json.dumps({"error": {"message": "no such key: s3cret-key (of s3cret-header)"}})
    more = {"api_key": "s3cret-key", "secrets": ("Bearer s3cret-header", "s3cret-header")}
    (record,), _ = ask(lambda n, body: [whole("401 No", said)], **more)
    assert record.status == "failed"
    assert record.error is not None and "no such key: (not written down) (of" in record.error
    assert "s3cret" not in record.error


def test_counts_come_from_continuous_usage_without_ids() -> None:
    chunks = [
        token(None, "a", **usage(5, 1)),
        token(None, "bcd", **usage(5, 4)),
        token(None, "", choice={"finish_reason": "stop"}, **usage(5, 4)),
        {"choices": [], **usage(5, 4)},
    ]
    (record,), _ = ask(lambda n, body: stream(chunks))
    assert record.chunk_tokens == (1, 3)
    assert (record.output_tokens, record.token_source, record.token_ids) == (4, "usage", None)


def test_usage_at_the_end_alone_gives_the_total_and_no_tokens_per_chunk() -> None:
    chunks = [token(None, "a"), token(None, "bc"), {"choices": [], **usage(5, 3)}]
    (record,), _ = ask(lambda n, body: stream(chunks))
    assert (record.output_tokens, record.token_source) == (3, "usage")
    assert record.chunk_tokens is None
    assert len(record.chunk_ns) == 2


def test_no_count_from_the_server_is_none_not_the_number_of_chunks() -> None:
    (record,), _ = ask(lambda n, body: stream([token(None, "a"), token(None, "b")]))
    assert (record.status, record.output_tokens, record.token_source) == ("ok", None, None)


def test_reasoning_fields_are_output_too() -> None:
    chunks = [
        {"choices": [{"delta": {"reasoning_content": "hm "}, "token_ids": [1]}]},
        {"choices": [{"delta": {"reasoning": "so"}, "token_ids": [2]}]},
        token([3], "2", choice={"finish_reason": "stop"}),
    ]
    (record,), _ = ask(lambda n, body: stream(chunks))
    assert (record.reasoning, record.text, record.correct) == ("hm so", "2", True)
    assert len(record.chunk_ns) == 3


def test_completions_endpoint_reads_text() -> None:
    chunks = [
        {"choices": [{"text": "a", "token_ids": [1], "finish_reason": None}]},
        {"choices": [{"text": "b", "token_ids": [2], "finish_reason": "length"}]},
    ]

    async def go() -> RequestRecord:
        async with serve(lambda n, body: stream(chunks)) as (url, seen):
            client = Client(asking(f"{url}/v1", endpoint="completions"), "cell")
            record = await client.ask(0, Prompt(id="t", text="x"), None)
            assert seen.headers[0].startswith("POST /v1/completions HTTP/1.1")
            await client.aclose()
            return record

    record = asyncio.run(go())
    assert (record.text, record.output_tokens, record.finish_reason) == ("ab", 2, "length")


def test_an_answer_without_done_or_length_ends_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    body = event(token([1], "2", choice={"finish_reason": "stop"}))
    (record,), _ = ask(lambda n, _: [head, body, CLOSE])
    assert (record.status, record.text) == ("ok", "2")


def test_an_answer_in_one_piece_is_one_chunk() -> None:
    message = {"message": {"content": "2"}, "finish_reason": "stop"}
    reply = json.dumps({"choices": [message], **usage(3, 1)})
    (record,), _ = ask(lambda n, _: [whole("200 OK", reply)])
    assert (record.status, record.text, record.output_tokens) == ("ok", "2", 1)


@pytest.mark.parametrize(
    ("steps", "needle", "http_status"),
    [
        (
            [whole("404 Not Found", '{"error": {"message": "no model\\nm"}}')],
            "HTTP 404: no model m",
            404,
        ),
        ([whole("500 Oops", "<html>boom", "text/html")], "HTTP 500: <html>boom", 500),
        ([whole("429 Slow", "", more="retry-after: 3\r\n")], "HTTP 429", 429),
        ([whole("422 No", '{"detail": "bad field"}')], "HTTP 422: bad field", 422),
        ([RESET], "before it answered", None),
        ([CLOSE], "before it answered", None),
        ([SSE_HEAD, chunked(event(GOOD[1])), RESET], "in the middle of the answer", 200),
        ([SSE_HEAD, chunked(event(GOOD[1])), CLOSE], "in the middle of the answer", 200),
        ([SSE_HEAD, chunked(event(GOOD[1])), END], "ended before the answer did", 200),
        (
            [SSE_HEAD, chunked(event({"error": {"message": "out of memory"}})), END],
            "out of memory",
            200,
        ),
        ([SSE_HEAD, chunked(b"data: {nonsense\n\n"), END], "not JSON", 200),
        ([SSE_HEAD, chunked(event("[DONE]")), END], "holds no output", 200),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "not an HTTP answer", None),
        ([whole("200 OK", "hello", "text/plain")], "neither an event stream nor JSON", 200),
        ([whole("200 OK", "[" * 100_000)], "neither an event stream nor JSON", 200),
        ([whole("200 OK", '{"choices": 3}')], "choices is 3", 200),
        ([whole("500 Oops", "\x1b[31mred\x00", "text/html")], "HTTP 500: [31mred", 500),
        ([SSE_HEAD, b"zz\r\nnot a chunk\r\n"], "not an HTTP answer", 200),
        ([b"HTTP/1.1 101 Switch\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"], "HTTP 101", 101),
        ([b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000], "headers of more than", None),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000], "headers of more than", None),
        ([SSE_HEAD, chunked(b"data: " + b"x" * 9_000_000), END], "event of more than", 200),
        ([SSE_HEAD, chunked(b"data: x\n" * 300_000), END], "event of more than", 200),
        ([SSE_HEAD, chunked(b"data: " + b"[" * 100_000 + b"\n\n"), END], "not JSON", 200),
        ([SSE_HEAD, chunked(b"event: error\ndata: 7\n\n"), END], "an error: 7", 200),
        (
            [
                SSE_HEAD.replace(b"\r\n", b"\r\ncontent-encoding: gzip\r\n", 1),
                chunked(b"\x1f"),
                END,
            ],
            "compressed (gzip)",
            200,
        ),
        (
            [whole("307 Moved", "", more="location: http://x/v1/chat/completions\r\n")],
            "HTTP 307: moved to http://x/v1/chat/completions; give its root with --url",
            307,
        ),
    ],
)
def test_every_fault_is_a_failed_record(
    steps: list[Any], needle: str, http_status: int | None
) -> None:
    (record,), _ = ask(lambda n, _: steps)
    assert record.status == "failed"
    assert record.error is not None
    assert needle in record.error
    assert "\n" not in record.error
    assert record.http_status == http_status
    assert record.correct is None


MALFORMED = [
    7,
    [1],
    {"choices": {"0": 1}},
    {"choices": [7]},
    {"choices": [{"delta": "x"}]},
    {"choices": [{"message": [1]}]},
    {"usage": 7, "choices": []},
    {"usage": {"completion_tokens": "4"}},
    {"usage": {"completion_tokens": -1}},
    {"usage": {"completion_tokens": 1.5}},
    {"usage": {"completion_tokens": True}},
    {"usage": {"completion_tokens": 10**30}},
    {"usage": {"prompt_tokens": [1]}},
    token(7, "x"),  # type: ignore[arg-type]
    token(["7"], "x"),  # type: ignore[list-item]
    token([-1], "x"),
    token([2**63], "x"),
    token([10**40], "x"),
    token(None, "x", choice={"delta": {"content": "x", "token_ids": {}}}),
]


@pytest.mark.parametrize("payload", MALFORMED)
def test_a_chunk_of_a_strange_shape_fails_its_request_and_is_named(payload: Any) -> None:
    steps = [SSE_HEAD, chunked(event(GOOD[1])), chunked(event(payload)), *stream(GOOD[2:])[1:]]
    (record,), _ = ask(lambda n, _: [s for s in steps if s != 0.0])
    assert record.status == "failed"
    assert "cannot be understood" in (record.error or "")
    assert record.token_ids is not None
    assert record.token_ids[0] == 1


def test_usage_that_runs_backwards_fails_its_request() -> None:
    chunks = [token(None, "a", **usage(5, 4)), token(None, "b", **usage(5, 2))]
    (record,), _ = ask(lambda n, _: stream(chunks))
    assert record.status == "failed"
    assert "backwards" in (record.error or "")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "choices",
                        "usage",
                        "delta",
                        "content",
                        "token_ids",
                        "error",
                        "message",
                        "completion_tokens",
                        "prompt_tokens",
                        "finish_reason",
                        "text",
                        "reasoning",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_no_payload_whatever_breaks_the_reader(payload: Any) -> None:
    for kind in ("text/event-stream", "application/json"):
        reader = AnswerReader()
        reader.head(200, {b"content-type": kind.encode()})
        raw = json.dumps(payload).encode()
        reader.piece(1, b"data: " + raw + b"\n\n" if "stream" in kind else raw)
        answer = reader.answer()
        assert answer.error is None or answer.error
        assert all(type(i) is int for i in answer.token_ids or ())


def test_an_interim_answer_is_not_the_answer() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    (record,), _ = ask(lambda n, _: [interim, 0.01, *stream(GOOD)])
    assert (record.status, record.http_status, record.text) == ("ok", 200, "2")


def test_an_answer_nobody_asked_for_is_not_taken_for_the_next_one() -> None:
    wrong = whole("200 OK", '{"choices": [{"message": {"content": "stale"}}]}')

    async def go() -> list[RequestRecord]:
        written = asyncio.Event()

        def script(number: int, _: Any) -> Any:
            yield from stream(GOOD)
            if number == 0:
                yield 0.02
                yield wrong
                written.set()

        async with serve(script) as (url, _):
            client = Client(asking(url), "cell")
            first = await client.ask(0, PROMPT, None)
            await written.wait()
            await asyncio.sleep(0.2)
            second = await client.ask(1, PROMPT, None)
            await client.aclose()
            return [first, second]

    assert [r.text for r in asyncio.run(go())] == ["2", "2"]


def test_a_second_answer_in_the_same_read_is_not_taken_for_the_first() -> None:
    steps = stream(GOOD)
    twice = b"".join(step for step in steps if isinstance(step, bytes)) * 2
    records, seen = ask(lambda n, _: [twice], times=2)
    assert [(r.status, r.text, r.output_tokens) for r in records] == [("ok", "2", 4)] * 2
    assert seen.connections == 2


def test_a_failed_request_keeps_the_chunks_it_got() -> None:
    (record,), _ = ask(lambda n, _: [SSE_HEAD, chunked(event(GOOD[1])), 0.02, RESET])
    assert (record.status, record.token_ids) == ("failed", (1,))


def test_a_timeout_is_a_failed_record() -> None:
    (record,), _ = ask(lambda n, _: [SSE_HEAD, 5.0], timeout_s=0.1)
    assert record.status == "failed"
    assert "load.timeout_s" in (record.error or "")


def test_nobody_listening_is_a_failed_record() -> None:
    async def go() -> RequestRecord:
        async with serve(lambda n, b: []) as (url, _):
            gone = url
        return await Client(asking(gone), "cell").ask(0, PROMPT, None)

    record = asyncio.run(go())
    assert (record.status, record.sent_ns) == ("failed", None)
    assert "no connection" in (record.error or "")


def test_connections_are_kept_and_replaced_when_the_server_closed_them() -> None:
    records, seen = ask(lambda n, _: stream(GOOD), times=5)
    assert (seen.connections, {r.status for r in records}) == (1, {"ok"})
    records, seen = ask(lambda n, _: [*stream(GOOD), 0.0, CLOSE], times=5)
    assert {r.status for r in records} == {"ok"}
    assert len(seen.bodies) == 5


def test_a_request_larger_than_the_socket_buffer_is_sent_whole() -> None:
    prompt = Prompt(id="long", text="x" * 8_000_000)

    async def go() -> tuple[RequestRecord, Seen]:
        async with serve(lambda n, b: stream(GOOD)) as (url, seen):
            client = Client(asking(url), "cell")
            record = await client.ask(0, prompt, None)
            await client.aclose()
            return record, seen

    record, seen = asyncio.run(go())
    assert record.status == "ok"
    assert len(seen.bodies[0]["messages"][0]["content"]) == 8_000_000


def test_the_key_goes_into_the_header_and_extra_fields_into_the_body() -> None:
    _, seen = ask(lambda n, b: stream(GOOD), api_key="k", extra={"return_token_ids": True})
    assert "Authorization: Bearer k" in seen.headers[0]
    assert seen.bodies[0]["return_token_ids"] is True


def test_per_request_acceptance_is_read_from_the_payloads() -> None:
    def read(payloads: list[dict[str, Any]]) -> DraftCounts:
        return DraftCounts(drafts=len(payloads), accepted=0)

    async def go() -> list[RequestRecord]:
        async with serve(lambda n, b: stream(GOOD if n == 0 else [])) as (url, _):
            client = Client(asking(url), "cell")
            records = [await client.ask(i, PROMPT, None) for i in range(2)]
            await client.aclose()
            return with_acceptance(records, client.tails, read)

    good, empty = asyncio.run(go())
    assert good.acceptance == DraftCounts(drafts=5, accepted=0)
    assert empty.acceptance is None


def test_clock_readings_agree_with_the_servers_own() -> None:
    # On one clock each moment lies between its neighbours, however late this machine is.
    begun = perf_counter_ns()
    (record,), seen = ask(lambda n, b: stream(GOOD[1:], first_s=0.05, gap_s=0.03))
    ended = perf_counter_ns()
    assert record.sent_ns is not None
    writes = seen.writes_ns[0]
    assert begun <= record.sent_ns <= seen.received_ns[0] <= writes[0]
    for written, arrived in zip(writes[1:], record.chunk_ns, strict=False):
        assert written <= arrived
    for earlier, later in itertools.pairwise(record.chunk_ns):
        assert later - earlier > 0
    assert record.chunk_ns[-1] <= ended


@given(st.lists(st.integers(0, 300), max_size=20), st.sampled_from(["\n", "\r\n"]))
def test_any_split_of_the_body_gives_the_same_answer(cuts: list[int], newline: str) -> None:
    chunks = [*GOOD[:2], token([2, 3], "2é", choice={"finish_reason": "stop"}), GOOD[4], "[DONE]"]
    raw = b"".join(event(c, newline) for c in chunks)
    edges = sorted({0, len(raw), *(c for c in cuts if c < len(raw))})
    reader = AnswerReader()
    reader.head(200, {b"content-type": b"text/event-stream; charset=utf-8"})
    for i, (a, b) in enumerate(itertools.pairwise(edges)):
        reader.piece(i, raw[a:b])
    answer = reader.answer()
    assert (answer.error, answer.text, answer.token_ids) == (None, "2é", (1, 2, 3))
    assert answer.chunk_tokens == (1, 2)


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("so</think>2", None, ("2", "so")),
        ("<think>so</think>2", None, ("2", "so")),
        ("a</think>b</think>2", None, ("2", "a</think>b")),
        ("just 2", None, ("just 2", None)),
        ("x</think>2", "given", ("x</think>2", "given")),
    ],
)
def test_split_reasoning(text: str, field: str | None, expected: tuple[str, str | None]) -> None:
    assert split_reasoning(text, field) == expected


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:1/v1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1"),
        ("h:8000", "http://h:8000"),
        ("https://h/api/v1", "https://h:443/api"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_urls_with_or_without_v1(url: str, root: str) -> None:
    assert Origin.parse(url).root == root


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:99999", "http://h:x"])
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        Origin.parse(url)


def test_completions_wants_raw_prompts() -> None:
    with pytest.raises(UsageError, match="endpoint=chat"):
        check_prompts("completions", [PROMPT])
    check_prompts("chat", [PROMPT])


def test_the_seed_moves_with_the_index() -> None:
    sampling = SamplingSection(temperature=1.0, seed=10, top_p=0.9)
    body = request_body(asking("http://h", sampling=sampling), PROMPT, 3)
    assert (body["seed"], body["temperature"], body["top_p"]) == (13, 1.0, 0.9)


def test_the_answer_begins_behind_the_last_end_of_thinking_for_text_and_clock_alike() -> None:
    reader = AnswerReader()
    reader.head(200, {b"content-type": b"text/event-stream"})
    for at, text in enumerate(["a", "</think>b", "</think>", " ", "c"], start=1):
        reader.piece(at, event(token([at], text)))
    reader.piece(9, event("[DONE]"))
    answer = reader.answer()
    assert (answer.text, answer.reasoning) == (" c", "a</think>b")
    assert (answer.first_reasoning_ns, answer.first_answer_ns) == (1, 5)


def test_a_message_beside_an_empty_delta_is_read() -> None:
    both = {"choices": [{"delta": {}, "message": {"content": "x"}, "token_ids": [1]}]}
    (record,), _ = ask(lambda n, body: stream([both]))
    assert (record.text, record.token_ids) == ("x", (1,))


def test_what_follows_the_end_is_not_of_the_answer() -> None:
    (record,), _ = ask(lambda n, body: stream([*GOOD[:3], "[DONE]", token([9], "more")]))
    assert record.token_ids == (1, 2, 3)


def test_an_errors_endless_body_is_not_kept() -> None:
    reader = AnswerReader()
    reader.head(500, {b"content-type": b"text/plain"})
    for at in range(100):
        reader.piece(at, b"x" * 100_000)
    assert sum(map(len, reader._raw)) <= 1_100_000
    assert (reader.answer().error or "").startswith("HTTP 500: xxx")
