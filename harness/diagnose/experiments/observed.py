"""What the engine accepted, by its own word; beside it what the trace and the text say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from harness.diagnose.experiments.asking import Answered, Asked
from harness.diagnose.experiments.lengths import counts_of_steps, length_of, parts_of, share_of
from harness.diagnose.records import Length, Observed, Proportion
from harness.measure.metrics import pool
from harness.records import DraftCounts

if TYPE_CHECKING:
    from engines.trace.base import TraceStep

PARTS = 3
AGREE = 0.02
"""Counts of one load that differ by more than this share of the drafts are two counts."""
Traces = Mapping[str, Sequence["TraceStep"]]


def observe(
    rounds: Sequence[Asked],
    *,
    k: int,
    own: Mapping[str, Sequence[int]] | None = None,
    traces: Traces | None = None,
) -> Observed:
    """The acceptance of these rounds, whose questions are the same and asked at one temperature.

    `own`: the target's own greedy answers by question. `traces`: steps by request.
    """
    answers = [answer for asked in rounds for answer in asked.ok]
    lost = {a.request for a in answers if traces and _is_cut(a, traces.get(a.request, ()), k)}
    whole = {name: steps for name, steps in (traces or {}).items() if name not in lost}
    told = {a.request: _steps(a, whole) for a in answers}
    counters = pool([asked.counters for asked in rounds])
    requests = pool([_counted(a, told[a.request], k) for a in answers])
    engine = counters if counters is not None and counters.drafts else requests
    return Observed(
        acceptance=_length(answers, told, k, engine),
        temperature=rounds[0].way.temperature,
        concurrency=max(asked.way.concurrency for asked in rounds),
        first_step=share_of((a.question, s[0] > 0) for a in answers if (s := told[a.request])),
        later_steps=share_of(
            (a.question, n > 0) for a in answers for n in (told[a.request] or ())[1:]
        ),
        by_position=parts_of(list(_by_position(answers, told)), PARTS),
        by_time=parts_of(list(_by_time(answers, told)), PARTS),
        by_category=_by_category(answers, told, k),
        identical=_identical(answers, own),
        counted_otherwise=_otherwise(engine, requests, answers, whole, k),
        untraced=len(lost) if traces else None,
    )


def _is_cut(answer: Answered, traced: Sequence[TraceStep], k: int) -> bool:
    """Whether more of an answer is in no trace than the one step that ended it."""
    tokens = len(answer.token_ids)
    told = 1 + sum(step.valid for step in traced if step.kind == "decode")
    return tokens > 1 and (not traced or told < tokens - (k + 1))


def length_in(asked: Asked, k: int, traces: Traces | None = None) -> Length:
    """The acceptance of one round, the requests' own counts."""
    told = {a.request: _steps(a, traces or {}) for a in asked.ok}
    return _length(asked.ok, told, k, None)


Steps = Mapping[str, tuple[int, ...] | None]


def _steps(answer: Answered, traces: Traces) -> tuple[int, ...] | None:
    """How many drafts each step accepted: as told, else as traced (the last step is not)."""
    if answer.steps is not None:
        return answer.steps
    traced = traces.get(answer.request)
    return accepted_steps(traced) if traced else None


def accepted_steps(traced: Sequence[TraceStep]) -> tuple[int, ...]:
    """What each traced verify step accepted; the step that ended the request is in no trace."""
    return tuple(max(0, step.valid - 1) for step in traced if step.kind == "decode")


def _counted(answer: Answered, steps: tuple[int, ...] | None, k: int) -> DraftCounts | None:
    """A request's own counts; those of an engine that tells none are made of its steps."""
    if answer.counts is not None:
        return answer.counts
    if steps is None:
        return DraftCounts(drafts=0, accepted=0, drafted=0) if len(answer.token_ids) == 1 else None
    return counts_of_steps(steps, k)


def _length(answers: Sequence[Answered], told: Steps, k: int, counts: DraftCounts | None) -> Length:
    by_question: dict[str, list[DraftCounts]] = defaultdict(list)
    for answer in answers:
        own = _counted(answer, told[answer.request], k)
        if own is not None:
            by_question[answer.question].append(own)
    return length_of(by_question, k=k, counts=counts)


def _by_position(answers: Sequence[Answered], told: Steps) -> Iterator[tuple[float, str, bool]]:
    """Each step's first draft, beside where in the whole text it stood."""
    for answer in answers:
        place = answer.prompt_tokens + 1
        for accepted in told[answer.request] or ():
            yield place, answer.question, accepted > 0
            place += accepted + 1


def _by_time(answers: Sequence[Answered], told: Steps) -> Iterator[tuple[float, str, bool]]:
    """The same beside when: by the order in which requests were sent, then by step."""
    for answer in answers:
        for i, accepted in enumerate(told[answer.request] or ()):
            yield (answer.sent_ns or 0) + i, answer.question, accepted > 0


def _by_category(answers: Sequence[Answered], told: Steps, k: int) -> dict[str, Length]:
    names = sorted({a.category for a in answers if a.category is not None})
    return {
        name: _length([a for a in answers if a.category == name], told, k, None) for name in names
    }


def _identical(
    answers: Sequence[Answered], own: Mapping[str, Sequence[int]] | None
) -> Proportion | None:
    if own is None:
        return None
    return share_of(
        (a.question, tuple(own[a.question]) == a.token_ids)
        for a in answers
        if a.question in own and a.token_ids
    )


def _otherwise(
    engine: DraftCounts | None,
    requests: DraftCounts | None,
    answers: Sequence[Answered],
    traces: Traces,
    k: int,
) -> DraftCounts | None:
    """What was really accepted, where the engine's word is something else; None where it is not.

    The text tells without a trace: an answer of n tokens in d steps accepted n - 1 - d drafts, and
    some more behind its end, up to k in all, which only some engines tell.
    """
    if engine is None or not engine.drafts:
        return None
    if requests is not None and _differ(engine, requests):
        return requests
    traced = _traced(answers, traces, k)
    told = pool([a.counts for a in answers if a.request in traces])
    if traced is not None and told is not None and told.drafts:
        # The step that ends a request is in no trace: it may have accepted none, or all.
        ends = sum(1 for a in answers if a.request in traces)
        fewer, more = traced.accepted, traced.accepted + k * ends
        slack = AGREE * told.drafts
        if not fewer - slack <= told.accepted <= more + slack:
            return traced
    return _by_text(engine, answers, k)


def _differ(one: DraftCounts, other: DraftCounts) -> bool:
    slack = AGREE * max(one.drafts, other.drafts)
    return abs(one.drafts - other.drafts) > slack or abs(one.accepted - other.accepted) > slack


def _traced(answers: Sequence[Answered], traces: Traces, k: int) -> DraftCounts | None:
    steps = [n for a in answers for n in accepted_steps(traces.get(a.request, ()))]
    return counts_of_steps(steps, k) if steps else None


def _by_text(engine: DraftCounts, answers: Sequence[Answered], k: int) -> DraftCounts | None:
    tokens = sum(len(a.token_ids) for a in answers)
    if not all(a.token_ids for a in answers) or engine.drafts > tokens:
        return None
    shown = tokens - len(answers) - engine.drafts
    slack = AGREE * engine.drafts
    # Of a step that meets the end the target's own token is dropped too, one an answer.
    behind = engine.past_end
    least = shown + (behind or 0)
    most = shown + (k * len(answers) if behind is None else behind + len(answers))
    if least - slack <= engine.accepted <= most + slack:
        return None
    return DraftCounts(drafts=engine.drafts, drafted=engine.drafted, accepted=max(0, shown))
