"""Every figure the harness reports, computed; `measure.definitions` declares each one.

Clock readings are `perf_counter_ns` integers of the client; durations are seconds. A figure that
is undefined is None, never zero. `docs/metrics.md` says the same in prose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from harness.findings import CategoryFigures, Distribution, Metrics, Steady
from harness.measure.columns import Bools, Drafts, Floats, Integers, Ints
from harness.measure.definitions import DEFINITIONS as DEFINITIONS
from harness.measure.definitions import LATE_S
from harness.measure.definitions import Better as Better
from harness.measure.definitions import Metric as Metric
from harness.measure.steady import Window, steady_window
from harness.measure.table import RequestTable
from harness.records import DraftCounts, RequestRecord

NS = 1e9
LONGEST_STEP = 256
"""Tokens of one verify step; no engine drafts as many."""


def _since(start: Ints, end: Ints) -> Floats:
    """Seconds from one moment to the other of each request; NaN where either is not known."""
    return np.where(start.known & end.known, (end.values - start.values) / NS, np.nan)


def ttft_s(records: Sequence[RequestRecord]) -> Floats:
    """Each request's time to the first token, in seconds; NaN where undefined."""
    table = RequestTable.of(records)
    return _since(table.ints("sent_ns"), table.lists("chunk_ns").first())


def e2el_s(records: Sequence[RequestRecord]) -> Floats:
    """Each request's time to the last token, in seconds; NaN where undefined."""
    table = RequestTable.of(records)
    return _since(table.ints("sent_ns"), table.lists("chunk_ns").last())


def tpot_s(records: Sequence[RequestRecord]) -> Floats:
    """Each request's time per output token after the first chunk, in seconds; NaN if undefined."""
    table = RequestTable.of(records)
    tokens = later_tokens(table)
    defined = tokens.known & (tokens.values > 0) & (table.lists("chunk_ns").sizes > 1)
    decode = e2el_s(table) - ttft_s(table)
    return np.where(defined, decode / np.where(defined, tokens.values, 1), np.nan)


def later_tokens(records: Sequence[RequestRecord]) -> Ints:
    """Each answer's tokens after its first chunk; not known where the server counts none."""
    table = RequestTable.of(records)
    tokens, first = table.ints("output_tokens"), table.lists("chunk_tokens").first()
    return Ints(tokens.values - first.values, tokens.known & first.known)


def icl_s(records: Sequence[RequestRecord]) -> Floats:
    """The gaps between the chunks of each request, one request after another, in seconds."""
    return _gaps(RequestTable.of(records))[0]


def send_lag_s(records: Sequence[RequestRecord]) -> Floats:
    """How late each open-loop request was sent, in seconds; NaN where undefined."""
    table = RequestTable.of(records)
    return _since(table.ints("due_ns"), table.ints("sent_ns"))


def ttft_from_due_s(records: Sequence[RequestRecord]) -> Floats:
    """Time to the first token from when each request was due, in seconds; NaN where undefined."""
    table = RequestTable.of(records)
    return _since(table.ints("due_ns"), table.lists("chunk_ns").first())


def e2el_from_due_s(records: Sequence[RequestRecord]) -> Floats:
    """Time to the last token from when each request was due, in seconds; NaN where undefined."""
    table = RequestTable.of(records)
    return _since(table.ints("due_ns"), table.lists("chunk_ns").last())


def connect_s(records: Sequence[RequestRecord]) -> Floats:
    """How long each request's connection took to set up, in seconds, before it was sent."""
    found = RequestTable.of(records).ints("connect_ns")
    return np.where(found.known, found.values / NS, np.nan)


def time_to_first_answer_s(records: Sequence[RequestRecord]) -> Floats:
    """Time to the first chunk with anything but thinking, in seconds; NaN where undefined."""
    table = RequestTable.of(records)
    return _since(table.ints("sent_ns"), table.ints("first_answer_ns"))


def time_to_first_reasoning_s(records: Sequence[RequestRecord]) -> Floats:
    """Time to the first chunk with thinking, in seconds; NaN where undefined."""
    table = RequestTable.of(records)
    return _since(table.ints("sent_ns"), table.ints("first_reasoning_ns"))


def distribution(values: Floats) -> Distribution:
    """Mean and percentiles (linear between the neighbours) of the values that are not NaN."""
    values = np.asarray(values, dtype=float)
    missing = np.isnan(values)
    known = values[~missing] if missing.any() else values
    if not len(known):
        return Distribution(mean=None, p50=None, p90=None, p99=None, n=0)
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return Distribution(
        mean=float(np.mean(known)), p50=float(p50), p90=float(p90), p99=float(p99), n=len(known)
    )


def window_ns(records: Sequence[RequestRecord]) -> tuple[int | None, int | None]:
    """The measured window: from the first request sent to the last arrival."""
    table = RequestTable.of(records)
    sent, arrived = table.ints("sent_ns"), table.lists("chunk_ns").last()
    return (
        int(sent.values[sent.known].min()) if sent.known.any() else None,
        int(arrived.values[arrived.known].max()) if arrived.known.any() else None,
    )


