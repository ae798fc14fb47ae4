"""A load in the reader's words."""

from __future__ import annotations

from pathlib import PurePath

from harness.errors import one_line
from harness.records import LoadPoint

DASH = "\N{EN DASH}"
METRICS = {
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "goodput_per_s": "goodput",
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "icl_s": "the gap between chunks",
    "itl_s": "ITL",
    "e2el_s": "E2E latency",
    "acceptance_length": "acceptance length",
}
"""What the reader calls a metric; what is told in cautions and sentences."""


def metric_words(name: str) -> str:
    """A metric in the reader's words; one that has none under its own name."""
    return METRICS.get(name, name)


def load_words(load: LoadPoint) -> str:
    """A load in the reader's words, for sentences and tables: `concurrency 4`, `2.5 requests/s`."""
    if load.mode == "closed":
        words = [f"concurrency {DASH if load.concurrency is None else load.concurrency}"]
        if load.think_time_s:
            about = "about " if load.think_time == "exponential" else ""
            words.append(f"think time {about}{load.think_time_s:g} s")
        if load.max_request_rate is not None:
            words.append(f"at most {load.max_request_rate:g} requests/s")
        return ", ".join(words)
    words = [_arrival_words(load)]
    if load.max_concurrency is not None:
        words.append(f"at most {load.max_concurrency} under way")
    return ", ".join(words)


def _arrival_words(load: LoadPoint) -> str:
    if load.arrival == "burst":
        return f"{DASH if load.num_requests is None else load.num_requests} requests at once"
    if load.arrival == "schedule":
        segments = load.schedule or ()
        ends = [rate for _, first, last in segments for rate in (first, last)]
        rates = [f"{r:g}" for i, r in enumerate(ends) if i == 0 or r != ends[i - 1]]
        shown = rates if len(rates) <= 6 else [*rates[:3], "…", *rates[-2:]]
        return f"{', '.join(shown)} requests/s over {sum(s for s, _, _ in segments):g} s"
    if load.arrival == "trace":
        scale = "" if load.time_scale is None else f", time scale {load.time_scale:g}"
        return f"trace {one_line(PurePath(load.trace or DASH).name, 60)}{scale}"
    rate = f"{DASH if load.request_rate is None else format(load.request_rate, 'g')} requests/s"
    if load.arrival == "constant":
        return f"{rate} evenly spaced"
    if load.arrival == "gamma" and load.burstiness is not None:
        return f"{rate} of burstiness {load.burstiness:g}"
    return rate
