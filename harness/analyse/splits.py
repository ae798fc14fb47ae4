"""Acceptance by category, by place in the output, by thinking, by request and over the run.

Each split is pooled over an engine's speculative cells at one load. The verify steps are the
engine's own where it told every one, else the client's chunks after each answer's first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from harness.analyse.acceptance import estimates_of, merged_chunks
from harness.analyse.data import CellData, RunData
from harness.analyse.ratio import ratio
from harness.analyse.requests import (
    Columns,
    Counts,
    cluster_names,
    clusters,
    columns,
    each_drafted_a_step,
    past_end,
)
from harness.findings import AcceptanceSplits, Estimate, Split, SplitPart, StepSource
from harness.measure.columns import Ints, Names
from harness.measure.metrics import chunk_steps, window_ns
from harness.measure.table import RequestTable
from harness.records import LoadPoint

By = Literal["output_tokens", "output_quarter", "thinking", "run_time"]

QUARTERS = ("first quarter", "second quarter", "third quarter", "last quarter")
RANGES = (0, 16, 64, 256, 1024, 4096)
"""Where ranges of output tokens begin."""
RANGE_NAMES = tuple(
    f"tokens {begin} {end}"
    for begin, end in zip(RANGES, [*(f"to {e - 1}" for e in RANGES[1:]), "and later"], strict=True)
)
THINKING = ("inside the thinking", "after it")
PIECE = 65_536
"""Requests whose steps are looked at in one go."""
SHOWN = 5
LEAST_STEPS = 8
"""A request of fewer steps is neither the best nor the worst: its figure is chance."""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Every verify step of some requests, one element a step.

    `row` is its request, `token` the output tokens before it, `arrived_ns` when its chunk came (the
    engine's own steps: None, as several may have come in one chunk).
    """

    row: Counts
    token: Counts
    accepted: Counts
    arrived_ns: Counts | None = None


class Tally:
    """The steps of each part of one split, added up piece by piece for each cluster."""

    def __init__(self, by: By, names: Sequence[str], clusters: int) -> None:
        self._by = by
        self._names = names
        self._clusters = clusters
        self._sums: dict[int, tuple[Counts, Counts, int]] = {}

    def add(self, steps: Steps, cluster: Counts, part: Counts) -> None:
        """Steps by the number of their part (-1: of none) and the cluster of their request."""
        for number in range(len(self._names)):
            at = np.flatnonzero(part == number)
            if not len(at):
                continue
            own = cluster[steps.row[at]]
            y = np.bincount(own, weights=steps.accepted[at], minlength=self._clusters)
            x = np.bincount(own, minlength=self._clusters)
            requests = int(np.count_nonzero(np.bincount(steps.row[at])))
            if number in self._sums:
                before = self._sums[number]
                y, x, requests = before[0] + y, before[1] + x, before[2] + requests
            self._sums[number] = (y, x, requests)

    def split(self, source: StepSource, longest: int | None) -> Split:
        """The parts that have a step."""
        parts = [
            SplitPart(
                name=self._names[number],
                requests=requests,
                drafts=int(x.sum()),
                accepted=int(y.sum()),
                length=_length(y, x, longest),
            )
            for number, (y, x, requests) in sorted(self._sums.items())
        ]
        return Split(by=self._by, source=source, parts=tuple(parts))


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
    if own is not None:
        splits += [by_category(records, own), by_request(records, own)]
    splits += step_splits(records, cells)
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


def steps_told(records: RequestTable) -> bool:
    """Whether the engine told the steps of every request."""
    tokens = records.ints("output_tokens")
    made = ~(tokens.known & (tokens.values == 1))
    return bool(made.any() and records.drafts.steps.known[made].all())


def chunks_told(tables: Sequence[RequestTable]) -> bool:
    """Whether the server told the tokens of every chunk, and chunks may be steps."""
    found = [chunk_steps(t) for t in tables]
    same = (t.lists("chunk_ns").sizes == t.lists("chunk_tokens").sizes for t in tables)
    some = any(f is not None and len(f[1]) for f in found)
    return None not in found and some and all(s.all() for s in same)


