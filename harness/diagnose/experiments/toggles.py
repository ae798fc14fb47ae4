"""A/B on the engine: one thing is set otherwise, the same questions are asked, and paired."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec

from harness.analyse.statistics import LogMean, verdict
from harness.diagnose.experiments.asking import Asked, with_arguments
from harness.diagnose.experiments.observed import length_in
from harness.diagnose.records import Subject, Toggle

MIN_EFFECT = 0.04
"""The smallest relative difference of acceptance lengths that is worth a word."""
CONFIDENCE = 0.99
"""Several toggles are looked at in one diagnosis."""
Verdict = Literal["a", "b", "same", "undecided"]


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """One toggle that needs starts of its own: the subject as it is (`a`), and otherwise (`b`)."""

    what: str
    a: str
    b: str
    subject: Subject
    cause: str | None = None


def compared(
    what: str,
    names: tuple[str, str],
    rounds: tuple[Asked, Asked],
    *,
    k: int,
    cause: str | None = None,
) -> Toggle:
    """Two rounds of the same questions as a toggle, with the verdict of their paired difference."""
    a, b = rounds
    return Toggle(
        what=what,
        a=names[0],
        b=names[1],
        length_a=length_in(a, k),
        length_b=length_in(b, k),
        verdict=judged(a, b),
        cause=cause,
    )


def judged(a: Asked, b: Asked) -> Verdict:
    """Which of the two accepts more, by the ratio of their lengths, the questions being paired.

    The ratio's error is the jackknife's over questions, on the log scale.
    """
    both = _paired(a, b)
    n = len(both)
    if n < 3:
        return "undecided"
    whole = _log_ratio(both)
    if whole is None:
        return "undecided"
    left_out = [_log_ratio(both[:i] + both[i + 1 :]) for i in range(n)]
    known = [value for value in left_out if value is not None]
    if len(known) < n:
        return "undecided"
    error = math.sqrt((n - 1) / n * sum((value - whole) ** 2 for value in known))
    low, high = LogMean(mean=whole, error=error, units=n).interval(CONFIDENCE) or (None, None)
    told = verdict(math.exp(whole), low, high, better="higher", min_effect=MIN_EFFECT)
    words: dict[str, Verdict] = {"better": "b", "worse": "a", "same": "same"}
    return words.get(told, "undecided")


Sums = tuple[int, int, int, int]
"""Of one question: drafts and accepted of a, then of b."""


def _paired(a: Asked, b: Asked) -> list[Sums]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for offset, asked in ((0, a), (2, b)):
        for answer in asked.ok:
            if answer.counts is not None:
                sums[answer.question][offset] += answer.counts.drafts
                sums[answer.question][offset + 1] += answer.counts.accepted
    return [(s[0], s[1], s[2], s[3]) for s in sums.values() if s[0] and s[2]]


def _log_ratio(both: Sequence[Sums]) -> float | None:
    """log of b's pooled acceptance length over a's."""
    drafts_a, accepted_a, drafts_b, accepted_b = (sum(s[i] for s in both) for i in range(4))
    if not drafts_a or not drafts_b:
        return None
    return math.log((1 + accepted_b / drafts_b) / (1 + accepted_a / drafts_a))


def switches(subject: Subject) -> list[Switch]:
    """The toggles that this engine can be started for, the one that tells most first.

    On a CPU both engines are eager already; an attached server cannot be started otherwise.
    """
    if subject.url is not None or subject.engine not in ("vllm", "sglang"):
        return []
    found = []
    words = set(subject.extra_args)
    if subject.engine == "vllm":
        if "--enable-prefix-caching" in words:
            off = with_arguments(subject, "--no-enable-prefix-caching")
            found.append(_switch("prefix cache", "on", "off", off, "prefix_reuse"))
        if subject.device != "cpu" and "--enforce-eager" not in words:
            eager = with_arguments(subject, "--enforce-eager")
            found.append(_switch("CUDA graphs", "graphs", "eager", eager, "drafter_graph"))
        if subject.temperature > 0 and subject.device != "cpu":
            older = with_arguments(subject, VLLM_USE_V2_MODEL_RUNNER="0")
            found.append(_switch("model runner", "V2", "V1", older, "strict_rejection"))
    elif subject.device != "cpu" and "--disable-cuda-graph" not in words:
        eager = with_arguments(subject, "--disable-cuda-graph")
        found.append(_switch("CUDA graphs", "graphs", "eager", eager, "drafter_graph"))
    if subject.tensor_parallel > 1:
        fused = [w for w in words if w == "--enable-flashinfer-allreduce-fusion"]
        if fused:
            kept = tuple(w for w in subject.extra_args if w not in fused)
            plain = msgspec.structs.replace(subject, extra_args=kept)
            found.append(_switch("all-reduce fusion", "on", "off", plain, "states_partial_sums"))
    return found


def _switch(what: str, a: str, b: str, subject: Subject, cause: str) -> Switch:
    return Switch(what=what, a=a, b=b, subject=subject, cause=cause)


def why_none(subject: Subject) -> str:
    """Why `switches` has nothing to start."""
    if subject.url is not None:
        return "a server that runs already cannot be started otherwise"
    if subject.engine == "reference":
        return "the reference engine has no graphs and no prefix cache"
    return "on this device and with these arguments there is nothing to switch"
