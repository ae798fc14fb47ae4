"""One cell's load from one process and from several, against a scripted server."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness_scripted import in_thread, stream, token, whole

from harness.errors import VoidRun
from harness.load.drive import Driven, _check, drive, workers_for
from harness.load.fidelity import CpuClock, LagSampler
from harness.load.prompts.datasets import Prompt
from harness.load.schedule.conversations import Share, dropped
from harness.load.slices import Board, Slice, Tally, read_slice, write
from harness.load.streaming import client as client_module
from harness.load.streaming.answer import AnswerReader
from harness.load.streaming.client import Asking, Client
from harness.plan.schema import SamplingSection
from harness.records import DraftCounts, LoadPoint

PROMPTS = [Prompt(id=str(i), text=f"#{i}", answer="x", turns=()) for i in range(7)]
STREAM = [token([1, 2], "x"), token([3], "", choice={"finish_reason": "stop"})]


def asking(url: str) -> Asking:
    return Asking(
        url=url, model="m", endpoint="chat", max_tokens=8, sampling=SamplingSection(), timeout_s=120
    )


def load(url: str, count: int = 20, **more: Any) -> Driven:
    given: dict[str, Any] = {"cell_id": "c", "seed": 3, "engine_gone": lambda: None, **more}
    point = given.pop("point", LoadPoint(mode="closed", concurrency=4, num_requests=count))
    return drive(asking(url), PROMPTS, point, **given)


def good(number: int, body: dict[str, Any]) -> Any:
    return stream(STREAM)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_request_is_made_once_however_many_processes_there_are(workers: int) -> None:
    tallies: list[Tally] = []
    with in_thread(good) as url:
        driven = load(url, workers=workers, on_tally=tallies.append)
    assert [r.index for r in driven.records] == list(range(20))
    assert [r.prompt_id for r in driven.records] == [str(i % 7) for i in range(20)]
    assert {r.status for r in driven.records} == {"ok"}
    assert {r.correct for r in driven.records} == {True}
    assert {r.worker for r in driven.records} == set(range(workers))
    assert [f.worker for f in driven.client] == list(range(workers))
    assert tallies[-1] == Tally(done=20, failed=0, tokens=60)
    assert driven.interrupted is None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_load_is_given_up_where_nothing_but_failures_comes(workers: int) -> None:
    def refusing(number: int, body: dict[str, Any]) -> Any:
        return [whole("503 Busy", "")]

    with in_thread(refusing) as url:
        driven = load(url, count=200, workers=workers)
    assert driven.given_up
    assert "requests in a row failed" in (driven.interrupted or "")
    assert len(driven.records) < 200


def test_processes_begin_together_and_share_the_arrivals() -> None:
    point = LoadPoint(mode="open", request_rate=200.0, num_requests=30, arrival="constant")
    with in_thread(good) as url:
        one = load(url, point=point, workers=1)
        two = load(url, point=point, workers=2)
    for driven in (one, two):
        due = [r.due_ns for r in driven.records if r.due_ns is not None]
        assert len(due) == 30
        assert {(b - a) / 1e6 for a, b in itertools.pairwise(due)} == {5.0}
    assert [r.worker for r in two.records[:4]] == [0, 1, 0, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_requests_own_acceptance_is_read_where_they_return(workers: int) -> None:
    def read(payloads: list[dict[str, Any]]) -> DraftCounts:
        return DraftCounts(drafts=len(payloads), accepted=0)

    with in_thread(good) as url:
        driven = load(url, workers=workers, read_acceptance=read)
    assert {r.acceptance for r in driven.records} == {DraftCounts(drafts=2, accepted=0)}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_that_is_gone_ends_the_load_and_keeps_the_records(workers: int) -> None:
    hanging = threading.Event()  # which only comes to be where another request has been answered

    def slow(number: int, body: dict[str, Any]) -> Any:
        if number >= 4:
            hanging.set()
        return stream(STREAM, first_s=0.0 if number < 4 else 600.0)

    with in_thread(slow) as url:
        driven = load(
            url, workers=workers, engine_gone=lambda: "it died" if hanging.is_set() else None
        )
    assert driven.interrupted == "it died"
    assert {r.status for r in driven.records} == {"ok", "failed"}
    assert {r.error for r in driven.records if r.status == "failed"} == {"it died"}


def test_a_process_with_nothing_to_do_is_not_started() -> None:
    with in_thread(good) as url:
        point = LoadPoint(mode="closed", concurrency=1, num_requests=4)
        driven = load(url, point=point, workers=2)
    assert len(driven.records) == 4
    assert [f.worker for f in driven.client] == [0]


def test_a_trace_takes_processes_by_its_busiest_second(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    times = [0.0, 10.0, *(20 + i / 1200 for i in range(1200)), 40.0]
    path.write_text("".join(f'{{"timestamp": {t}, "prompt": "x"}}\n' for t in times))
    assert workers_for(LoadPoint(mode="open", arrival="trace", trace=str(path)), 64) == 3
    assert workers_for(LoadPoint(mode="open", arrival="burst", num_requests=1600), 64) == 4


def test_a_process_that_breaks_is_told_in_one_line() -> None:
    with pytest.raises(VoidRun, match=r"load generating process \d ended with 1: .*not a URL"):
        load("ftp://nowhere", workers=2)


def test_a_process_that_is_killed_is_told_by_its_signal(tmp_path: Path) -> None:
    (tmp_path / "0.log").touch()
    processes = [subprocess.Popen(["sleep", "60"])]
    processes[0].kill()
    processes[0].wait()
    with pytest.raises(VoidRun, match=r"process 0 was killed by signal 9: it said nothing"):
        _check(processes, tmp_path)


def test_a_dropped_arrival_is_not_told_as_a_failure() -> None:
    tally = Tally().plus(dropped(PROMPTS[0], 0, 5, 1, "c"))
    assert (tally.done, tally.failed) == (1, 0)


def test_a_slice_survives_the_file(tmp_path: Path) -> None:
    work = Slice(
        asking=asking("http://h:1"),
        prompts=(*PROMPTS, Prompt(id="m", messages=({"role": "user", "content": [{"a": 1}]},))),
        load=LoadPoint(mode="open", schedule=((1.0, 2.0, 3.0),), arrival="schedule"),
        cell_id="c",
        seed=1,
        share=Share(worker=1, workers=2),
    )
    write(tmp_path / "slice", work)
    assert read_slice(tmp_path / "slice") == work


def test_the_board_adds_the_workers_up(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 2, create=True)
    other = Board(tmp_path / "board", 2)
    assert not board.all_ready()
    for worker in (0, 1):
        other.ready(worker)
        other.tell(worker, Tally(done=worker + 1, failed=worker, tokens=10))
    board.start_ns = 5
    assert board.all_ready()
    assert other.start_ns == 5
    assert board.tally() == Tally(done=3, failed=1, tokens=20)
    other.close()
    board.close()


@pytest.mark.parametrize(
    ("point", "cores", "expected"),
    [
        (LoadPoint(mode="closed", concurrency=64), 64, 1),
        (LoadPoint(mode="closed", concurrency=2000), 64, 4),
        (LoadPoint(mode="closed", concurrency=2000), 2, 1),
        (LoadPoint(mode="open", request_rate=1200.0), 64, 3),
        (LoadPoint(mode="open", schedule=((5.0, 1.0, 900.0),)), 64, 2),
    ],
)
def test_how_many_processes_a_load_takes(point: LoadPoint, cores: int, expected: int) -> None:
    assert workers_for(point, cores) == expected


def sampled(block_s: float) -> tuple[CpuClock, list[int]]:
    async def go() -> tuple[CpuClock, list[int]]:
        clock, lag = CpuClock(), LagSampler()
        await asyncio.sleep(0.05)
        time.sleep(block_s)
        await asyncio.sleep(0.05)
        return clock, lag.stop()

    return asyncio.run(go())


def test_a_blocked_loop_shows_in_the_lag() -> None:
    clock, lags = sampled(0.2)
    figures = clock.figures(1, lags)
    assert figures.loop_lag_max_s is not None
    assert figures.loop_lag_max_s >= 0.18
    assert figures.worker == 1


def test_no_sample_is_no_lag() -> None:
    figures = CpuClock().figures(0, [])
    assert (figures.loop_lag_p50_s, figures.loop_lag_max_s) == (None, None)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_hangs_ends_the_load_where_silence_is_bounded(workers: int) -> None:
    def hanging(number: int, body: dict[str, Any]) -> Any:
        return stream(STREAM, first_s=0.0 if number < 4 else 600.0)

    with in_thread(hanging) as url:
        quiet = msgspec.structs.replace(asking(url), quiet_s=1.0)
        point = LoadPoint(mode="closed", concurrency=4, num_requests=20)
        driven = drive(
            quiet,
            PROMPTS,
            point,
            cell_id="c",
            seed=3,
            engine_gone=lambda: None,
            workers=workers,
        )
    assert driven.interrupted == "nothing came from the server for 1 s"
    assert not driven.given_up
    assert {r.error for r in driven.records if r.status == "failed"} == {driven.interrupted}


def test_silence_is_counted_from_the_last_byte_of_any_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes without a token count too, and a request that has just begun has waited for none."""
    now_s = 10.0
    monkeypatch.setattr(client_module, "perf_counter_ns", lambda: int(now_s * 1e9))

    async def go() -> None:
        nonlocal now_s
        client = Client(asking("http://127.0.0.1:1"), "c")
        assert client.silent_s() == 0.0
        first, second = AnswerReader(), AnswerReader()
        client._under_way = {0: (int(10e9), first), 1: (int(25e9), second)}
        now_s = 30.0
        assert client.silent_s() == 20.0
        first.piece(int(28e9), b": still here\n\n")
        assert client.silent_s() == 2.0
        client._under_way = {2: (int(29e9), AnswerReader())}
        assert client.silent_s() == 1.0
        await client.aclose()

    asyncio.run(go())
