"""Every figure the harness reports, computed; `measure.definitions` declares each one.

Clock readings are `perf_counter_ns` integers of the client; durations are seconds. A figure that
is undefined is None, never zero. `docs/metrics.md` says the same in prose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise

import numpy as np

from harness.measure.definitions import DEFINITIONS as DEFINITIONS
from harness.measure.definitions import LATE_S
from harness.measure.definitions import Better as Better
from harness.measure.definitions import Metric as Metric
from harness.measure.steady import Level, Window, steady_window
from harness.records import (
    CategoryFigures,
    Distribution,
    DraftCounts,
    LoadPoint,
    Metrics,
    RequestRecord,
    Steady,
)

NS = 1e9
LONGEST_STEP = 256
"""Tokens of one verify step; no engine drafts as many."""


def _since(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / NS


def ttft_s(r: RequestRecord) -> float | None:
    """Time to the first token, in seconds."""
    return _since(r.sent_ns, r.chunk_ns[0] if r.chunk_ns else None)


def e2el_s(r: RequestRecord) -> float | None:
    """Time to the last token, in seconds."""
    return _since(r.sent_ns, r.chunk_ns[-1] if r.chunk_ns else None)


def tpot_s(r: RequestRecord) -> float | None:
    """Time per output token after the first chunk, in seconds."""
    first, last = ttft_s(r), e2el_s(r)
    if first is None or last is None or r.output_tokens is None or r.chunk_tokens is None:
        return None
    later = r.output_tokens - r.chunk_tokens[0]
    return (last - first) / later if later > 0 and len(r.chunk_ns) > 1 else None


def icl_s(r: RequestRecord) -> list[float]:
    """The gaps between a request's chunks, in seconds."""
    return [(b - a) / NS for a, b in pairwise(r.chunk_ns)]


def send_lag_s(r: RequestRecord) -> float | None:
    """How late an open-loop request was sent, in seconds."""
    return _since(r.due_ns, r.sent_ns)


def ttft_from_due_s(r: RequestRecord) -> float | None:
    """Time to the first token from when the request was due, in seconds."""
    return _since(r.due_ns, r.chunk_ns[0] if r.chunk_ns else None)


def e2el_from_due_s(r: RequestRecord) -> float | None:
    """Time to the last token from when the request was due, in seconds."""
    return _since(r.due_ns, r.chunk_ns[-1] if r.chunk_ns else None)


def connect_s(r: RequestRecord) -> float | None:
    """How long the request's connection took to set up, in seconds, before it was sent."""
    return None if r.connect_ns is None else r.connect_ns / NS


def time_to_first_answer_s(r: RequestRecord) -> float | None:
    """Time to the first chunk with anything but thinking, in seconds."""
    return _since(r.sent_ns, r.first_answer_ns)


def time_to_first_reasoning_s(r: RequestRecord) -> float | None:
    """Time to the first chunk with thinking, in seconds."""
    return _since(r.sent_ns, r.first_reasoning_ns)


def distribution(values: Sequence[float | None]) -> Distribution:
    """Mean and percentiles (linear between the neighbours) of the values that are defined."""
    known = [v for v in values if v is not None]
    if not known:
        return Distribution(mean=None, p50=None, p90=None, p99=None, n=0)
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return Distribution(
        mean=float(np.mean(known)), p50=float(p50), p90=float(p90), p99=float(p99), n=len(known)
    )


def window_ns(records: Sequence[RequestRecord]) -> tuple[int | None, int | None]:
    """The measured window: from the first request sent to the last arrival."""
    sent = [r.sent_ns for r in records if r.sent_ns is not None]
    arrived = [r.chunk_ns[-1] for r in records if r.chunk_ns]
    return (min(sent) if sent else None), (max(arrived) if arrived else None)


def _all_or_none(values: Sequence[int | None]) -> int | None:
    """The sum, or None where a part is unknown or there is none."""
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


