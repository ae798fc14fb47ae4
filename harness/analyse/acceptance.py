"""Acceptance of a cell from its three sources, and which of them is believed."""

from __future__ import annotations

from typing import Literal

from harness.analyse.data import CellData
from harness.measure.metrics import (
    acceptance_length,
    acceptance_rate,
    client_counts,
    per_position,
    per_position_conditional,
    pool,
)
from harness.records import Acceptance, DraftCounts

Source = Literal["counters", "per_request", "client"]
SOURCES: tuple[Source, ...] = ("counters", "per_request", "client")
"""In the order of preference: the engine's pooled counts know every draft, the client the least."""


def sources_of(data: CellData) -> dict[str, DraftCounts | None]:
    """Each source's own counts; None where a source does not tell."""
    return {
        "counters": data.counters.delta,
        "per_request": pool([r.acceptance for r in data.ok]),
        "client": client_counts(data.records),
    }


def acceptance_of(sources: dict[str, DraftCounts | None]) -> Acceptance | None:
    """The figures of the best source that tells drafts and accepted tokens.

    Positions may come from the next best source where the best does not tell them.
    """
    told = [(name, sources[name]) for name in SOURCES if sources[name] is not None]
    if not told:
        return None
    source, counts = told[0]
    assert counts is not None
    positions = next((c for _, c in told if c is not None and c.per_position is not None), counts)
    return Acceptance(
        rate=acceptance_rate(counts),
        length=acceptance_length(counts),
        drafts=counts.drafts,
        drafted=counts.drafted,
        accepted=counts.accepted,
        per_position=per_position(positions),
        per_position_conditional=per_position_conditional(positions),
        source=source,
        sources=sources,
    )


def pooled_acceptance(cells: list[CellData]) -> Acceptance | None:
    """Acceptance over several cells, each source's counts pooled."""
    each = [sources_of(c) for c in cells]
    return acceptance_of({name: pool([s[name] for s in each]) for name in SOURCES})


def disagreements(acceptance: Acceptance) -> list[str]:
    """What the sources say where they differ beyond what their definitions allow.

    Counters and per-request figures count the same drafts: 1% of acceptance length is allowed.
    The client sees runs cut at a stop and steps merged into one chunk: 5%.
    """
    lengths = {
        name: acceptance_length(counts)
        for name, counts in acceptance.sources.items()
        if counts is not None
    }
    believed = lengths.get(acceptance.source)
    if believed is None:
        return []
    allowed = {"counters": 0.01, "per_request": 0.01, "client": 0.05}
    return [
        f"{name} {length:.3f}"
        for name, length in lengths.items()
        if length is not None and abs(length / believed - 1) > allowed[name]
    ]