def step_splits(records: RequestTable, cells: Sequence[CellData]) -> list[Split]:
    """What is split by the step: by place in the output, by thinking, and over the run.

    `records` are the cells' whole answers. They are looked at piece by piece: of all requests at
    once the steps would fill the memory.
    """
    told, chunked = steps_told(records), chunks_told([c.ok for c in cells])
    if not told and not chunked:
        return []
    cluster = clusters(records)
    n = int(cluster.max()) + 1
    tokens, quarters = Tally("output_tokens", RANGE_NAMES, n), Tally("output_quarter", QUARTERS, n)
    thinking, over_time = Tally("thinking", THINKING, n), Tally("run_time", QUARTERS, n)
    lengths_known, done = True, 0
    for piece, phase in _pieces(cells):
        own = cluster[done : done + len(piece)]
        done += len(piece)
        chunks = client_steps(piece) if chunked else None
        steps = engine_steps(piece) if told else chunks
        assert steps is not None
        tokens.add(steps, own, token_range(steps))
        thinking.add(steps, own, thinking_part(piece, steps))
        quarter = output_quarter(piece, steps)
        if quarter is None:
            lengths_known = False
        else:
            quarters.add(steps, own, quarter)
        if chunks is not None:
            over_time.add(chunks, own, run_quarter(phase, chunks))
    k = k_of(records)
    longest = k + 1 if told and k is not None else None
    source: StepSource = "per_request" if told else "client"
    splits = [t.split(source, longest) for t in (tokens, *([quarters] * lengths_known), thinking)]
    return [*splits, *([over_time.split("client", None)] if chunked else [])]


Span = tuple[int, int]
"""When a cell's measured phase began, and its length in ns."""


def _pieces(cells: Sequence[CellData]) -> Iterator[tuple[RequestTable, Span]]:
    """The cells' whole answers, at most `PIECE` at once."""
    for c in cells:
        begin, end = window_ns(c.records)
        phase = (begin or 0, max(1, (end or 1) - (begin or 0)))
        for at in range(0, len(c.ok), PIECE):
            yield (c.ok if len(c.ok) <= PIECE else c.ok[at : at + PIECE]), phase


def engine_steps(records: RequestTable) -> Steps:
    """The engine's own steps, which it told.

    Of the last step the tokens behind the answer's end are left out, where they are known.
    """
    tokens, steps = records.ints("output_tokens"), records.drafts.steps
    some = steps.sizes > 0
    accepted = steps.flat().copy()
    last = np.cumsum(steps.sizes)[some] - 1
    behind = past_end(records.drafts, tokens)
    cut = np.where(behind.known, behind.values, 0)[some]
    accepted[last] = np.maximum(0, accepted[last] - cut)
    first = np.ones(len(records), np.int64)
    return _in_order(steps.sizes, first, accepted)


def client_steps(records: RequestTable) -> Steps:
    """Every chunk after a request's first, of chunks whose tokens the server told."""
    tokens, times = records.lists("chunk_tokens"), records.lists("chunk_ns")
    accepted, first = tokens.later().flat() - 1, tokens.first().values
    steps = _in_order(np.maximum(0, tokens.sizes - 1), first, accepted)
    return msgspec.structs.replace(steps, arrived_ns=times.later().flat())


def _in_order(sizes: Counts, first: Counts, accepted: Counts) -> Steps:
    """`first` is how many tokens each answer began with, before its first verify step."""
    row = np.repeat(np.arange(len(sizes)), sizes)
    made = np.cumsum(accepted + 1) - (accepted + 1)  # before each step, over all requests
    began = np.cumsum(sizes) - sizes
    start = made[np.minimum(began, max(0, len(made) - 1))] if len(made) else began
    return Steps(row=row, token=made - start[row] + first[row], accepted=accepted)


def by_category(records: RequestTable, own: Columns) -> Split | None:
    """By the prompts' category; requests without one are a part of their own."""
    none = Names(np.zeros(len(records), np.int32), ("no category",))
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


def token_range(steps: Steps) -> Counts:
    """By how many output tokens came before the step: the number in `RANGE_NAMES`."""
    found: Counts = np.searchsorted(RANGES, steps.token, side="right") - 1
    return found


def output_quarter(records: RequestTable, steps: Steps) -> Counts | None:
    """By the share of its own output that came before the step."""
    tokens = records.ints("output_tokens").values[steps.row]
    return np.clip(4 * steps.token // tokens, 0, 3) if (tokens > 0).all() else None


def thinking_part(records: RequestTable, steps: Steps) -> Counts:
    """Inside and after the thinking part, of the answers that have one.

    The step that brought the first of the answer proper counts as after it.
    """
    before = _tokens_thought(records)
    thought = np.where(before.known, before.values, -1)[steps.row]
    return np.where(thought < 0, -1, (steps.token >= thought).astype(np.int64))


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


def run_quarter(phase: Span, steps: Steps) -> Counts:
    """By the quarter of its cell's measured phase in which the step's chunk arrived.

    The client's chunks are taken: the engine's steps have no time. Blocks are laid over each other.
    """
    assert steps.arrived_ns is not None
    begin, length = phase
    return np.clip(4 * (steps.arrived_ns - begin) // length, 0, 3)