def cell_metrics(
    records: Sequence[RequestRecord],
    load: LoadPoint | None = None,
    *,
    meets: Callable[[RequestRecord], bool] | None = None,
    least: Level = "steady",
) -> Metrics:
    """All figures of one cell. Latencies and tokens are of whole answers alone.

    Latencies are of the requests of the steady window, the gaps between chunks of those that
    arrived in it; counts are of the whole phase. Without a `load` the window is the whole phase.
    `meets` tells whether a request met the service levels; None: there are none. `least`: see
    `steady_window`.
    """
    ok = [r for r in records if r.status == "ok"]
    window = steady_window(records, load, least)
    inside = [r for r in ok if window is not None and window.has(r)]
    duration = _since(*window_ns(records))
    tokens = _all_or_none([r.output_tokens for r in ok])
    timed = duration if duration and ok else None
    gaps = _gaps(ok, window)
    judged = [r.correct for r in ok if r.correct is not None]

    def opened(of: Callable[[RequestRecord], float | None]) -> Distribution | None:
        found = distribution([of(r) for r in inside])
        return found if found.n else None

    return Metrics(
        ttft_s=distribution([ttft_s(r) for r in inside]),
        tpot_s=distribution([tpot_s(r) for r in inside]),
        icl_s=gaps,
        itl_s=gaps if _one_token_chunks(ok) else None,
        e2el_s=distribution([e2el_s(r) for r in inside]),
        send_lag_s=opened(send_lag_s),
        ttft_from_due_s=opened(ttft_from_due_s),
        e2el_from_due_s=opened(e2el_from_due_s),
        requests_ok=len(ok),
        requests_failed=len(records) - len(ok) - sum(dropped(r) for r in records),
        prompt_tokens=_all_or_none([r.prompt_tokens for r in ok]),
        output_tokens=tokens,
        output_tokens_per_s=_tokens_per_s(ok, window, tokens, timed),
        requests_per_s=len(ok) / timed if timed else None,
        request_rate_achieved=_achieved(records),
        duration_s=duration,
        task_accuracy=sum(judged) / len(judged) if judged else None,
        task_n=len(judged),
        steady=_told(window, records),
        connect_s=opened(connect_s),
        time_to_first_answer_s=opened(time_to_first_answer_s),
        time_to_first_reasoning_s=opened(time_to_first_reasoning_s),
        requests_dropped=sum(dropped(r) for r in records),
        requests_late=_late(records),
        goodput_per_s=sum(map(meets, ok)) / timed if meets and timed else None,
        goodput_share=_share(records, window, meets),
    )


def dropped(r: RequestRecord) -> bool:
    """Whether the request was due but never sent, as too many were under way."""
    return r.status == "cancelled" and r.sent_ns is None and r.due_ns is not None


def _one_token_chunks(ok: Sequence[RequestRecord]) -> bool:
    return bool(ok) and all(r.chunk_tokens is not None and set(r.chunk_tokens) == {1} for r in ok)


def _gaps(ok: Sequence[RequestRecord], window: Window | None) -> Distribution:
    """Of the gaps whose later chunk arrived in the window."""
    if window is None or window.level == "whole":
        return distribution([gap for r in ok for gap in icl_s(r)])
    return distribution(
        [
            gap
            for r in ok
            for gap, later in zip(icl_s(r), r.chunk_ns[1:], strict=True)
            if window.holds(later)
        ]
    )


def _tokens_per_s(
    ok: Sequence[RequestRecord], window: Window | None, tokens: int | None, timed: float | None
) -> float | None:
    """Arrivals in the window of all answers, also of those that began before or ended after it."""
    if tokens is None or not timed or window is None:
        return None
    told = all(r.chunk_tokens is not None for r in ok)
    if window.level != "steady" or not told or window.end_ns <= window.begin_ns:
        return tokens / timed
    arrived = sum(
        count
        for r in ok
        for at, count in zip(r.chunk_ns, r.chunk_tokens or (), strict=False)
        if window.begin_ns < at <= window.end_ns
    )
    return arrived / ((window.end_ns - window.begin_ns) / NS)


def _told(window: Window | None, records: Sequence[RequestRecord]) -> Steady | None:
    if window is None:
        return None
    first = min(r.sent_ns for r in records if r.sent_ns is not None)
    return Steady(
        begin_s=(window.begin_ns - first) / NS,
        end_s=(window.end_ns - first) / NS,
        level=window.level,
        rule=window.rule,
        requests=window.requests,
        growing=window.growing,
    )


def _late(records: Sequence[RequestRecord]) -> int | None:
    lags = [lag for r in records if (lag := send_lag_s(r)) is not None]
    return sum(lag > LATE_S for lag in lags) if lags else None


def _share(
    records: Sequence[RequestRecord],
    window: Window | None,
    meets: Callable[[RequestRecord], bool] | None,
) -> float | None:
    if meets is None or window is None:
        return None
    inside = [r for r in records if window.has(r)]
    return sum(map(meets, inside)) / len(inside) if inside else None


