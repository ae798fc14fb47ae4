"""Acceptance of a cell from its three sources, and which of them is believed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from harness.analyse.data import CellData
from harness.analyse.doubts import counters_doubted, per_request_doubted
from harness.analyse.ratio import CONFIDENCE, ratio, share
from harness.analyse.requests import Columns, columns, drafted_a_step, own_counts
from harness.findings import Acceptance, AcceptanceEstimates, Estimate, MergedChunks, Source
from harness.measure.metrics import (
    acceptance_length,
    acceptance_rate,
    client_counts,
    per_position,
    per_position_conditional,
    pool,
)
from harness.measure.table import RequestTable
from harness.records import DraftCounts, RequestRecord

SOURCES: tuple[Source, ...] = ("counters", "per_request", "client")
"""In the order of preference: the engine's pooled counts know every draft, the client the least."""


def sources_of(data: CellData) -> dict[str, DraftCounts | None]:
    """Each source's own counts; None where a source does not tell."""
    told = pool(own_counts(data.ok)) if data.ok.drafts.told.any() else None
    return {
        "counters": data.counters.delta,
        "per_request": told,
        "client": client_counts(data.records),
    }


def doubted(data: CellData, sources: dict[str, DraftCounts | None]) -> frozenset[str]:
    """The sources that are not believed where there is another: their counts are wrong."""
    found = {"counters"} if counters_doubted(data, sources) else set()
    return frozenset(found | ({"per_request"} if per_request_doubted(data, sources) else set()))


def acceptance_of(
    sources: dict[str, DraftCounts | None], doubted: Collection[str] = ()
) -> Acceptance | None:
    """The figures of the best source that tells drafts and accepted tokens.

    Positions may come from the next best source where the best does not tell them. A source in
    `doubted` is taken only where there is no other.
    """
    order = sorted(SOURCES, key=lambda name: name in doubted)
    told = [(name, sources[name]) for name in order if sources[name] is not None]
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


def cell_acceptance(data: CellData) -> Acceptance | None:
    """A speculative cell's acceptance: figures, intervals, and the share of merged chunks."""
    sources = sources_of(data)
    found = acceptance_of(sources, doubted(data, sources))
    if found is None:
        return None
    return msgspec.structs.replace(
        found, estimates=estimates(data.ok), merged=merged_chunks([data])
    )


def pooled_acceptance(cells: list[CellData]) -> Acceptance | None:
    """Acceptance over several cells, each source's counts pooled."""
    each = [sources_of(c) for c in cells]
    doubts = [doubted(c, s) for c, s in zip(cells, each, strict=True)]
    return acceptance_of(
        {name: pool([s[name] for s in each]) for name in SOURCES}, frozenset().union(*doubts)
    )


def pooled_sources(parts: Sequence[Acceptance]) -> dict[Source, DraftCounts | None]:
    """Each source's counts over several cells; None where a cell lacks the source."""
    return {name: pool([a.sources.get(name) for a in parts]) for name in SOURCES}


def estimates(records: Sequence[RequestRecord]) -> AcceptanceEstimates | None:
    """Every figure with its interval over requests; None where no request tells of steps."""
    return estimates_of(columns(records))


def estimates_of(c: Columns | None) -> AcceptanceEstimates | None:
    """The same from columns that have been made already."""
    if c is None or not c.drafts.sum():
        return None
    drafts, accepted = c.summed(c.drafts), c.summed(c.accepted)
    most = c.longest
    with_steps = c.drafts > 0
    ones = c.summed(with_steps)
    own = c.summed(np.where(with_steps, c.accepted / np.maximum(c.drafts, 1), 0))
    rate = rate_mean = Estimate(value=None)
    if c.drafted is not None:
        rate = share(accepted, c.summed(c.drafted))
        rates = np.where(with_steps, c.accepted / np.maximum(c.drafted, 1), 0)
        rate_mean = ratio(c.summed(rates), ones, most=1)
    reached = [drafts]
    if c.positions is not None:
        reached += [c.summed(column) for column in c.positions.T]
    known, told = c.output >= 0, c.source == "per_request"
    return AcceptanceEstimates(
        source=c.source,
        requests=int(with_steps.sum()),
        clusters=int((drafts > 0).sum()),
        confidence=CONFIDENCE,
        length=ratio(accepted, drafts, offset=1, most=most),
        length_request_mean=ratio(own, ones, offset=1, most=most),
        rate=rate,
        rate_request_mean=rate_mean,
        per_position=tuple(share(at, drafts) for at in reached[1:]),
        per_position_conditional=tuple(share(at, before) for before, at in pairwise(reached)),
        length_output=ratio(
            c.summed(np.where(known, c.output, 0)),
            c.summed(np.where(known, c.drafts, 0)),
            offset=1,
            most=most,
        ),
        past_end=int((c.accepted - c.output)[known].sum()) if told and known.any() else None,
        uncorrected=int((~known).sum()),
    )


def merged_chunks(cells: Sequence[CellData], k: int | None = None) -> MergedChunks | None:
    """How many verify steps came joined to another in one chunk; None where nothing tells.

    `k` is used where no count of steps is known: a chunk of more than k + 1 tokens holds two.
    """
    table = RequestTable.join([c.ok for c in cells])
    tokens = table.lists("chunk_tokens")
    if not len(table) or not tokens.known.all():
        return None
    later = np.maximum(0, tokens.sizes - 1)
    chunks, told = int(later.sum()), own_counts(table)
    if told.drafts.any() and told.told.all():
        steps = int(told.drafts.sum())
        merged = int(np.maximum(0, told.drafts - later).sum())
        return MergedChunks(
            chunks=chunks, steps=steps, merged=merged, share=merged / steps, by="per_request"
        )
    counted = pool([c.counters.delta for c in cells])
    if counted is not None and counted.drafts:
        whole = all(len(c.ok) == len(c.records) for c in cells)
        if whole and not any(counters_doubted(c, sources_of(c)) for c in cells):
            merged, steps = max(0, counted.drafts - chunks), counted.drafts
            return MergedChunks(
                chunks=chunks, steps=steps, merged=merged, share=merged / steps, by="counters"
            )
        k = k or drafted_a_step(counted)
    if not k or not chunks:
        return None
    large = int((tokens.later().flat() > k + 1).sum())
    return MergedChunks(
        chunks=chunks, steps=None, merged=large, share=large / chunks, by="chunk_size"
    )
