"""Executors: shares of workers, conversations, think times, caps, limits; without a network."""

from __future__ import annotations

import asyncio
import itertools
from time import perf_counter_ns
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.load.prompts.datasets import Prompt
from harness.load.schedule.alarm import Alarm
from harness.load.schedule.arrivals import offsets, think_times
from harness.load.schedule.conversations import Conversations, Share
from harness.load.schedule.executors import Stop, execute
from harness.records import LoadPoint, RequestRecord


def record(index: int, prompt: Prompt, due_ns: int | None, **fields: Any) -> RequestRecord:
    wanted = [f.name for f in msgspec.structs.fields(RequestRecord) if f.required]
    return RequestRecord(
        **{
            **dict.fromkeys(wanted),
            "cell_id": "c",
            "index": index,
            "prompt_id": prompt.id,
            "due_ns": due_ns,
            "chunk_ns": (),
            "status": "ok",
            **fields,
        }
    )


class Server:
    """Answers `said INDEX` after `service_s`; remembers what was asked when."""

    def __init__(self, service_s: float = 0.0, tokens: int | None = 1) -> None:
        self.service_s, self.tokens = service_s, tokens
        self.asked: list[tuple[int, Prompt]] = []
        self.failing: set[int] = set()
        self.now = self.most = 0

    async def __call__(self, index: int, prompt: Prompt, due_ns: int | None) -> RequestRecord:
        sent_ns = perf_counter_ns()
        self.asked.append((index, prompt))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.service_s)
        finally:
            self.now -= 1
        return record(
            index,
            prompt,
            due_ns,
            sent_ns=sent_ns,
            end_ns=perf_counter_ns(),
            text=f"said {index}",
            output_tokens=self.tokens,
            status="failed" if index in self.failing else "ok",
            error="refused" if index in self.failing else None,
        )


PLAIN = [Prompt(id=str(i), text=f"prompt {i}") for i in range(7)]
SHARE = Share()


def run(
    server: Server,
    load: LoadPoint,
    prompts: list[Prompt] = PLAIN,
    share: Share = SHARE,
    start_ns: int | None = None,
) -> list[RequestRecord]:
    async def go() -> list[RequestRecord]:
        return await execute(
            server, prompts, load, seed=1, stop=Stop(), share=share, start_ns=start_ns, cell_id="x"
        )

    return asyncio.run(go())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def talk(name: str, turns: int) -> Prompt:
    return Prompt(
        id=name,
        messages=({"role": "system", "content": "be brief"}, user(f"{name} 0")),
        turns=tuple(user(f"{name} {i}") for i in range(1, turns)),
        answer="right",
        input_tokens=9,
    )


LOADS = st.one_of(
    st.builds(
        lambda c, n: LoadPoint(mode="closed", concurrency=c, num_requests=n),
        st.integers(1, 9),
        st.integers(1, 60),
    ),
    st.builds(
        lambda n: LoadPoint(mode="open", arrival="burst", num_requests=n), st.integers(1, 60)
    ),
    st.builds(
        lambda n, k: LoadPoint(
            mode="open", request_rate=1e6, num_requests=n, arrival="gamma", burstiness=k
        ),
        st.integers(1, 60),
        st.sampled_from([0.2, 3.0]),
    ),
)