def by_category(records: Sequence[RequestRecord]) -> dict[str, CategoryFigures]:
    """The figures of each category over the whole phase; none where no prompt has a category."""
    groups: dict[str, list[RequestRecord]] = {}
    for r in records:
        if r.category is not None:
            groups.setdefault(r.category, []).append(r)
    return {name: _category(groups[name]) for name in sorted(groups)}


def _category(records: Sequence[RequestRecord]) -> CategoryFigures:
    ok = [r for r in records if r.status == "ok"]
    counts = pool([r.acceptance for r in ok])
    judged = [r.correct for r in ok if r.correct is not None]
    return CategoryFigures(
        requests=len(records),
        ok=len(ok),
        output_tokens=_all_or_none([r.output_tokens for r in ok]),
        ttft_s=distribution([ttft_s(r) for r in ok]).mean,
        tpot_s=distribution([tpot_s(r) for r in ok]).mean,
        acceptance=counts,
        acceptance_length=None if counts is None else acceptance_length(counts),
        task_accuracy=sum(judged) / len(judged) if judged else None,
        task_n=len(judged),
    )


def _achieved(records: Sequence[RequestRecord]) -> float | None:
    sent = sorted(r.sent_ns for r in records if r.sent_ns is not None and r.due_ns is not None)
    if len(sent) < 2 or sent[-1] == sent[0]:
        return None
    return (len(sent) - 1) / ((sent[-1] - sent[0]) / NS)


def acceptance_rate(counts: DraftCounts) -> float | None:
    """Accepted over drafted tokens, from pooled counts."""
    return counts.accepted / counts.drafted if counts.drafted else None


def acceptance_length(counts: DraftCounts) -> float | None:
    """Tokens a verify step yields, the bonus token included, from pooled counts."""
    return 1 + counts.accepted / counts.drafts if counts.drafts else None


def per_position(counts: DraftCounts) -> tuple[float, ...] | None:
    """Unconditional acceptance by position, from pooled counts."""
    if counts.per_position is None or not counts.drafts:
        return None
    return tuple(n / counts.drafts for n in counts.per_position)


def per_position_conditional(counts: DraftCounts) -> tuple[float | None, ...] | None:
    """Acceptance at each position given that all before it were accepted."""
    if counts.per_position is None or not counts.drafts:
        return None
    before = (counts.drafts, *counts.per_position)
    return tuple(n / b if b else None for n, b in zip(counts.per_position, before, strict=False))


def pool(counts: Sequence[DraftCounts | None]) -> DraftCounts | None:
    """The sum of counts; a figure that one part does not tell is not told of the whole.

    None where a part is missing altogether or there is none.
    """
    known = [c for c in counts if c is not None]
    if not known or len(known) != len(counts):
        return None
    positions: tuple[int, ...] | None = None
    if all(c.per_position is not None for c in known):
        longest = max(len(c.per_position or ()) for c in known)
        rows = [(c.per_position or ()) + (0,) * longest for c in known]
        positions = tuple(sum(row[i] for row in rows) for i in range(longest))
    return DraftCounts(
        drafts=sum(c.drafts for c in known),
        drafted=_all_or_none([c.drafted for c in known]),
        accepted=sum(c.accepted for c in known),
        per_position=positions,
        past_end=_all_or_none([c.past_end for c in known]),
    )


def from_histogram(drafts: int, drafted: int | None, histogram: Sequence[int]) -> DraftCounts:
    """Counts from `histogram[j]`, the number of drafts that accepted exactly j tokens."""
    at_least = [sum(histogram[j:]) for j in range(1, len(histogram))]
    return DraftCounts(
        drafts=drafts, drafted=drafted, accepted=sum(at_least), per_position=tuple(at_least)
    )


def client_counts(records: Sequence[RequestRecord]) -> DraftCounts | None:
    """Acceptance as the client sees it: every chunk after a request's first is a verify step.

    None where the server tells no tokens per chunk. Not exact where an engine merges steps into
    one chunk, cuts an accepted run at a stop, or decodes a step without a draft.
    """
    ok = [r for r in records if r.status == "ok"]
    if not ok or any(r.chunk_tokens is None for r in ok):
        return None
    later = chain.from_iterable((r.chunk_tokens or ())[1:] for r in ok)
    steps = np.fromiter(later, np.int64)
    longest = int(steps.max(initial=1))
    if longest > LONGEST_STEP:
        return None  # chunks of another making than verify steps
    at_least = tuple(int((steps > j).sum()) for j in range(1, longest))
    return DraftCounts(drafts=len(steps), accepted=sum(at_least), per_position=at_least)
