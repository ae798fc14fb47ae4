"""Offline beside online: the gap of each engine, its verdict, and the gate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.measure.metrics import acceptance_length, acceptance_rate, per_position
from harness.records import DraftCounts
from training.evaluation.records import Asked, Offline, Online, Row
from training.gate import Check

MISSING = "\N{EN DASH}"
SOURCES_APART = 0.01
"""Acceptance rates from an engine's counters and from its requests that differ by more."""


def offline_row(offline: Offline) -> Row:
    """The expectation's line."""
    counts = offline.counts
    return Row(
        name="offline",
        drafts=counts.drafts,
        rate=acceptance_rate(counts),
        length=acceptance_length(counts),
        per_position=per_position(counts),
        answered=len(offline.answers),
        verdict="expected",
    )


def online_row(online: Online, offline: Offline, k: int, largest: float) -> Row:
    """An engine's line beside the expectation."""
    counts = online.counts
    rate = None
    if counts is not None:
        rate = acceptance_rate(counts)
        if rate is None and counts.drafts:  # chunks tell no drafted tokens
            rate = counts.accepted / (counts.drafts * k)
    expected = acceptance_rate(offline.counts)
    gap = None if rate is None or expected is None else expected - rate
    same = same_outputs(online.answers, offline) if offline.greedy else None
    most = largest if offline.greedy else largest + chance(offline, online)
    return Row(
        name=online.engine,
        drafts=None if counts is None else counts.drafts,
        rate=rate,
        length=None if counts is None else acceptance_length(counts),
        per_position=None if counts is None else per_position(counts),
        gap=gap,
        most=most,
        same_outputs=same,
        answered=sum(a.error is None for a in online.answers),
        verdict=verdict(gap, most, online, offline),
    )


def chance(offline: Offline, online: Online) -> float:
    """What two samplings of the same prompts may lie apart: two standard errors of the gap.

    An engine that tells no counts by request is taken to scatter as the offline walk does.
    """
    expected = rate_error([walked.counts for walked in offline.answers])
    told = [a.counts for a in online.answers if a.counts is not None]
    found = rate_error(told) if len(told) == len(online.answers) else None
    return 2 * math.hypot(expected, expected if found is None else found)


def rate_error(counts: Sequence[DraftCounts]) -> float:
    """The standard error of the pooled acceptance rate, answers taken as independent.

    Of a ratio of sums, by linearisation (the usual estimator of cluster sampling): drafts within
    an answer depend on each other. 1 where a single answer tells nothing of the scatter.
    """
    told = [c for c in counts if c.drafted]
    drafted = sum(c.drafted or 0 for c in told)
    if len(told) < 2:
        return 1.0
    rate = sum(c.accepted for c in told) / drafted
    squares = sum((c.accepted - rate * (c.drafted or 0)) ** 2 for c in told)
    return math.sqrt(squares * len(told) / (len(told) - 1)) / drafted


def same_outputs(answers: Sequence[Asked], offline: Offline) -> int | None:
    """How many answers are the offline ones, token for token; None where no ids were sent."""
    told = [a for a in answers if a.token_ids is not None]
    if not told:
        return None
    expected = {w.prompt_id: w.token_ids for w in offline.answers}
    return sum(a.token_ids == expected.get(a.prompt_id) for a in told)


def verdict(gap: float | None, most: float, online: Online, offline: Offline) -> str:
    """The gap in one word, and what it points at."""
    if gap is None:
        return "not told"
    if gap > most:
        return "TOO LOW"
    if gap < -most:
        return "TOO HIGH"
    mine, counts = offline.counts, online.counts
    exact = counts is not None and (counts.drafts, counts.accepted) == (mine.drafts, mine.accepted)
    return "as expected, to the draft" if exact else "as expected"


