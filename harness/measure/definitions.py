"""Every figure the harness reports, declared once: formula, unit, and when it is undefined.

`docs/metrics.md` says the same in prose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LATE_S = 0.01
"""A request sent later than this after it was due counts as late."""
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
            formula=(
                "tokens of whole answers that arrived in the steady window / its length; where "
                "that is the whole phase or has no chunk counts: output tokens of whole answers / "
                "(last arrival - first sent)"
            ),
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
            name="steady", unit="s", better=None,
            formula="the window that latencies are of: its own `rule` says when it begins and ends",
            undefined="no request was sent",
        ),
        Metric(
            name="connect_s", unit="s", better="lower",
            formula="set-up of a request's connection, before it was sent and in no other figure",
            undefined="all connections were there already",
        ),
        Metric(
            name="time_to_first_answer_s", unit="s", better="lower",
            formula="arrival of the first chunk with anything but thinking - request sent",
            undefined="no such chunk came, or none is told apart",
        ),
        Metric(
            name="time_to_first_reasoning_s", unit="s", better="lower",
            formula="arrival of the first chunk with thinking - request sent",
            undefined="no such chunk came",
        ),
        Metric(
            name="requests_dropped", unit="requests", better="lower",
            formula="requests due that were never sent, for as many were under way as allowed",
            undefined="never",
        ),
        Metric(
            name="requests_late", unit="requests", better="lower",
            formula=f"requests sent more than {1000 * LATE_S:g} ms after they were due",
            undefined="closed loop: nothing is due",
        ),
        Metric(
            name="goodput_per_s", unit="requests/s", better="higher",
            formula="requests that met every service level / (last arrival - first sent)",
            undefined="the plan sets no service level, or no whole answer came",
        ),
        Metric(
            name="goodput_share", unit="fraction", better="higher",
            formula=(
                "requests of the steady window that met every service level / all of them, failed "
                "and dropped ones included; open loop: TTFT and E2E latency from the due time"
            ),
            undefined="the plan sets no service level",
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
