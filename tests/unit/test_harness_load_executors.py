"""Executors, arrivals and prompts, without a network."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from harness.load.prompts.datasets import Prompt
from harness.load.schedule.arrivals import poisson
from harness.load.schedule.executors import GIVE_UP_AFTER, Stop, execute
from harness.records import LoadPoint, RequestRecord

PROMPTS = [Prompt(id=str(i), text=f"prompt {i}") for i in range(7)]


def record(index: int, prompt: Prompt, due_ns: int | None, status: str = "ok") -> RequestRecord:
    return RequestRecord(
        cell_id="c", index=index, prompt_id=prompt.id, category=None, due_ns=due_ns, sent_ns=0,
        chunk_ns=(), chunk_tokens=None, end_ns=None, status=status, error="refused",  # type: ignore[arg-type]
        http_status=None, prompt_tokens=None, output_tokens=None, token_source=None,
        token_ids=None, text=None, reasoning=None, finish_reason=None, acceptance=None,
        correct=None,
    )  # fmt: skip


class Server:
    """Counts what is under way; takes `service_s` a request, or until `together` have come."""

    def __init__(
        self, service_s: float = 0.001, status: str = "ok", together: int | None = None
    ) -> None:
        self.service_s, self.status, self.together = service_s, status, together
        self.now = self.most = self.calls = 0
        self.came = asyncio.Event()

    async def __call__(self, index: int, prompt: Prompt, due_ns: int | None) -> RequestRecord:
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        if self.calls == self.together:
            self.came.set()
        try:
            if self.together is None:
                await asyncio.sleep(self.service_s)
            else:
                await asyncio.wait_for(self.came.wait(), self.service_s)
        except asyncio.CancelledError as error:
            if not error.args:
                raise
            return record(index, prompt, due_ns, "failed")
        finally:
            self.now -= 1
        return record(index, prompt, due_ns, self.status)


def run(server: Server, load: LoadPoint, stop_at_call: int | None = None) -> list[RequestRecord]:
    async def go() -> list[RequestRecord]:
        stop = Stop()

        async def send(index: int, prompt: Prompt, due_ns: int | None) -> RequestRecord:
            if server.calls + 1 == stop_at_call:
                stop.set("the engine died")
            return await server(index, prompt, due_ns)

        return await execute(send, PROMPTS, load, seed=1, stop=stop)

    return asyncio.run(go())


def test_closed_loop_keeps_its_concurrency_and_count() -> None:
    server = Server()
    records = run(server, LoadPoint(mode="closed", concurrency=3, num_requests=20))
    assert [r.index for r in records] == list(range(20))
    assert server.most == 3
    assert [r.prompt_id for r in records[:8]] == ["0", "1", "2", "3", "4", "5", "6", "0"]
    assert all(r.due_ns is None for r in records)


def test_closed_loop_by_duration_ends_and_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    clock = "harness.load.schedule.executors.perf_counter_ns"
    monkeypatch.setattr(clock, lambda: server.calls * 10_000_000)  # 10 ms a request
    records = run(server, LoadPoint(mode="closed", concurrency=2, duration_s=0.1))
    assert len(records) == 10
    assert server.now == 0


def test_open_loop_does_not_wait_for_answers() -> None:
    server = Server(service_s=300.0, together=20)
    load = LoadPoint(mode="open", request_rate=500.0, num_requests=20)
    records = run(server, load)
    assert server.most == 20
    due = [r.due_ns for r in records]
    offsets = poisson(500.0, seed=1, count=20)
    gaps = [(b - a) / 1e9 for a, b in itertools.pairwise(due)]  # type: ignore[operator]
    wanted = [b - a for a, b in itertools.pairwise(offsets)]
    assert gaps == pytest.approx(wanted, abs=1e-6)


def test_a_stop_ends_the_cell_and_the_requests_under_way_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.load.schedule.executors.DRAIN_S", 0.05)
    for load in (
        LoadPoint(mode="closed", concurrency=2, num_requests=100),
        LoadPoint(mode="open", request_rate=100.0, num_requests=1000),
    ):
        records = run(Server(service_s=300.0), load, stop_at_call=2)
        assert records
        assert {r.status for r in records} == {"failed"}


@pytest.mark.parametrize(
    "load",
    [
        LoadPoint(mode="closed", concurrency=2, num_requests=6),
        LoadPoint(mode="open", request_rate=500.0, num_requests=6),
    ],
)
def test_a_defect_of_the_client_is_not_lost(load: LoadPoint) -> None:
    class Broken(Server):
        async def __call__(self, index: int, prompt: Prompt, due_ns: int | None) -> RequestRecord:
            if index == 3:
                raise RuntimeError("a defect")
            return await super().__call__(index, prompt, due_ns)

    with pytest.raises(RuntimeError, match="a defect"):
        run(Broken(), load)


def test_nothing_but_failures_gives_the_cell_up() -> None:
    server = Server(status="failed")
    records = run(server, LoadPoint(mode="closed", concurrency=1, num_requests=1000))
    assert len(records) == GIVE_UP_AFTER


def test_an_error_of_our_own_is_not_swallowed() -> None:
    async def broken(index: int, prompt: Prompt, due_ns: int | None) -> RequestRecord:
        raise ZeroDivisionError

    async def go() -> None:
        load = LoadPoint(mode="closed", concurrency=2, num_requests=3)
        await execute(broken, PROMPTS, load, seed=0, stop=Stop())

    with pytest.raises(ZeroDivisionError):
        asyncio.run(go())
