"""Acceptance by category, by place in the output, by thinking, by request and over the run.

Each split is pooled over an engine's speculative cells at one load. The verify steps are the
engine's own where it told every one, else the client's chunks after each answer's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.analyse.acceptance import estimates_of, merged_chunks
from harness.analyse.data import CellData, RunData
from harness.analyse.ratio import ratio
from harness.analyse.requests import (
    Columns,
    chunks_of,
    cluster_names,
    clusters,
    columns,
    each_drafted_a_step,
    past_end,
)
from harness.measure.columns import Ints, Names
from harness.measure.metrics import window_ns
from harness.measure.table import RequestTable
from harness.records import (
    AcceptanceSplits,
    Estimate,
    LoadPoint,
    Split,
    SplitPart,
)

Counts = NDArray

QUARTERS = ("first quarter", "second quarter", "third quarter", "last quarter")
RANGES = (0, 16, 64, 256, 1024, 4096)
"""Where ranges of output tokens begin."""
SHOWN = 5
LEAST_STEPS = 8
"""A request of fewer steps is neither the best nor the worst: its figure is chance."""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Every verify step of some requests, one element a step.

    `row` is its request, `cluster` that request's prompt, `token` the output tokens before it,
    `arrived_ns` when its chunk came (the engine's own steps: None, as several may have come in one
    chunk). `longest`: tokens a step can give, where that is known.
    """

    source: Literal["per_request", "client"]
    row: Counts
    cluster: Counts
    token: Counts
    accepted: Counts
    arrived_ns: Counts | None
    longest: int | None = None


def split_acceptance(run: RunData) -> tuple[AcceptanceSplits, ...]:
    """For each engine and load with a speculative cell that tells of verify steps."""
    found = []
    for engine in run.engines():
        for load in run.loads(engine):
            cells = [c for c in run.select(engine, "speculative", load) if c.ok]
            if cells:
                found.append(_split(engine, load, cells))
    return tuple(s for s in found if s.estimates is not None)


def _split(engine: str, load: LoadPoint, cells: list[CellData]) -> AcceptanceSplits:
    records = RequestTable.join([c.ok for c in cells])
    own = columns(records)
    splits: list[Split | None] = []
    chunks = client_steps(records)
    steps = engine_steps(records) or chunks
    if own is not None:
        splits += [by_category(records, own), by_request(records, own)]
    if steps is not None:
        splits += [by_tokens(steps), by_quarter(records, steps), by_thinking(records, steps)]
    if chunks is not None:
        splits.append(over_time(cells, chunks))
    return AcceptanceSplits(
        engine=engine,
        load=load,
        k=k_of(records),
        estimates=estimates_of(own),
        merged=merged_chunks(cells),
        splits=tuple(s for s in splits if s is not None and len(s.parts) > 1),
    )


def k_of(records: RequestTable) -> int | None:
    """Draft tokens a verify step, as the requests' own figures tell; None where they do not."""
    told = each_drafted_a_step(records.drafts)[records.drafts.drafts > 0]
    return int(told.max(initial=0)) or None


def engine_steps(records: RequestTable) -> Steps | None:
    """The engine's own steps; None where it did not tell those of every request.

    Of the last step the tokens behind the answer's end are left out, where they are known.
    """
    tokens, steps = records.ints("output_tokens"), records.drafts.steps
    made = ~(tokens.known & (tokens.values == 1))
    if not made.any() or not steps.known[made].all():
        return None
    some = steps.sizes > 0
    accepted = steps.flat().copy()
    last = np.cumsum(steps.sizes)[some] - 1
    behind = past_end(records.drafts, tokens)
    cut = np.where(behind.known, behind.values, 0)[some]
    accepted[last] = np.maximum(0, accepted[last] - cut)
    first = np.ones(len(records), np.int64)
    found = _in_order("per_request", records, steps.sizes, first, accepted)
    k = k_of(records)
    return msgspec.structs.replace(found, longest=None if k is None else k + 1)


def client_steps(records: RequestTable) -> Steps | None:
    """Every chunk after a request's first; None where the server told no tokens a chunk."""
    found = chunks_of(records)
    if found is None or not len(found[2]):
        return None
    sizes, first, tokens = found
    times = records.lists("chunk_ns")
    if (times.sizes != sizes).any():
        return None
    steps = _in_order("client", records, np.maximum(0, sizes - 1), first, tokens - 1)
    return msgspec.structs.replace(steps, arrived_ns=times.later().flat())


def _in_order(
    source: Literal["per_request", "client"],
    records: RequestTable,
    sizes: Counts,
    first: Counts,
    accepted: Counts,
) -> Steps:
    """`first` is how many tokens each answer began with, before its first verify step."""
    row = np.repeat(np.arange(len(sizes)), sizes)
    made = np.cumsum(accepted + 1) - (accepted + 1)  # before each step, over all requests
    began = np.cumsum(sizes) - sizes
    start = made[np.minimum(began, max(0, len(made) - 1))] if len(made) else began
    return Steps(
        source=source,
        row=row,
        cluster=clusters(records)[row],
        token=made - start[row] + first[row],
        accepted=accepted,
        arrived_ns=None,
    )


def by_category(records: RequestTable, own: Columns) -> Split | None:
    """By the prompts' category; requests without one are a part of their own."""
    none = Names(np.zeros(len(records), np.int64), ("no category",))
    found = records.names("category").or_else(none).ranked()
    names = sorted(enumerate(found.names), key=lambda item: item[1])
    parts = [_request_part(name, own, found.codes == i) for i, name in names]
    return Split(by="category", source=own.source, parts=tuple(p for p in parts if p.drafts))