@settings(max_examples=60, deadline=None)
@given(LOADS, st.integers(1, 6), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_the_shares_send_every_index_once(load: LoadPoint, workers: int, turns: list[int]) -> None:
    prompts = [talk(str(i), n) for i, n in enumerate(turns)]
    records, most = [], []
    for worker in range(workers):
        server = Server()
        records += run(server, load, prompts, Share(worker=worker, workers=workers))
        most.append(server.most)
    assert sorted(r.index for r in records) == list(range(load.num_requests or 0))
    if load.concurrency is not None:
        assert sum(most) <= load.concurrency
    # Each index is the same turn of the same prompt, however many workers there are.
    alone = {r.index: (r.prompt_id, r.turn) for r in run(Server(), load, prompts)}
    assert {r.index: (r.prompt_id, r.turn) for r in records} == alone


@given(
    st.integers(1, 40), st.integers(1, 12), st.none() | st.integers(1, 40), st.integers(1, 10**6)
)
def test_shares_add_up_to_the_whole(
    concurrency: int, workers: int, cap: int | None, tokens: int
) -> None:
    load = LoadPoint(
        mode="open", concurrency=concurrency, max_concurrency=cap, num_output_tokens=tokens
    )
    shares = [Share(worker=w, workers=workers).within(load) for w in range(workers)]
    taken = [share for share in shares if share is not None]
    assert [s.worker for s in taken] == list(range(taken[0].workers))
    for whole in (concurrency, cap, tokens):
        parts = [share.of(whole) for share in taken]
        if whole is None:
            assert set(parts) == {None}
        else:
            assert sum(p or 0 for p in parts) == whole
            assert all(parts)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 30))
def test_indices_of_conversations_follow_each_other(turns: list[int], number: int) -> None:
    conversations = Conversations([talk(str(i), n) for i, n in enumerate(turns)])
    length = turns[number % len(turns)]
    assert conversations.first_index(0) == 0
    assert conversations.first_index(number + 1) == conversations.first_index(number) + length


@pytest.mark.parametrize(
    "load",
    [
        LoadPoint(mode="closed", concurrency=1, num_requests=6),
        LoadPoint(mode="open", request_rate=1000.0, num_requests=6),
    ],
)
def test_turns_hold_what_was_said_before(load: LoadPoint) -> None:
    server = Server(0.001)
    records = run(server, load, [talk("a", 3), talk("b", 1), talk("c", 5)])
    assert [(r.index, r.conversation, r.turn) for r in records] == [
        (0, "a", 0), (1, "a", 1), (2, "a", 2), (3, None, 0), (4, "c", 0), (5, "c", 1)
    ]  # fmt: skip
    assert [r.due_ns is None for r in records] == [
        load.mode == "closed" or r.turn > 0 for r in records
    ]
    asked = dict(server.asked)
    system = {"role": "system", "content": "be brief"}
    assert asked[2].messages == (
        *(system, user("a 0"), answer("said 0")),
        *(user("a 1"), answer("said 1"), user("a 2")),
    )
    assert [asked[i].answer for i in range(4)] == [None, None, "right", "right"]
    assert [asked[i].input_tokens for i in range(3)] == [9, None, None]
    assert all(not p.turns for p in asked.values() if p.id == "a")


def test_a_text_becomes_the_first_message_of_a_conversation() -> None:
    server = Server()
    prompt = Prompt(id="t", text="hello", turns=(user("and?"),))
    run(server, LoadPoint(mode="closed", concurrency=1, num_requests=2), [prompt])
    first, second = (p for _, p in server.asked)
    assert (first.text, first.messages) == (None, (user("hello"),))
    assert second.messages == (user("hello"), answer("said 0"), user("and?"))


def test_a_failed_turn_ends_its_conversation() -> None:
    server = Server()
    server.failing = {1}
    records = run(
        server,
        LoadPoint(mode="closed", concurrency=1, num_requests=7),
        [talk("a", 4), talk("b", 2)],
    )
    assert [(r.index, r.status) for r in records] == [
        (0, "ok"), (1, "failed"), (4, "ok"), (5, "ok"), (6, "ok")
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [None, "constant", "exponential"])
def test_think_time_passes_before_a_senders_next_request(kind: Any) -> None:
    load = LoadPoint(
        mode="closed", concurrency=1, num_requests=8, think_time_s=0.01, think_time=kind
    )
    records = run(Server(0.001), load)
    wanted = think_times(kind, 0.01, seed=1)
    assert len(records) == 8
    for before, after in itertools.pairwise(records):
        thought_s = (after.sent_ns - before.end_ns) / 1e9  # type: ignore[operator]
        assert thought_s >= wanted[before.index % len(wanted)]


