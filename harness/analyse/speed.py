"""Why speculation is as fast as it is: acceptance by what a verify step costs, and what remains.

In the decode phase, at an equal running batch, speed-up = tokens a verify step yields / what the
step costs in baseline tokens. That is an identity: both follow from the same times and counts.
Throughput has more in it, and every factor is told with a number:

    throughput = decode x first token x batch x residual

`docs/speed.md` says what each one is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any, Literal

import msgspec
import numpy as np

from harness.analyse.acceptance import acceptance_of, sources_of
from harness.analyse.data import CellData, RunData, pairs
from harness.analyse.predict import MeasuredK, Unit, estimate, predictions
from harness.findings import Acceptance, Interval, Metrics, Speed
from harness.measure.columns import Integers
from harness.measure.metrics import later_tokens
from harness.measure.steady import LEVELS, Level
from harness.measure.table import RequestTable
from harness.records import LoadPoint

Basis = Literal["chunks", "acceptance"]
CHUNKS_AGREE = 0.02
"""Chunks are taken for verify steps where their number is the engine's within this share."""
BATCH_AGREES = 0.1
"""Running batches that differ by more make the cost of a step that of another batch."""
NS = 1e9


class PhaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one cell's requests, summed.

    `first_s` sent to first chunk, `decode_s` first chunk to last, `later` the tokens and `gaps`
    the chunks after the first, `under_way` requests in flight on average, `running` the batch that
    a step of the decode phase saw on average.
    """

    first_s: float
    decode_s: float
    later: int
    gaps: int
    under_way: float
    running: float

    @property
    def token_s(self) -> float:
        """Decode time of one token."""
        return self.decode_s / self.later

    @property
    def share(self) -> float:
        """Of a request's time, what passes before its first token."""
        return self.first_s / (self.first_s + self.decode_s)


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of cells, taken apart."""

    repeat: int
    block: int
    base: PhaseTimes
    spec: PhaseTimes
    steps: float
    throughput: tuple[float, float] | None
    acceptance: Acceptance | None

    @property
    def step_s(self) -> float:
        """What one verify step takes."""
        return self.spec.decode_s / self.steps

    @property
    def tokens_per_step(self) -> float:
        """What one verify step yields, as delivered."""
        return self.spec.later / self.steps

    @property
    def cost(self) -> float:
        """A verify step in baseline tokens."""
        return self.step_s / self.base.token_s

    @property
    def decode(self) -> float:
        """Baseline time a token by speculative time a token: tokens a step by its cost."""
        return self.base.token_s / self.spec.token_s

    @property
    def first_token(self) -> float:
        """What the time before the first token makes of the decode's gain, a request long."""
        whole = _request_s(self.base) / _request_s(self.spec)
        return whole / self.decode

    @property
    def batch(self) -> float:
        """Requests in flight, speculative by baseline."""
        return self.spec.under_way / self.base.under_way

    @property
    def residual(self) -> float | None:
        """What of the throughput ratio the other factors leave over."""
        if self.throughput is None:
            return None
        base, spec = self.throughput
        return spec / base / (self.decode * self.first_token * self.batch)


def _request_s(phase: PhaseTimes) -> float:
    """Request time for each token after the first chunk."""
    return (phase.first_s + phase.decode_s) / phase.later


def forced_length(plan: dict[str, Any]) -> float | None:
    """The acceptance length that the plan forces; None where drafts are verified."""
    found = plan.get("speculative", {}).get("forced_length")
    return None if found is None else float(found)


def planned_k(run: RunData, engine: str) -> int | None:
    """Draft tokens a step as the plan says; None of a running server, whose k no plan sets."""
    return None if run.attached else run.plan(engine).get("speculative", {}).get("k")


def speeds(run: RunData, metrics: dict[str, Metrics]) -> tuple[Speed, ...]:
    """Every engine and load that has whole pairs. `metrics` are the cells' own, by cell id."""
    found = []
    for engine in run.engines():
        plan = run.plan(engine)
        confidence = plan["compare"]["confidence"]
        k = planned_k(run, engine)
        for load in run.loads(engine):
            told = speed_of(run.select(engine, load=load), metrics, confidence=confidence, k=k)
            if told is not None:
                found.append(msgspec.structs.replace(told, engine=engine, load=load))
    return tuple(found)


