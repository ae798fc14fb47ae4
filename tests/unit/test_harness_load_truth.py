"""The whole client against a server that knows the truth: queueing is shown, nothing invented."""

from __future__ import annotations

from itertools import pairwise

import pytest

from harness.load.arrivals import offsets
from harness.load.client import Asking
from harness.load.datasets import Prompt
from harness.load.drive import drive
from harness.load.script import Script, Served
from harness.load.scripted_process import ScriptedServer, scripted_server
from harness.plan.schema import SamplingSection
from harness.records import LoadPoint, RequestRecord

SCRIPT = Script(first_ms=20, gap_ms=10, chunks=5, tokens=(1, 2, 3), service_slots=4)
CAPACITY = SCRIPT.service_slots / SCRIPT.service_s


def asking(server: ScriptedServer) -> Asking:
    return Asking(
        url=server.url,
        model=server.script.model,
        endpoint="completions",
        max_tokens=server.script.output_tokens,
        sampling=SamplingSection(),
        timeout_s=120.0,
        extra={"return_token_ids": True},
    )


def driven(script: Script, load: LoadPoint, workers: int = 1) -> list[tuple[RequestRecord, Served]]:
    """Every record with the server's own of the same request."""
    prompts = [Prompt(id=str(i), text=f"#{i}") for i in range(load.num_requests or 0)]
    with scripted_server(script) as server:
        done = drive(
            asking(server),
            prompts,
            load,
            cell_id="c",
            seed=7,
            engine_gone=lambda: None,
            workers=workers,
        )
        served = {one.number: one for one in server.record().requests}
    assert [record.error for record in done.records if record.error] == []
    assert len(done.records) == load.num_requests == len(served)
    return [(record, served[record.index]) for record in done.records]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_chunk_arrives_after_its_write_with_its_tokens(workers: int) -> None:
    load = LoadPoint(mode="closed", concurrency=6, num_requests=24)
    script = Script(first_ms=10, gap_ms=3, chunks=10, tokens=(1, 2, 3))
    for record, served in driven(script, load, workers):
        writes = served.write_ns
        assert record.chunk_tokens == (1, 2, 3, 1, 2, 3, 1, 2, 3, 1)
        assert record.output_tokens == script.output_tokens
        assert len(writes) == len(record.chunk_ns)
        assert all(w <= c for w, c in zip(writes, record.chunk_ns, strict=True))
        assert record.sent_ns is not None and record.sent_ns < writes[0]


def test_an_overloaded_server_shows_its_queue_from_the_due_time() -> None:
    load = LoadPoint(mode="open", request_rate=2 * CAPACITY, num_requests=120, arrival="constant")
    pairs = driven(SCRIPT, load)
    waits = []
    for record, served in pairs:
        assert record.due_ns is not None
        from_due = record.chunk_ns[0] - record.due_ns
        assert from_due >= served.write_ns[0] - record.due_ns
        waits.append(from_due / 1e9)
    # At twice the capacity the queue grows by one answer's share for each that comes: the last
    # waits as long as half of them take, however late or early this machine is.
    expected = len(pairs) / CAPACITY / 2
    assert waits[-1] >= 0.9 * expected
    assert sum(waits[-20:]) > sum(waits[:20])


def test_an_idle_server_is_asked_at_the_drawn_times() -> None:
    load = LoadPoint(mode="open", request_rate=CAPACITY / 10, num_requests=20, arrival="poisson")
    pairs = driven(SCRIPT, load)
    due = [record.due_ns or 0 for record, _ in pairs]
    drawn = offsets(load, seed=7)
    gaps = [(b - a) / 1e9 for a, b in pairwise(due)]
    assert gaps == pytest.approx([b - a for a, b in pairwise(drawn)], abs=1e-6)
    # Never before it is due; that it is not late is the machine's affair.
    assert all(record.sent_ns >= record.due_ns for record, _ in pairs)  # type: ignore[operator]
