"""The scripted server: what it sends is what its script says, and its record is the truth."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.vllm import read_counters
from harness.load.scripted.bare import run_bare
from harness.load.scripted.process import ScriptedServer, scripted_server
from harness.load.scripted.script import Answers, Script, Served, ServerRecord, Wanted

QUICK = Script(first_ms=5, gap_ms=2, chunks=7, tokens=(1, 2, 3))
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def quick() -> Iterator[ScriptedServer]:
    with scripted_server(QUICK) as server:
        yield server


def exchange(server: ScriptedServer, path: str, body: bytes, more: str = "") -> tuple[bytes, bytes]:
    """One POST on a connection of its own; head and body with the chunked encoding undone."""
    with socket.create_connection((server.host, server.port), timeout=300) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        connection.sendall(head.encode() + body)
        raw = b""
        while True:
            head_got, found, rest = raw.partition(b"\r\n\r\n")
            if found and b"chunked" in head_got and rest.endswith(b"0\r\n\r\n"):
                return head_got, unchunked(rest)
            if found and b"content-length: " in head_got:
                length = int(head_got.split(b"content-length: ")[1].split(b"\r\n")[0])
                if len(rest) >= length:
                    return head_got, rest
            got = connection.recv(65536)
            assert got, "closed in the middle of an answer"
            raw += got


def unchunked(raw: bytes) -> bytes:
    body = b""
    while True:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            assert raw == b"\r\n"
            return body
        body += raw[:length]
        assert raw[length : length + 2] == b"\r\n"
        raw = raw[length + 2 :]


def payloads(body: bytes) -> list[dict[str, Any]]:
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def request(number: int = 0, **more: Any) -> bytes:
    return json.dumps({"prompt": f"#{number} say it", "stream": True, **more}).encode()


def test_a_completion_carries_the_scripts_tokens_ids_and_usage(quick: ScriptedServer) -> None:
    body = request(stream_options=CONTINUOUS, return_token_ids=True)
    head, raw = exchange(quick, "/v1/completions", body)
    assert head.startswith(b"HTTP/1.1 200") and b"text/event-stream" in head
    *chunks, last = payloads(raw)
    carried = [1, 2, 3, 1, 2, 3, 1]
    assert [len(c["choices"][0]["token_ids"]) for c in chunks] == carried
    assert [c["choices"][0]["text"].count("token") for c in chunks] == carried
    so_far = [sum(carried[: i + 1]) for i in range(7)]
    assert [c["usage"]["completion_tokens"] for c in chunks] == so_far
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 6 + ["length"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 13


def test_a_chat_is_told_no_more_than_it_asks_for(quick: ScriptedServer) -> None:
    chunks = payloads(exchange(quick, "/v1/chat/completions", request())[1])
    assert len(chunks) == QUICK.chunks
    assert all("usage" not in c and "token_ids" not in c["choices"][0] for c in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": " token"}
    final = request(stream_options={"include_usage": True})
    chunks = payloads(exchange(quick, "/v1/chat/completions", final)[1])
    assert [("usage" in c) for c in chunks] == [False] * 7 + [True]


def test_an_answer_that_is_not_streamed_comes_whole_and_as_late(quick: ScriptedServer) -> None:
    begun = time.perf_counter()
    _, raw = exchange(quick, "/v1/chat/completions", request(stream=False))
    assert time.perf_counter() - begun >= QUICK.service_s
    answer = json.loads(raw)
    assert answer["usage"]["completion_tokens"] == QUICK.output_tokens
    assert answer["choices"][0]["message"]["content"].count("token") == QUICK.output_tokens


def test_bad_requests_are_answered_and_the_server_lives(quick: ScriptedServer) -> None:
    head, raw = exchange(quick, "/v1/completions", b"{not json")
    assert head.startswith(b"HTTP/1.1 400") and "error" in json.loads(raw)
    assert exchange(quick, "/v1/nothing", b"{}")[0].startswith(b"HTTP/1.1 404")
    with socket.create_connection((quick.host, quick.port), timeout=300) as connection:
        connection.sendall(b"what is this\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    assert json.loads(quick.get("/v1/models"))["data"][0]["id"] == "scripted"
    assert quick.get("/health") == b""


def test_connection_close_is_obeyed(quick: ScriptedServer) -> None:
    body = request()
    with socket.create_connection((quick.host, quick.port), timeout=300) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        raw = b""
        while got := connection.recv(65536):
            raw += got
    assert raw.endswith(b"0\r\n\r\n")


def test_the_record_holds_every_write_on_schedule() -> None:
    script = Script(first_ms=20, gap_ms=5, chunks=8)
    begun = time.perf_counter_ns()
    with scripted_server(script) as server:
        run = run_bare(server.host, server.port, streams=3, requests=9, max_tokens=8, timeout_s=60)
        record = server.record()
    ended = time.perf_counter_ns()
    assert sorted(served.number or 0 for served in record.requests) == list(range(9))
    by_number = {note.number: note for note in run.requests}
    for served in record.requests:
        writes = served.write_ns
        assert served.whole and len(writes) == 8
        assert begun < served.read_ns < writes[0] and writes[-1] < ended
        # Never before it is due: how late is the machine's affair.
        assert writes[0] - served.read_ns >= 20e6
        assert writes[7] - served.read_ns >= 20e6 + 7 * 5e6
        note = by_number[served.number or 0]
        # One clock for both processes: nothing arrives before it was written.
        assert note.sent_ns is not None and len(note.chunk_ns) == 8
        assert all(went <= came for went, came in zip(writes, note.chunk_ns, strict=True))


def test_service_slots_bound_what_is_under_way_first_come_first_served() -> None:
    script = Script(first_ms=10, gap_ms=5, chunks=5, service_slots=2)
    with scripted_server(script) as server:
        run_bare(server.host, server.port, streams=8, requests=8, max_tokens=5, timeout_s=60)
        record = server.record()
    spans = sorted((s.write_ns[0] - 10_000_000, s.write_ns[-1]) for s in record.requests)
    for begin, _ in spans:
        assert sum(b <= begin < e for b, e in spans) <= 2
    by_read = sorted(record.requests, key=lambda served: served.read_ns)
    firsts = [served.write_ns[0] for served in by_read]
    assert firsts == sorted(firsts)
    # Each after the first two begins once another slot is free.
    ends = sorted(served.write_ns[-1] for served in record.requests)
    for first, end in zip(firsts[2:], ends, strict=False):
        assert first - end >= script.first_ms * 1e6


def test_counters_agree_with_what_was_sent() -> None:
    with scripted_server(QUICK) as server:
        before = read_counters(server.get("/metrics").decode())
        run_bare(server.host, server.port, streams=2, requests=4, max_tokens=13, timeout_s=60)
        after = read_counters(server.get("/metrics").decode())
    assert before is not None and before.drafts == 0 and before.generation_tokens == 0
    assert after is not None
    # 4 answers of 1 2 3 1 2 3 1 tokens: six steps after the first chunk, two drafts in each
    assert (after.drafts, after.drafted, after.accepted) == (24, 48, 24)
    assert tuple(after.accepted_per_position or ()) == (16, 8)
    assert after.generation_tokens == 52
    assert (after.requests_finished, after.running, after.waiting) == (4, 0, 0)


def test_a_server_of_one_token_a_chunk_has_no_drafts() -> None:
    with scripted_server(Script(first_ms=1, gap_ms=1, chunks=2)) as server:
        counters = read_counters(server.get("/metrics").decode())
    assert counters is not None and counters.drafts is None


def test_a_client_that_goes_away_frees_its_slot() -> None:
    script = Script(first_ms=20, gap_ms=20, chunks=5, service_slots=1)
    with scripted_server(script) as server:

        def go_away() -> None:
            with socket.create_connection((server.host, server.port)) as connection:
                body = request()
                head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
                assert connection.recv(65536)

        for _ in range(30):  # a client that this machine holds up leaves too late
            before = len(server.record().requests)
            for _ in range(3):
                go_away()
            exchange(server, "/v1/completions", request(7))
            whole = [s.number for s in server.record().requests[before:] if s.whole]
            if whole == [7]:
                break
    assert whole == [7]


def test_a_client_that_does_not_read_gets_every_byte_later() -> None:
    script = Script(first_ms=0, gap_ms=0, chunks=20_000)
    with scripted_server(script) as server:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((server.host, server.port))
            body = request(stream_options=CONTINUOUS)
            head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            time.sleep(0.5)
            raw = b""
            while not raw.endswith(b"0\r\n\r\n"):
                raw += connection.recv(1 << 20)
        chunks = payloads(unchunked(raw.partition(b"\r\n\r\n")[2]))
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == [*range(1, 20_001), 20_000]


def test_requests_on_one_connection_follow_each_other(quick: ScriptedServer) -> None:
    async def two() -> bytes:
        reader, writer = await asyncio.open_connection(quick.host, quick.port)
        for _ in range(2):
            body = request()
            head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            raw = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
        return raw

    assert len(payloads(unchunked(asyncio.run(two()).partition(b"\r\n\r\n")[2]))) == 7


def test_it_ends_with_its_starter_and_leaves_its_record(tmp_path: Path) -> None:
    file = tmp_path / "record"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "harness.load.scripted.server",
            "--stop-with-stdin",
            "--record",
            str(file),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline().startswith(b"http://127.0.0.1:")
    process.stdin.close()
    assert process.wait(300) == 0
    process.stdout.close()
    record = msgspec.msgpack.decode(file.read_bytes(), type=ServerRecord)
    assert record.requests == []


@pytest.mark.parametrize("wrong", ["--tokens=1,x", "--tokens=0", "--chunks=0", "--gap-ms=-1"])
def test_a_script_that_cannot_be_is_refused(wrong: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.load.scripted.server", wrong],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_an_answer_is_made_once_and_each_write_is_one_chunk() -> None:
    answers = Answers(Script(chunks=4))
    wanted = Wanted(stream=True, stream_options={"include_usage": True})
    writes = answers.stream(chat=True, wanted=wanted)
    assert answers.stream(chat=True, wanted=wanted) is writes
    assert len(writes) == 4
    assert [w.count(b'"choices":[{') for w in writes] == [1] * 4
    assert writes[-1].endswith(b"0\r\n\r\n") and not writes[0].endswith(b"0\r\n\r\n")
    assert Served(1, 2, b"", False).write_ns == []