def speed_of(
    cells: Sequence[CellData], metrics: dict[str, Metrics], *, confidence: float, k: int | None
) -> Speed | None:
    """One engine and load; None where no pair has what it takes."""
    whole = whole_pairs(cells)
    specs = [spec for _, spec in whole]
    basis, chunks = step_basis(specs)
    blocks = blocks_of(whole, metrics, basis)
    if not blocks:
        return None

    def over(of: Callable[[Block], float]) -> Interval:
        return estimate([(b.repeat, of(b)) for b in blocks], confidence=confidence)

    def average(of: Callable[[PhaseTimes], float]) -> tuple[float, float]:
        return (
            sum(of(b.base) for b in blocks) / len(blocks),
            sum(of(b.spec) for b in blocks) / len(blocks),
        )

    running = average(lambda p: p.running)
    cell = specs[0].cell
    measured = measured_at(blocks, k)
    throughput = _throughput(blocks, confidence)
    return Speed(
        engine=cell.engine,
        load=cell.load,
        k=measured.k if measured else k,
        step_basis=basis,
        chunks_per_step=chunks,
        baseline_token_s=geometric_mean(b.base.token_s for b in blocks),
        step_s=geometric_mean(b.step_s for b in blocks),
        acceptance_length=_length(blocks),
        tokens_per_step=over(lambda b: b.tokens_per_step),
        relative_step_cost=over(lambda b: b.cost),
        decode=over(lambda b: b.decode),
        first_token=over(lambda b: b.first_token),
        batch=over(lambda b: b.batch),
        throughput=throughput,
        residual=None if throughput is None else over(lambda b: b.residual or 1.0),
        first_token_share=average(lambda p: p.share),
        under_way=average(lambda p: p.under_way),
        running_batch=running,
        pairs=len(blocks),
        equal_batch=abs(running[1] / running[0] - 1) <= BATCH_AGREES,
        predictions=predictions([measured], confidence=confidence) if measured else (),
    )


def whole_pairs(cells: Sequence[CellData]) -> list[tuple[CellData, CellData]]:
    """The pairs that ran to their end, with few failures on either side."""
    return [
        both
        for both in pairs(c for c in cells if c.to_its_end)
        if not any(c.many_failed for c in both)
    ]


def blocks_of(
    whole: Sequence[tuple[CellData, CellData]], metrics: dict[str, Metrics], basis: Basis
) -> list[Block]:
    """The pairs that can be taken apart."""
    told = [acceptance_of(sources_of(spec)) for _, spec in whole]
    found = (block_of(both, metrics, basis, a) for both, a in zip(whole, told, strict=True))
    return [b for b in found if b is not None]


def _throughput(blocks: Sequence[Block], confidence: float) -> Interval | None:
    ratios = [(b.repeat, b.throughput[1] / b.throughput[0]) for b in blocks if b.throughput]
    return estimate(ratios, confidence=confidence) if len(ratios) == len(blocks) else None


def _length(blocks: Sequence[Block]) -> float | None:
    """Acceptance length as the best source counts it, cells pooled by their drafts."""
    known = [b.acceptance for b in blocks if b.acceptance is not None and b.acceptance.drafts]
    drafts = sum(a.drafts for a in known)
    return 1 + sum(a.accepted for a in known) / drafts if drafts else None


def step_basis(specs: Sequence[CellData]) -> tuple[Basis, float | None]:
    """Whether every chunk is a verify step, and the chunks by the steps the engine counted.

    Where the engine counted no steps the chunks are all there is to go by.
    """
    chunks = steps = 0
    for data in specs:
        told = data.ok.drafts
        if len(data.ok) and told.told.all():
            chunks += _later_chunks(data.ok)
            steps += int(told.drafts.sum())
        elif data.counters.delta is not None:
            chunks += _later_chunks(data.records)
            steps += data.counters.delta.drafts
    if not steps:
        return "chunks", None
    share = chunks / steps
    return ("chunks" if abs(share - 1) <= CHUNKS_AGREE else "acceptance"), share


def _later_chunks(table: RequestTable) -> int:
    return int(np.maximum(0, table.lists("chunk_ns").sizes - 1).sum())