def test_think_time_passes_between_the_turns_of_an_open_loop() -> None:
    load = LoadPoint(mode="open", request_rate=1000.0, num_requests=3, think_time_s=0.02)
    records = run(Server(), load, [talk("a", 3)])
    for before, after in itertools.pairwise(records):
        assert after.sent_ns - before.end_ns >= 20e6  # type: ignore[operator]


def test_a_rate_cap_spaces_the_sends_of_all_workers() -> None:
    load = LoadPoint(mode="closed", concurrency=8, num_requests=24, max_request_rate=200.0)
    start_ns = perf_counter_ns() + 10_000_000

    async def both() -> list[RequestRecord]:
        workers = (
            execute(
                Server(),
                PLAIN,
                load,
                seed=0,
                stop=Stop(),
                share=Share(worker=w, workers=2),
                start_ns=start_ns,
            )
            for w in range(2)
        )
        return [r for part in await asyncio.gather(*workers) for r in part]

    sent = sorted(r.sent_ns for r in asyncio.run(both()))  # type: ignore[type-var]
    assert len(sent) == 24
    for place, at_ns in enumerate(sent):  # never before its slot on the common clock
        assert at_ns >= start_ns + place * 5_000_000  # type: ignore[operator]


def test_arrivals_beyond_max_concurrency_are_dropped_and_recorded() -> None:
    server, gone = Server(), asyncio.Event()
    load = LoadPoint(mode="open", arrival="burst", num_requests=10, max_concurrency=4)
    away: list[int] = []

    async def held(index: int, prompt: Prompt, due_ns: int | None) -> RequestRecord:
        answer = await server(index, prompt, due_ns)
        server.now += 1
        await asyncio.wait_for(gone.wait(), 300)
        server.now -= 1
        return answer

    def done(record: RequestRecord) -> None:
        away.extend([record.index] if record.status == "cancelled" else [])
        if len(away) == 6:
            gone.set()

    async def go() -> list[RequestRecord]:
        return await execute(held, PLAIN, load, seed=1, stop=Stop(), on_done=done, cell_id="x")

    records = asyncio.run(go())
    assert server.most == len(server.asked) == 4
    assert [r.index for r in records] == list(range(10))
    dropped = [r for r in records if r.status == "cancelled"]
    assert len(dropped) == 6
    for r in dropped:
        assert (r.sent_ns, r.end_ns, r.cell_id) == (None, None, "x")
        assert r.due_ns is not None
        assert r.error == "dropped: 4 requests under way (load.max_concurrency)"


def test_a_conversation_keeps_its_place_until_it_ends() -> None:
    load = LoadPoint(
        mode="open", arrival="burst", num_requests=6, max_concurrency=1, think_time_s=0.05
    )
    records = run(Server(), load, [talk("a", 3), talk("b", 3)])
    assert [(r.index, r.status) for r in records] == [
        (0, "ok"), (1, "ok"), (2, "ok"), (3, "cancelled")
    ]  # fmt: skip


def test_a_closed_loop_ends_at_its_output_tokens() -> None:
    load = LoadPoint(mode="closed", concurrency=3, num_output_tokens=100)
    records = run(Server(0.002, tokens=10), load)
    assert 10 <= len(records) <= 12  # what was under way is answered whole
    halves = [
        run(Server(0.002, tokens=10), load, share=Share(worker=w, workers=2)) for w in range(2)
    ]
    assert [5 <= len(half) <= 6 for half in halves] == [True, True]


def test_an_open_loop_ends_at_its_output_tokens() -> None:
    load = LoadPoint(mode="open", request_rate=500.0, num_output_tokens=100)
    records = run(Server(0.002, tokens=10), load)
    assert 10 <= len(records) < 500


