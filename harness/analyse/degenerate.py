"""Answers that went round in circles: such text is easy to draft, so that it flatters acceptance.

An answer is judged on its token ids, or on its characters where the server sent no ids. The rule
and its thresholds are told in `docs/integrity.md`; the figures are:

- the longest run in which a period of p units came m times in a row;
- the share of distinct 4-grams;
- the order ratio: the units' size after zlib, by that of the same units in a random order.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from harness.analyse.data import CellData, RunData
from harness.findings import Caution, Degenerate
from harness.measure.metrics import acceptance_length, client_counts
from harness.measure.metrics import pool as pool_counts
from harness.measure.table import RequestTable
from harness.records import DraftCounts, RequestRecord

GRAM = 4
LEAST_TOKENS = 48
LEAST_CHARACTERS = 160
MOST_UNITS = 4096
"""Of a longer answer the end is judged: what has begun to loop does not stop."""
MOST_JUDGED = 1000
"""Answers judged a cell, evenly spread over it."""
LEAST_TIMES = 4
RUN_SHARE = 0.5
CUT_RUN = 64
FEW_DISTINCT = 0.05
LOW_ORDER_RATIO = 0.25
PERIODS_TRIED = 6
MOST_SHARE = 0.5
"""A larger share of an engine's output tokens in degenerate answers makes its run void."""
SHOWN = 5


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A period of `period` units that came `times` times in a row, over `units` units."""

    period: int
    times: float
    units: int
    at_end: bool


class Diversity(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer's units show. `order_ratio` None: the 4-grams alone clear the answer."""

    units: int
    distinct: float
    run: Run | None
    order_ratio: float | None


def units_of(record: RequestRecord) -> tuple[Sequence[int], int]:
    """The answer's token ids, else its characters; and the least number that can be judged."""
    if record.token_ids is not None:
        return record.token_ids, LEAST_TOKENS
    text = (record.reasoning or "") + (record.text or "")
    return [ord(c) for c in text[-MOST_UNITS:]], LEAST_CHARACTERS


def _each_units(table: RequestTable) -> list[tuple[Sequence[int], int]]:
    """`units_of` each answer; texts are large, and read only where there are no ids."""
    ids = table.lists("token_ids")
    found = [(own, LEAST_TOKENS) for own in ids.python()]
    without = np.flatnonzero(~ids.known)
    if len(without):
        for row, record in zip(without.tolist(), table.take(without), strict=True):
            found[row] = units_of(record)
    return found


def diversity(units: Sequence[int]) -> Diversity:
    """The figures of an answer of at least five units."""
    units = list(units[-MOST_UNITS:])
    grams = list(zip(*(units[i:] for i in range(GRAM)), strict=False))
    distinct = len(set(grams)) / len(grams)
    return Diversity(
        units=len(units),
        distinct=distinct,
        run=longest_run(units, grams) if distinct < 1 else None,
        order_ratio=order_ratio(units) if distinct < FEW_DISTINCT else None,
    )


def longest_run(units: Sequence[int], grams: Sequence[tuple[int, ...]]) -> Run | None:
    """The longest stretch that repeats itself with one period, of at least two times.

    Within such a stretch a 4-gram lies its period after its last occurrence, so the commonest
    distances between equal 4-grams are the only periods to try: O(n) for each of them. A period
    that holds a 4-gram twice shows in the sum of neighbouring distances.
    """
    last: dict[tuple[int, ...], int] = {}
    gaps: list[int] = []
    for at, gram in enumerate(grams):
        before = last.get(gram)
        if before is not None:
            gaps.append(at - before)
        last[gram] = at
    counts = Counter(gaps)
    counts.update(a + b for a, b in pairwise(gaps))
    best: Run | None = None
    for period, count in counts.most_common(PERIODS_TRIED):
        if count < 2 or 2 * period > len(units):
            continue
        found = _run_of(units, period)
        if found is not None and (best is None or found.units > best.units):
            best = found
    return best


def _run_of(units: Sequence[int], period: int) -> Run | None:
    """The longest stretch of this period; of stretches equally long the last."""
    longest = length = end = 0
    for at in range(period, len(units)):
        length = length + 1 if units[at] == units[at - period] else 0
        if length >= longest:
            longest, end = length, at + 1
    if longest < period:
        return None
    covered = longest + period
    return Run(
        period=period, times=covered / period, units=covered, at_end=end >= len(units) - period
    )


def order_ratio(units: Sequence[int]) -> float:
    """Size after zlib, by that of the same units in a random order (the same one each time)."""
    shuffled = list(units)
    random.Random(0).shuffle(shuffled)
    return _squeezed(units) / _squeezed(shuffled)


def _squeezed(units: Sequence[int]) -> int:
    return len(zlib.compress(array("q", units).tobytes(), 6))


def is_degenerate(record: RequestRecord) -> bool | None:
    """Whether the answer goes round in circles; None where it is too short to be judged.

    It does where a period of it comes four times in a row and that covers half of it; where such a
    run of 64 units or more was cut by the limit on tokens; or where fewer than 5% of its 4-grams
    are distinct and their order adds next to nothing.
    """
    return _judge(*units_of(record), record.finish_reason)