def cell_metrics(
    records: Sequence[RequestRecord],
    window: Window | None = None,
    *,
    meets: Callable[[RequestTable], Bools] | None = None,
) -> Metrics:
    """All figures of one cell. Latencies and tokens are of whole answers alone.

    Latencies are of the requests of the steady `window`, the gaps between chunks of those that
    arrived in it; counts are of the whole phase. Without a window the whole phase is taken.
    `meets` tells which requests met the service levels; None: there are none.
    """
    table = RequestTable.of(records)
    window = window or steady_window(table, None)
    ok = table.ok
    inside = ok.where(window.has(ok)) if window is not None else ok[:0]
    begin, end = window_ns(table)
    duration = None if begin is None or end is None else (end - begin) / NS
    tokens = ok.ints("output_tokens").total()
    timed = duration if duration and len(ok) else None
    gaps = distribution(_gaps_in(ok, window))
    dropped = int(table.dropped.sum())
    right, judged = _right(ok)
    return Metrics(
        ttft_s=distribution(ttft_s(inside)),
        tpot_s=distribution(tpot_s(inside)),
        icl_s=gaps,
        itl_s=gaps if _one_token_chunks(ok) else None,
        e2el_s=distribution(e2el_s(inside)),
        send_lag_s=_defined(send_lag_s(inside)),
        ttft_from_due_s=_defined(ttft_from_due_s(inside)),
        e2el_from_due_s=_defined(e2el_from_due_s(inside)),
        requests_ok=len(ok),
        requests_failed=len(table) - len(ok) - dropped,
        prompt_tokens=ok.ints("prompt_tokens").total(),
        output_tokens=tokens,
        output_tokens_per_s=_tokens_per_s(ok, window, tokens, timed),
        requests_per_s=len(ok) / timed if timed else None,
        request_rate_achieved=_achieved(table),
        duration_s=duration,
        task_accuracy=right / judged if judged else None,
        task_n=judged,
        steady=_told(window, table),
        connect_s=_defined(connect_s(inside)),
        time_to_first_answer_s=_defined(time_to_first_answer_s(inside)),
        time_to_first_reasoning_s=_defined(time_to_first_reasoning_s(inside)),
        requests_dropped=dropped,
        requests_late=_late(table),
        goodput_per_s=int(meets(ok).sum()) / timed if meets and timed else None,
        goodput_share=_share(table, window, meets),
    )


def _defined(values: Floats) -> Distribution | None:
    """None where no request has the figure, as where a load has no due times."""
    found = distribution(values)
    return found if found.n else None


def _right(table: RequestTable) -> tuple[int, int]:
    """How many answers were right, and of how many that could be judged."""
    correct = table.ints("correct")
    return int(correct.values[correct.known].sum()), int(correct.known.sum())


def _one_token_chunks(ok: RequestTable) -> bool:
    tokens = ok.lists("chunk_tokens")
    return bool(len(ok) and (tokens.sizes > 0).all() and (tokens.flat() == 1).all())


def _gaps(table: RequestTable) -> tuple[Floats, Integers]:
    """The gaps between chunks in seconds, and when the later chunk of each came."""
    chunks = table.lists("chunk_ns")
    times = chunks.flat()
    if not len(times):
        return np.zeros(0), times
    later = later_ones(chunks.sizes)[1:]
    return np.diff(times)[later] / NS, times[1:][later]


def later_ones(sizes: Integers) -> Bools:
    """Of all chunks in a row, which are not the first of their request."""
    later = np.ones(int(sizes.sum()), bool)
    begins = np.cumsum(sizes) - sizes
    later[begins[sizes > 0]] = False
    return later


def _gaps_in(ok: RequestTable, window: Window | None) -> Floats:
    """Of the gaps whose later chunk arrived in the window."""
    gaps, at = _gaps(ok)
    return gaps if window is None or window.level == "whole" else gaps[window.holds(at)]


def _tokens_per_s(
    ok: RequestTable, window: Window | None, tokens: int | None, timed: float | None
) -> float | None:
    """Arrivals in the window of all answers, also of those that began before or ended after it."""
    if tokens is None or not timed or window is None:
        return None
    counts, times = ok.lists("chunk_tokens"), ok.lists("chunk_ns")
    if window.level != "steady" or not counts.known.all() or window.end_ns <= window.begin_ns:
        return tokens / timed
    both = np.minimum(counts.sizes, times.sizes)
    at = times.head(both).flat()
    inside = (window.begin_ns < at) & (at <= window.end_ns)
    arrived = int(counts.head(both).flat()[inside].sum())
    return arrived / ((window.end_ns - window.begin_ns) / NS)