def checks(
    rows: Sequence[Row], offline: Offline, online: Sequence[Online], largest: float
) -> tuple[Check, ...]:
    """The gate's checks: of the expectation itself, then of each engine."""
    length = rows[0].length
    told = [
        Check(
            name="expected acceptance length",
            passed=length is not None and length > 1,
            value=length,
            limit=1,
            relation=">",
            reason="" if length is not None else "the answers are too short for a draft",
            advice="nothing that it drafts would be accepted: look at the training's own figures",
        )
    ]
    told += [_gap_check(row, largest) for row in rows[1:]]
    told.append(
        Check(
            name="the states' argmax is the answer's next token",
            passed=offline.proof >= offline.least_proof,
            value=offline.proof,
            limit=offline.least_proof,
            relation=">=",
            reason="" if offline.greedy else "of sampled answers",
            advice="the states belong to other tokens, or miss the final norm",
        )
    )
    for row, each in zip(rows[1:], online, strict=True):
        told += [_all_answered(row, each), *_sources_check(each)]
        if row.same_outputs is not None:
            share = row.same_outputs / max(1, len(each.answers))
            told.append(
                Check(
                    name=f"{row.name}: answers equal to the offline ones",
                    passed=True,
                    value=share,
                    reason="" if share == 1 else "told, not judged: near-ties differ by kernel",
                )
            )
    return tuple(told)


def _all_answered(row: Row, online: Online) -> Check:
    errors = [a.error for a in online.answers if a.error is not None]
    return Check(
        name=f"{row.name}: prompts answered",
        passed=not errors,
        value=row.answered,
        limit=len(online.answers),
        relation="==",
        reason=errors[0] if errors else "",
        advice="see the engine's log",
    )


def _gap_check(row: Row, largest: float) -> Check:
    too_high = row.gap is not None and row.gap < 0
    most = largest if row.most is None else row.most
    reason = "" if row.gap is not None else "the engine told no acceptance"
    if most > largest:
        reason = reason or f"{largest:g}, and two standard errors: the answers are sampled"
    return Check(
        name=f"{row.name}: |offline - online| acceptance rate",
        passed=row.gap is not None and abs(row.gap) <= most,
        value=None if row.gap is None else abs(row.gap),
        limit=most,
        relation="<=",
        reason=reason,
        advice=(
            "more is accepted than the drafter can: look for repeated or forced tokens, and at "
            "what the engine counts"
            if too_high
            else "the engine computes something else than was trained: run `python -m drafters "
            "validate` on the export; look at aux layers, shared weights, ignored norm flags, rope"
        ),
    )


def _sources_check(online: Online) -> list[Check]:
    """Whether the counters and the requests' own figures tell the same, where both tell."""
    both = (online.counters, online.requests)
    rates = [acceptance_rate(c) for c in both if c is not None]
    if len(rates) < 2 or None in rates:
        return []
    apart = abs((rates[0] or 0.0) - (rates[1] or 0.0))
    return [
        Check(
            name=f"{online.engine}: counters and requests apart",
            passed=apart <= SOURCES_APART,
            value=apart,
            limit=SOURCES_APART,
            relation="<=",
            advice="another client's traffic, or an engine that restarted",
        )
    ]


def table(rows: Sequence[Row], k: int) -> str:
    """The comparison as text: one line a row, gaps in points of acceptance rate."""
    head = ["", "drafts", "rate", "length", *(f"pos {i + 1}" for i in range(k))]
    head += ["gap", "same answers", "verdict"]
    lines = [head, *(_cells(row, k) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    out = []
    for line in lines:
        cells = [
            c.ljust(w) if i in (0, len(head) - 1) else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out) + "\n"


def _cells(row: Row, k: int) -> list[str]:
    positions = row.per_position or ()
    return [
        row.name,
        MISSING if row.drafts is None else f"{row.drafts:,}",
        _percent(row.rate),
        MISSING if row.length is None else f"{row.length:.3f}",
        *(_percent(positions[i] if i < len(positions) else None) for i in range(k)),
        "" if row.name == "offline" else _points(row.gap),
        "" if row.name == "offline" else _of(row.same_outputs, row.answered),
        row.verdict,
    ]


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f}%"


def _points(gap: float | None) -> str:
    return MISSING if gap is None else f"{0.0 - 100 * gap:+.2f} pt"


def _of(same: int | None, answered: int) -> str:
    return MISSING if same is None else f"{same}/{answered}"