def test_a_server_without_token_counts_cannot_end_at_tokens() -> None:
    async def go() -> str | None:
        stop = Stop()
        load = LoadPoint(mode="closed", concurrency=1, num_output_tokens=100)
        await execute(Server(tokens=None), PLAIN, load, seed=0, stop=stop)
        assert not stop.given_up
        return stop.reason

    assert "does not say how many tokens" in (asyncio.run(go()) or "")


def test_nothing_begins_after_the_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = perf_counter_ns()
    load = LoadPoint(mode="closed", concurrency=3, duration_s=100.0, think_time_s=600.0)
    records = run(Server(), load)
    assert len(records) == 3  # nobody sits out a think time that ends too late
    assert perf_counter_ns() - begun < 100e9
    load = LoadPoint(mode="closed", concurrency=1, duration_s=0.1)
    server = Server()
    clock = "harness.load.schedule.executors.perf_counter_ns"
    monkeypatch.setattr(clock, lambda: len(server.asked) * 30_000_000)  # 30 ms a turn
    turns = run(server, load, [talk("a", 99)])
    assert len(turns) == 4  # the fifth turn would begin after 120 ms


def test_due_times_count_from_the_common_start() -> None:
    load = LoadPoint(mode="open", request_rate=200.0, num_requests=9)
    start_ns = perf_counter_ns() + 20_000_000
    records = run(Server(), load, start_ns=start_ns)
    wanted = [start_ns + round(s * 1e9) for s in offsets(load, seed=1).tolist()]
    assert [r.due_ns for r in records] == wanted
    assert all(r.sent_ns >= r.due_ns for r in records)  # type: ignore[operator]


def test_a_late_sender_sends_at_once() -> None:
    load = LoadPoint(mode="open", request_rate=100.0, num_requests=20)
    start_ns = perf_counter_ns() - 60_000_000_000
    records = run(Server(), load, start_ns=start_ns)
    assert len(records) == 20
    assert all(r.sent_ns - r.due_ns > 50e9 for r in records)  # type: ignore[operator]


def test_a_closed_loop_waits_for_the_common_start() -> None:
    start_ns = perf_counter_ns() + 50_000_000
    load = LoadPoint(mode="closed", concurrency=2, num_requests=4)
    records = run(Server(), load, start_ns=start_ns)
    assert len(records) == 4
    assert all(r.sent_ns >= start_ns for r in records)  # type: ignore[operator]


def test_dropped_arrivals_do_not_hide_failures_in_a_row() -> None:
    server = Server(0.001)
    server.failing = set(range(10_000))
    load = LoadPoint(mode="open", request_rate=5000.0, num_requests=5000, max_concurrency=1)
    records = run(server, load)
    assert len(records) < 5000
    assert sum(r.status == "failed" for r in records) >= 10


@pytest.mark.parametrize("kernel_timer", [True, False])
def test_the_alarm_wakes_in_time_and_not_before(
    kernel_timer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel_timer:
        monkeypatch.setattr("harness.load.schedule.alarm._open_timer", lambda: (None, None))

    async def go() -> list[int]:
        alarm = Alarm()
        late: list[int] = []
        while not late or (min(late) >= 1_000_000 and len(late) < 5000):
            due_ns = perf_counter_ns() + 2_300_000
            await alarm.until(due_ns)
            late.append(perf_counter_ns() - due_ns)
        await alarm.until(0)
        alarm.close()
        alarm.close()
        return late

    late = asyncio.run(go())
    assert min(late) >= 0
    assert min(late) < 1_000_000  # finer than the event loop's own timers, busy machine or not


def test_a_defect_ends_an_open_loop_before_its_last_arrival() -> None:
    async def broken(index: int, prompt: Prompt, due_ns: int | None) -> RequestRecord:
        raise ZeroDivisionError

    async def go() -> None:
        load = LoadPoint(mode="open", request_rate=50.0, num_requests=100_000)
        await execute(broken, PLAIN, load, seed=0, stop=Stop())

    with pytest.raises(ZeroDivisionError):
        asyncio.run(go())