def _request_part(name: str, own: Columns, mine: Counts) -> SplitPart:
    y, x = own.summed(np.where(mine, own.accepted, 0)), own.summed(np.where(mine, own.drafts, 0))
    return SplitPart(
        name=name,
        requests=int((mine & (own.drafts > 0)).sum()),
        drafts=int(x.sum()),
        accepted=int(y.sum()),
        length=_length(y, x, own.longest),
    )


def _length(accepted: Counts, drafts: Counts, most: int | None) -> Estimate:
    has = drafts > 0
    return ratio(accepted[has], drafts[has], offset=1, most=most)


def by_request(records: RequestTable, own: Columns) -> Split | None:
    """The prompts of the lowest and of the highest acceptance length, all their requests pooled."""
    _, names = cluster_names(records)
    drafts, accepted = own.summed(own.drafts), own.summed(own.accepted)
    with_steps = np.bincount(own.cluster, weights=own.drafts > 0, minlength=len(names))
    enough = np.flatnonzero(drafts >= LEAST_STEPS)
    if len(enough) < 2:
        return None
    order = enough[np.argsort(accepted[enough] / drafts[enough], kind="stable")]
    few = min(SHOWN, len(order) // 2)
    chosen = [*order[:few], *order[-few:]]
    return Split(
        by="request",
        source=own.source,
        parts=tuple(
            SplitPart(
                name=names[i],
                requests=int(with_steps[i]),
                drafts=int(drafts[i]),
                accepted=int(accepted[i]),
                length=Estimate(value=float(1 + accepted[i] / drafts[i])),
            )
            for i in chosen
        ),
    )


def by_tokens(steps: Steps) -> Split:
    """By how many output tokens came before the step."""
    part = np.searchsorted(RANGES, steps.token, side="right") - 1
    ends = [f"to {end - 1}" for end in RANGES[1:]]
    names = [f"tokens {a} {b}" for a, b in zip(RANGES, [*ends, "and later"], strict=True)]
    return _step_split("output_tokens", steps, part, names)


def by_quarter(records: RequestTable, steps: Steps) -> Split | None:
    """By the share of its own output that came before the step."""
    tokens = records.ints("output_tokens").values
    if not (tokens[steps.row] > 0).all():
        return None
    part = np.clip(4 * steps.token // tokens[steps.row], 0, 3)
    return _step_split("output_quarter", steps, part, QUARTERS)


def by_thinking(records: RequestTable, steps: Steps) -> Split | None:
    """Inside and after the thinking part, of the answers that have one.

    The step that brought the first of the answer proper counts as after it.
    """
    before = _tokens_thought(records)
    if not before.known.any():
        return None
    thought = np.where(before.known, before.values, -1)[steps.row]
    part = np.where(thought < 0, -1, (steps.token >= thought).astype(np.int64))
    return _step_split("thinking", steps, part, ("inside the thinking", "after it"))


def _tokens_thought(records: RequestTable) -> Ints:
    """Output tokens before each answer proper; not known where there is no thinking part."""
    tokens, times = records.lists("chunk_tokens"), records.lists("chunk_ns")
    answered, n = records.ints("first_answer_ns"), len(records)
    known = records.ints("first_reasoning_ns").known & tokens.known
    if not known.any():
        return Ints(np.zeros(n, np.int64), known)
    both = np.minimum(tokens.sizes, times.sizes)
    sizes, own = tokens.head(both).flat(), times.head(both)
    row = own.rows()
    early = np.where(own.flat() < answered.values[row], sizes, 0)
    every = np.bincount(tokens.rows(), weights=tokens.flat(), minlength=n)
    before = np.bincount(row, weights=early, minlength=n)
    return Ints(np.where(answered.known, before, every).astype(np.int64), known)


def over_time(cells: Sequence[CellData], steps: Steps) -> Split | None:
    """By the quarter of its cell's measured phase in which the step's chunk arrived.

    The client's chunks are taken: the engine's steps have no time. Blocks are laid over each other.
    """
    if steps.arrived_ns is None:
        return None
    begins, lengths = [], []
    for c in cells:
        begin, end = window_ns(c.records)
        begins.append(begin or 0)
        lengths.append(max(1, (end or 1) - (begin or 0)))
    cell = np.repeat(np.arange(len(cells)), [len(c.ok) for c in cells])[steps.row]
    since = steps.arrived_ns - np.array(begins, np.int64)[cell]
    part = np.clip(4 * since // np.array(lengths, np.int64)[cell], 0, 3)
    return _step_split("run_time", steps, part, QUARTERS)


def _step_split(
    by: Literal["output_tokens", "output_quarter", "thinking", "run_time"],
    steps: Steps,
    part: Counts,
    names: Sequence[str],
) -> Split:
    """The steps' parts, numbered from 0 (-1: of none), those without a step left out."""
    parts = []
    for number, name in enumerate(names):
        at = part == number
        if not at.any():
            continue
        cluster = steps.cluster[at]
        y, x = np.bincount(cluster, weights=steps.accepted[at]), np.bincount(cluster)
        parts.append(
            SplitPart(
                name=name,
                requests=int(np.count_nonzero(np.bincount(steps.row[at]))),
                drafts=int(x.sum()),
                accepted=int(y.sum()),
                length=_length(y, x, steps.longest),
            )
        )
    return Split(by=by, source=steps.source, parts=tuple(parts))
