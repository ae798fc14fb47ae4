"""A client's reports held against the scripted server's own record of the same requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from harness.load.scripted.bare import Noted
from harness.load.scripted.script import Script, Served
from harness.records import RequestRecord

ClientName = Literal["ours", "bare"]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of one quantity in seconds; None where there is none."""

    mean: float | None
    p50: float | None
    p99: float | None


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One latency as the client reports it, as the server's record has it, and the error.

    `error`: the differences of the two, taken request by request (of gaps: gap by gap).
    """

    reported: Spread
    true: Spread
    error: Spread


class ClientResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one client did at one load, its rounds pooled.

    `lost`: requests without a whole answer. `miscounted`: answers whose number of output tokens was
    reported wrong; None where the client counts none. CPU is the client's processes' own.
    """

    client: ClientName
    streams: int
    requests: int
    lost: int
    miscounted: int | None
    chunks: int
    chunks_per_s: float | None
    cpu_us_per_chunk: float | None
    server_cpu_us_per_chunk: float | None
    ttft_s: Compared
    icl_s: Compared
    e2el_s: Compared
    first_error: str | None = None


class Once(msgspec.Struct, frozen=True, kw_only=True):
    """One client's one round at a load, with the server's record of it."""

    noted: list[Noted]
    served: list[Served]
    asked: int
    cpu_s: float
    server_cpu_s: float
    wall_s: float
    miscounted: int | None = None
    first_error: str | None = None


def noted_of(record: RequestRecord) -> Noted | None:
    """A record's clock readings; None where it was never sent."""
    if record.sent_ns is None:
        return None
    return Noted(number=record.index, sent_ns=record.sent_ns, chunk_ns=record.chunk_ns)


def well_counted(record: RequestRecord, script: Script) -> bool:
    """Whether the record has the script's tokens, in all and of each chunk."""
    tokens = tuple(script.tokens_of(i) for i in range(script.chunks))
    return record.output_tokens == script.output_tokens and record.chunk_tokens == tokens


def pooled(client: ClientName, streams: int, rounds: Sequence[Once]) -> ClientResult:
    """A client's rounds at one load, summed up."""
    pairs = [pair for once in rounds for pair in matched(once)]
    asked = sum(once.asked for once in rounds)
    chunks = sum(len(note.chunk_ns) for note, _ in pairs)
    wall_s = sum(once.wall_s for once in rounds)
    counted = [once.miscounted for once in rounds if once.miscounted is not None]
    came = [np.array(note.chunk_ns) / 1e9 for note, _ in pairs]
    went = [np.array(served.write_ns) / 1e9 for _, served in pairs]
    sent = np.array([note.sent_ns for note, _ in pairs]) / 1e9
    read = np.array([served.read_ns for _, served in pairs]) / 1e9
    return ClientResult(
        client=client,
        streams=streams,
        requests=asked,
        lost=asked - len(pairs),
        miscounted=sum(counted) if counted else None,
        chunks=chunks,
        chunks_per_s=chunks / wall_s if wall_s > 0 else None,
        cpu_us_per_chunk=1e6 * sum(o.cpu_s for o in rounds) / chunks if chunks else None,
        server_cpu_us_per_chunk=(
            1e6 * sum(o.server_cpu_s for o in rounds) / chunks if chunks else None
        ),
        ttft_s=compared(each(came, 0) - sent, each(went, 0) - read),
        icl_s=compared(joined(np.diff(c) for c in came), joined(np.diff(w) for w in went)),
        e2el_s=compared(each(came, -1) - sent, each(went, -1) - read),
        first_error=next((o.first_error for o in rounds if o.first_error is not None), None),
    )


def matched(once: Once) -> list[tuple[Noted, Served]]:
    """Each whole answer with the server's record of the same request."""
    by_number = {served.number: served for served in once.served if served.whole}
    pairs = [(note, by_number.get(note.number)) for note in once.noted]
    return [
        (note, served)
        for note, served in pairs
        if served is not None and len(note.chunk_ns) * 8 == len(served.written)
    ]


def each(stamps: Sequence[np.ndarray], which: int) -> np.ndarray:
    """Every answer's chunk number `which`; no answer is without chunks."""
    return np.array([one[which] for one in stamps])


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Arrays end to end; an empty one of none."""
    return np.concatenate([np.empty(0), *parts])


def compared(reported: np.ndarray, true: np.ndarray) -> Compared:
    """Both sides' spreads in seconds, and the spread of their differences."""
    return Compared(reported=spread(reported), true=spread(true), error=spread(reported - true))


def spread(values: np.ndarray) -> Spread:
    """Mean, median and 99th percentile."""
    if not len(values):
        return Spread(mean=None, p50=None, p99=None)
    p50, p99 = np.percentile(values, [50, 99])
    return Spread(mean=float(np.mean(values)), p50=float(p50), p99=float(p99))