def _judge(units: Sequence[int], least: int, finish_reason: str | None) -> bool | None:
    return None if len(units) < least else in_circles(units, finish_reason)


def in_circles(units: Sequence[int], finish_reason: str | None) -> bool:
    """`is_degenerate` of an answer's units, of which there are enough to be judged."""
    found = diversity(units)
    run = found.run
    if run is not None and run.times >= LEAST_TIMES:
        cut = run.at_end and finish_reason == "length" and run.units >= CUT_RUN
        if cut or run.units >= RUN_SHARE * found.units:
            return True
    return found.order_ratio is not None and found.order_ratio < LOW_ORDER_RATIO


def degenerate_of(data: CellData) -> Degenerate | None:
    """A cell's degenerate answers; None where none was long enough to be judged."""
    step = max(1, -(-len(data.records) // MOST_JUDGED))
    table = data.records[::step].ok
    units = _each_units(table)
    reasons = table.names("finish_reason").python()
    found = [_judge(*own, reason) for own, reason in zip(units, reasons, strict=True)]
    judged = sum(circles is not None for circles in found)
    if not judged:
        return None
    looping = np.array([bool(circles) for circles in found])
    loops = table.where(looping)
    counted = table.ints("output_tokens")
    sizes = np.where(counted.known, counted.values, [len(own) for own, _ in units])
    drafting = data.cell.variant == "speculative"
    return Degenerate(
        judged=judged,
        degenerate=len(loops),
        tokens=int(sizes.sum()),
        degenerate_tokens=int(sizes[looping].sum()),
        acceptance_degenerate=_pooled(loops) if drafting else None,
        acceptance_healthy=_pooled(table.where(~looping)) if drafting else None,
        examples=tuple(loops[:SHOWN].names("prompt_id").python()),
    )


def _pooled(table: RequestTable) -> DraftCounts | None:
    """By the engine's own figures; where it tells none, by the tokens of each chunk."""
    return pool_counts(table.drafts) or client_counts(table)


def pool(parts: Sequence[Degenerate | None]) -> Degenerate | None:
    """The sum over cells; None where none was judged."""
    known = [p for p in parts if p is not None]
    if not known:
        return None
    loops = [p.acceptance_degenerate for p in known if p.acceptance_degenerate is not None]
    sane = [p.acceptance_healthy for p in known if p.acceptance_healthy is not None]
    return Degenerate(
        judged=sum(p.judged for p in known),
        degenerate=sum(p.degenerate for p in known),
        tokens=sum(p.tokens for p in known),
        degenerate_tokens=sum(p.degenerate_tokens for p in known),
        acceptance_degenerate=pool_counts(loops),
        acceptance_healthy=pool_counts(sane),
        examples=tuple(dict.fromkeys(e for p in known for e in p.examples))[:SHOWN],
    )


def dominated(part: Degenerate | None) -> bool:
    """Whether more than half of the output is degenerate."""
    return part is not None and part.degenerate_tokens > MOST_SHARE * part.tokens


def degenerate_void(run: RunData, found: dict[str, Degenerate | None]) -> str | None:
    """Why the run proves nothing of speculation: a variant's output is mostly loops."""
    for engine in run.engines():
        if not run.select(engine, "speculative"):
            continue
        for variant in ("speculative", "baseline"):
            whole = pool([found.get(c.cell.cell_id) for c in run.select(engine, variant)])
            if whole is not None and dominated(whole):
                return (
                    f"output degenerate: {whole.degenerate_tokens} of {whole.tokens} output tokens "
                    f"of {engine} {variant} are in answers that go round in circles"
                )
    return None


def degenerate_caution(
    run: RunData, engine: str, found: dict[str, Degenerate | None]
) -> Caution | None:
    """How many answers are degenerate, and what that does to the acceptance."""
    whole = pool([found.get(c.cell.cell_id) for c in run.select(engine)])
    if whole is None or whole.degenerate == 0:
        return None
    looped, sane = lengths(whole)
    apart = ""
    if looped is not None and sane is not None:
        apart = f"; acceptance length {looped:.2f} in them, {sane:.2f} in the others"
    return Caution(
        code="output_degenerate",
        text=(
            f"{engine}: {whole.degenerate} of {whole.judged} answers go round in circles"
            f" (first: prompt {whole.examples[0]}){apart}"
        ),
        advice=(
            "Loops accept nearly every draft: believe the other answers' acceptance. Give chat "
            "prompts that fit the model's template, or a shorter workload.output_tokens."
        ),
    )


def lengths(part: Degenerate) -> tuple[float | None, float | None]:
    """Acceptance length of the degenerate answers, and of the others."""
    both = (part.acceptance_degenerate, part.acceptance_healthy)
    looped, sane = (acceptance_length(c) if c is not None else None for c in both)
    return looped, sane
