"""The whole client against a server that knows the truth: queueing is shown, nothing invented."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from harness.load.drive import drive
from harness.load.prompts.datasets import Prompt
from harness.load.schedule.arrivals import offsets
from harness.load.scripted.process import ScriptedServer, scripted_server
from harness.load.scripted.script import Script, Served
from harness.load.streaming.client import Asking
from harness.measure.metrics import (
    acceptance_length,
    cell_metrics,
    client_counts,
    send_lag_s,
    tpot_s,
)
from harness.plan.schema import SamplingSection
from harness.records import DraftCounts, LoadPoint, RequestRecord

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


def test_chunks_of_several_tokens_are_counted_and_timed_exactly() -> None:
    load = LoadPoint(mode="closed", concurrency=3, num_requests=9)
    pairs = driven(Script(first_ms=10, gap_ms=3, chunks=10, tokens=(1, 2, 3)), load)
    records = [record for record, _ in pairs]
    metrics = cell_metrics(records)
    assert metrics.itl_s is None  # a gap between chunks is none between tokens
    assert metrics.icl_s.n == 9 * 9
    assert metrics.output_tokens == 9 * 19
    for record, served in pairs:
        (told,) = tpot_s([record])
        told_by_hand = (record.chunk_ns[-1] - record.chunk_ns[0]) / 1e9 / 18
        assert told == pytest.approx(told_by_hand, rel=1e-9)
        # The server's own clock from outside: each chunk came after it was written.
        least, most = (
            (end - begin) / 1e9 / 18
            for begin, end in (
                (record.chunk_ns[0], served.write_ns[-1]),
                (served.write_ns[0], record.chunk_ns[-1]),
            )
        )
        assert least <= told <= most
    counts = client_counts(records)
    assert counts == DraftCounts(drafts=81, accepted=81, per_position=(54, 27))
    assert acceptance_length(counts) == 2.0


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
    sent = [record.sent_ns or 0 for record, _ in pairs]
    achieved = cell_metrics([record for record, _ in pairs]).request_rate_achieved
    assert achieved == pytest.approx(19e9 / (max(sent) - min(sent)))


@pytest.mark.full
def test_a_trace_is_replayed_within_a_millisecond(tmp_path: Path) -> None:
    times = [i * 0.011 + (i % 7) * 0.0013 for i in range(300)]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(f'{{"timestamp": {t}, "prompt": "#{i}"}}\n' for i, t in enumerate(times))
    )
    load = LoadPoint(
        mode="open", arrival="trace", trace=str(path), time_scale=1.0, num_requests=len(times)
    )
    pairs = driven(Script(first_ms=5, gap_ms=3, chunks=3), load)
    due = [record.due_ns or 0 for record, _ in pairs]
    assert [d - due[0] for d in due] == pytest.approx([round(t * 1e9) for t in times], abs=1)
    lags = sorted(send_lag_s([record for record, _ in pairs]))
    assert lags[len(lags) // 2] < 0.001
