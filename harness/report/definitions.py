"""What the page's words mean, in the reader's words."""

from __future__ import annotations

from harness.report import words

DEFINITIONS: tuple[tuple[str, str], ...] = (
    (
        "output tokens/s",
        "tokens of whole answers that arrived in the steady window, by its length; where that is "
        "the whole phase, still holds the drain, or has no tokens per chunk: output tokens of "
        "whole answers, by the time from first sent to last chunk",
    ),
    ("TTFT", "from the request's last byte sent to the arrival of its first chunk"),
    (
        "TPOT",
        "time from the first chunk to the last, by the tokens after the first chunk",
    ),
    ("E2E latency", "from the request's last byte sent to the arrival of its last chunk"),
    (
        "steady window",
        "the part of a block after the ramp-up and before the drain; latencies are of the requests "
        "sent in it, by a rule that is told below the results",
    ),
    ("goodput", "requests that met every service level of the plan, by the block's length"),
    ("gap between chunks", "one verify step with speculation, which may bring several tokens"),
    ("acceptance rate", "accepted draft tokens by drafted tokens, counts pooled"),
    ("acceptance length", "tokens a verify step yields: 1 + accepted by drafts"),
    (
        "mean over requests",
        "each request's own figure, averaged: a short answer weighs as much as a long one; the "
        "pooled figure weighs each verify step alike",
    ),
    (
        "accepted, by position",
        "drafts accepted at least to that position, by drafts; positions count from 0",
    ),
    ("given the one before", "the same, of the drafts accepted at least to the position before"),
    (
        "identical outputs",
        "greedy answers that equal the baseline's to the same prompt of the paired block, token by "
        "token where both tell tokens, of those compared",
    ),
    (
        "task accuracy",
        "right answers of whole answers to prompts whose right answer is known (n)",
    ),
    (
        "first thinking / answer",
        "from the request's last byte sent to its first chunk with thinking, and to its first with "
        "anything else; means",
    ),
    (
        "repeat",
        "one start of the engine, r0 in a cell's name being repeat 0; servers that run already are "
        "not started: there one pass over the loads",
    ),
    ("block", "one measurement of a load within a repeat (b0 is block 0)"),
    (
        "paired",
        "a baseline and a speculative block of the same repeat, block and load, with the same "
        "prompts and arrivals",
    ),
    ("ratio (interval)", "speculative by baseline over paired, interleaved blocks"),
    (
        "relative step cost",
        "time of a verify step by the baseline's time of a token: the acceptance length at which "
        "the decode phase breaks even",
    ),
    (
        "verdict",
        "better or worse: the whole interval lies on one side of 1 and the effect is at least the "
        "plan's minimum; same: the interval lies inside the minimum; else undecided; where several "
        "comparisons were made, by the corrected interval",
    ),
    (
        "corrected interval",
        "the ratio's interval made wider for the number of comparisons that were made at once, as "
        "among many some differ by chance alone",
    ),
    (words.DASH, "not known or not defined; never zero"),
)
