"""Records made from a known step cost and a known acceptance, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

from harness_records import cell, request

from harness.analyse.data import CellData
from harness.records import DraftCounts, RequestRecord

US = 1000
Steps = Sequence[int]


def answers(
    steps: Steps, step_us: int, *, first_us: int = 5000, n: int = 4, k: int = 3
) -> list[RequestRecord]:
    """`n` equal requests one after another; `steps` are the tokens of the chunks but the first."""
    found, at = [], 0
    for i in range(n):
        times = [at + first_us * US]
        for _ in steps:
            times.append(times[-1] + step_us * US)
        tokens = 1 + sum(steps)
        found.append(
            request(
                index=i,
                prompt_id=f"p{i}",
                sent_ns=at,
                chunk_ns=tuple(times),
                chunk_tokens=(1, *steps),
                end_ns=times[-1],
                output_tokens=tokens,
                token_ids=tuple(range(tokens)),
                acceptance=drafts_of(steps, k) if k else None,
            )
        )
        at = times[-1]
    return found


def drafts_of(steps: Steps, k: int) -> DraftCounts:
    return DraftCounts(
        drafts=len(steps),
        drafted=k * len(steps),
        accepted=sum(s - 1 for s in steps),
        per_position=tuple(sum(s > i + 1 for s in steps) for i in range(k)),
    )


def pair(
    steps: Steps,
    token_us: int,
    step_us: int,
    repeat: int = 0,
    *,
    first: tuple[int, int] = (5, 5),
    block: int = 0,
) -> list[CellData]:
    base = answers([1] * sum(steps), token_us, first_us=1000 * first[0], k=0)
    spec = answers(steps, step_us, first_us=1000 * first[1])
    return [
        cell("baseline", repeat, base, block=block),
        cell("speculative", repeat, spec, block=block),
    ]