def _told(window: Window | None, table: RequestTable) -> Steady | None:
    first, _ = window_ns(table)
    if window is None or first is None:
        return None
    return Steady(
        begin_s=(window.begin_ns - first) / NS,
        end_s=(window.end_ns - first) / NS,
        level=window.level,
        rule=window.rule,
        requests=window.requests,
        growing=window.growing,
    )


def _late(table: RequestTable) -> int | None:
    lags = send_lag_s(table)
    return int((lags > LATE_S).sum()) if np.isfinite(lags).any() else None


def _share(
    table: RequestTable,
    window: Window | None,
    meets: Callable[[RequestTable], Bools] | None,
) -> float | None:
    if meets is None or window is None:
        return None
    inside = window.has(table)
    return int((meets(table) & inside).sum()) / int(inside.sum()) if inside.any() else None


def by_category(records: Sequence[RequestRecord]) -> dict[str, CategoryFigures]:
    """The figures of each category over the whole phase; none where no prompt has a category."""
    table = RequestTable.of(records)
    return {name: _category(table.take(rows)) for name, rows in categories(table)}


def categories(table: RequestTable) -> list[tuple[str, Integers]]:
    """Each category's name and rows, by name; requests without one are in none."""
    words = table.names("category").ranked()
    order = np.argsort(words.codes, kind="stable")
    ends = np.searchsorted(words.codes[order], np.arange(len(words.names)), side="right")
    begins = np.searchsorted(words.codes[order], np.arange(len(words.names)))
    rows = [order[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return sorted(zip(words.names, rows, strict=True), key=lambda item: item[0])


def _category(table: RequestTable) -> CategoryFigures:
    ok = table.ok
    counts = pool(ok.drafts)
    right, judged = _right(ok)
    return CategoryFigures(
        requests=len(table),
        ok=len(ok),
        output_tokens=ok.ints("output_tokens").total(),
        ttft_s=distribution(ttft_s(ok)).mean,
        tpot_s=distribution(tpot_s(ok)).mean,
        acceptance=counts,
        acceptance_length=None if counts is None else acceptance_length(counts),
        task_accuracy=right / judged if judged else None,
        task_n=judged,
    )


def _achieved(table: RequestTable) -> float | None:
    sent = table.ints("sent_ns").values[np.isfinite(send_lag_s(table))]
    if len(sent) < 2 or sent.max() == sent.min():
        return None
    return (len(sent) - 1) / (int(sent.max() - sent.min()) / NS)


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


def pool(counts: Drafts | Sequence[DraftCounts | None]) -> DraftCounts | None:
    """The sum of counts; a figure that one part does not tell is not told of the whole.

    None where a part is missing altogether or there is none.
    """
    parts = counts if isinstance(counts, Drafts) else Drafts.of(counts)
    if not len(parts.told) or not parts.told.all():
        return None
    positions: tuple[int, ...] | None = None
    if parts.per_position.known.all():
        sizes = parts.per_position.sizes
        place = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        summed = np.zeros(int(sizes.max()), np.int64)
        np.add.at(summed, place, parts.per_position.flat())
        positions = tuple(summed.tolist())
    return DraftCounts(
        drafts=int(parts.drafts.sum()),
        drafted=parts.drafted.total(),
        accepted=int(parts.accepted.sum()),
        per_position=positions,
        past_end=parts.past_end.total(),
    )


def from_histogram(drafts: int, drafted: int | None, histogram: Sequence[int]) -> DraftCounts:
    """Counts from `histogram[j]`, the number of drafts that accepted exactly j tokens."""
    at_least = [sum(histogram[j:]) for j in range(1, len(histogram))]
    return DraftCounts(
        drafts=drafts, drafted=drafted, accepted=sum(at_least), per_position=tuple(at_least)
    )


def chunk_steps(table: RequestTable) -> tuple[Integers, Integers] | None:
    """How many chunks each request has after its first, and the tokens of all those chunks.

    None where the server told no tokens a chunk, or where chunks are of another making than
    verify steps.
    """
    tokens = table.lists("chunk_tokens")
    if not len(table) or not tokens.known.all():
        return None
    later = tokens.later()
    steps = later.flat()
    return None if steps.max(initial=1) > LONGEST_STEP else (later.sizes, steps)


def client_counts(records: Sequence[RequestRecord]) -> DraftCounts | None:
    """Acceptance as the client sees it: every chunk after a request's first is a verify step.

    None where the server tells no tokens per chunk. Not exact where an engine merges steps into
    one chunk, cuts an accepted run at a stop, or decodes a step without a draft.
    """
    found = chunk_steps(RequestTable.of(records).ok)
    if found is None:
        return None
    _, steps = found
    sizes = np.bincount(np.maximum(steps, 0), minlength=2)
    at_least = tuple(np.cumsum(sizes[::-1])[::-1][2:].tolist())
    return DraftCounts(drafts=len(steps), accepted=sum(at_least), per_position=at_least)