def block_of(
    both: tuple[CellData, CellData],
    metrics: dict[str, Metrics],
    basis: Basis,
    acceptance: Acceptance | None,
) -> Block | None:
    """One pair; None where either side has no token after its first chunk, or no counts."""
    base, spec = both
    mine = [metrics[c.cell.cell_id] for c in both]
    level = max((m.steady.level for m in mine if m.steady), key=LEVELS.index, default=LEVELS[0])
    slow, fast = phase_of(base, level), phase_of(spec, level)
    if slow is None or fast is None:
        return None
    length = acceptance.length if acceptance else None
    steps = fast.gaps if basis == "chunks" else fast.later / length if length else None
    if not steps:
        return None
    rates = [m.output_tokens_per_s for m in mine]
    return Block(
        repeat=spec.cell.repeat,
        block=spec.cell.block,
        base=slow,
        spec=fast,
        steps=float(steps),
        throughput=(rates[0], rates[1]) if rates[0] and rates[1] else None,
        acceptance=acceptance,
    )


def phase_of(data: CellData, level: Level) -> PhaseTimes | None:
    """The times of a cell's whole answers in its window; None where there is nothing to time."""
    window = data.window(level)
    if window is None:
        return None
    table, chunks = data.records, data.records.lists("chunk_ns")
    timed = table.ints("sent_ns").known & (chunks.sizes > 0)
    sent, begun, ended = table.ints("sent_ns").values, chunks.first().values, chunks.last().values
    last = np.minimum(ended, window.end_ns)
    flown = int(np.maximum(0, last - np.maximum(sent, window.begin_ns))[timed].sum())
    starts = np.maximum(begun, window.begin_ns)
    running = timed & (last > starts)
    tokens = later_tokens(table)
    mine = timed & table.answered & window.has(table) & (chunks.sizes > 1)
    mine &= tokens.known & (tokens.values != 0)
    first, decode = int((begun - sent)[mine].sum()), int((ended - begun)[mine].sum())
    later = int(tokens.values[mine].sum())
    if not (later and decode > 0 and first > 0 and running.any()):
        return None
    return PhaseTimes(
        first_s=first / NS,
        decode_s=decode / NS,
        later=later,
        gaps=int((chunks.sizes[mine] - 1).sum()),
        under_way=flown / (window.end_ns - window.begin_ns),
        running=running_batch(starts[running], last[running]),
    )


def running_batch(begins: Integers, ends: Integers) -> float:
    """How many spans a moment within one lies in, on average over all of them (not empty)."""
    times = np.concatenate((begins, ends))
    order = np.argsort(times, kind="stable")
    change = np.repeat((1, -1), len(ends))[order]
    together = np.cumsum(change)[:-1].astype(float)
    lasted = np.diff(times[order]).astype(float)
    return float((together**2 * lasted).sum() / (together * lasted).sum())


def measured_at(blocks: Sequence[Block], k: int | None) -> MeasuredK | None:
    """What predictions start from: the acceptance at each position, and the cost, by block."""
    rates = [b.acceptance.per_position if b.acceptance else None for b in blocks]
    known = [r for r in rates if r]
    if not known or len(known) != len(blocks):
        return None
    longest = k or max(map(len, known))
    return MeasuredK(
        k=longest,
        units=tuple(
            Unit(
                key=(b.repeat, b.block),
                rates=padded(r, longest, b.tokens_per_step),
                cost=b.cost,
            )
            for b, r in zip(blocks, known, strict=True)
        ),
    )


def padded(rates: tuple[float, ...], k: int, tokens_per_step: float) -> tuple[float, ...]:
    """`k` rates: positions that were never reached are 0.

    They are scaled to the tokens that were delivered: an engine that counts tokens accepted behind
    a stop would promise more than a client gets.
    """
    whole = (*rates, *(0.0 for _ in range(k - len(rates))))[:k]
    told = sum(whole)
    factor = (tokens_per_step - 1) / told if told > 0 and tokens_per_step > 1 else 1.0
    return tuple(min(1.0, r * factor) for r in whole)


def measured_of(
    run: RunData, engine: str, load: LoadPoint, metrics: dict[str, Metrics]
) -> MeasuredK | None:
    """What predictions at other k start from; None where no pair has what it takes."""
    whole = whole_pairs(run.select(engine, load=load))
    blocks = blocks_of(whole, metrics, step_basis([spec for _, spec in whole])[0])
    return measured_at(blocks, planned_k(run, engine)) if blocks else None
