"""Every figure the harness reports, declared once: formula, unit, and when it is undefined.

Clock readings are `perf_counter_ns` integers of the client; durations are seconds. A figure that
is undefined is None, never zero. `docs/metrics.md` says the same in prose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from harness.records import Distribution, DraftCounts, Metrics, RequestRecord

NS = 1e9
LONGEST_STEP = 256
"""Tokens of one verify step; no engine drafts as many."""
Better = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure's definition. `better`: which direction a user wants, None where neither."""

    name: str
    unit: str
    formula: str
    undefined: str
    better: Better | None


DEFINITIONS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric(
            name="ttft_s", unit="s", better="lower",
            formula="arrival of the first chunk - request sent",
            undefined="no chunk came, or the request never was sent",
        ),
        Metric(
            name="e2el_s", unit="s", better="lower",
            formula="arrival of the last chunk - request sent",
            undefined="no chunk came, or the request never was sent",
        ),
        Metric(
            name="tpot_s", unit="s", better="lower",
            formula="(e2el - ttft) / (output_tokens - tokens in the first chunk)",
            undefined="one chunk alone, or the server says no token counts per chunk",
        ),
        Metric(
            name="icl_s", unit="s", better="lower",
            formula="gap between neighbouring chunks (under speculation: one verify step)",
            undefined="fewer than two chunks",
        ),
        Metric(
            name="itl_s", unit="s", better="lower",
            formula="gap between neighbouring chunks, as gaps between tokens",
            undefined="any chunk of the cell carries another number of tokens than one",
        ),
        Metric(
            name="send_lag_s", unit="s", better="lower",
            formula="request sent - request due",
            undefined="closed loop: nothing is due",
        ),
        Metric(
            name="ttft_from_due_s", unit="s", better="lower",
            formula="arrival of the first chunk - request due",
            undefined="closed loop, or no chunk came",
        ),
        Metric(
            name="e2el_from_due_s", unit="s", better="lower",
            formula="arrival of the last chunk - request due",
            undefined="closed loop, or no chunk came",
        ),
        Metric(
            name="output_tokens_per_s", unit="tokens/s", better="higher",
            formula="output tokens of whole answers / (last arrival - first sent)",
            undefined="no whole answer, or one whose tokens the server did not count",
        ),
        Metric(
            name="requests_per_s", unit="requests/s", better="higher",
            formula="whole answers / (last arrival - first sent)",
            undefined="no whole answer",
        ),
        Metric(
            name="request_rate_achieved", unit="requests/s", better=None,
            formula="(requests sent - 1) / (last sent - first sent)",
            undefined="closed loop, or fewer than two requests were sent",
        ),
        Metric(
            name="task_accuracy", unit="fraction", better="higher",
            formula="right answers / whole answers to prompts with a known answer",
            undefined="no prompt has a known answer",
        ),
        Metric(
            name="acceptance_rate", unit="fraction", better="higher",
            formula="accepted draft tokens / drafted tokens, counts pooled",
            undefined="nothing was drafted, or the source does not count drafted tokens",
        ),
        Metric(
            name="acceptance_length", unit="tokens", better="higher",
            formula="1 + accepted draft tokens / drafts (the bonus token included)",
            undefined="no drafts",
        ),
        Metric(
            name="per_position", unit="fraction", better="higher",
            formula="[i] = drafts accepted at least to position i / drafts (unconditional)",
            undefined="no drafts, or the source does not tell positions",
        ),
        Metric(
            name="per_position_conditional", unit="fraction", better="higher",
            formula="[i] = per_position[i] / per_position[i-1], with 1 before the first",
            undefined="[i]: nothing was accepted at position i-1",
        ),
    )
}  # fmt: skip


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


def cell_metrics(records: Sequence[RequestRecord]) -> Metrics:
    """All figures of one cell. Latencies and tokens are of whole answers alone."""
    ok = [r for r in records if r.status == "ok"]
    duration = _since(*window_ns(records))
    tokens = _all_or_none([r.output_tokens for r in ok])
    timed = duration if duration and ok else None
    one_token_chunks = bool(ok) and all(
        r.chunk_tokens is not None and set(r.chunk_tokens) == {1} for r in ok
    )
    gaps = distribution([gap for r in ok for gap in icl_s(r)])
    judged = [r.correct for r in ok if r.correct is not None]

    def opened(of: Callable[[RequestRecord], float | None]) -> Distribution | None:
        found = distribution([of(r) for r in ok])
        return found if found.n else None

    return Metrics(
        ttft_s=distribution([ttft_s(r) for r in ok]),
        tpot_s=distribution([tpot_s(r) for r in ok]),
        icl_s=gaps,
        itl_s=gaps if one_token_chunks else None,
        e2el_s=distribution([e2el_s(r) for r in ok]),
        send_lag_s=opened(send_lag_s),
        ttft_from_due_s=opened(ttft_from_due_s),
        e2el_from_due_s=opened(e2el_from_due_s),
        requests_ok=len(ok),
        requests_failed=len(records) - len(ok),
        prompt_tokens=_all_or_none([r.prompt_tokens for r in ok]),
        output_tokens=tokens,
        output_tokens_per_s=tokens / timed if tokens is not None and timed else None,
        requests_per_s=len(ok) / timed if timed else None,
        request_rate_achieved=_achieved(records),
        duration_s=duration,
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
    steps = [t for r in ok for t in (r.chunk_tokens or ())[1:]]
    longest = max(steps, default=1)
    if longest > LONGEST_STEP:
        return None  # chunks of another making than verify steps
    at_least = [sum(t > j for t in steps) for j in range(1, longest)]
    return DraftCounts(drafts=len(steps), accepted=sum(at_least), per_position=tuple(at_least))
