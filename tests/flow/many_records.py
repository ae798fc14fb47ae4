"""A run's folder of as many request records as asked for, as a measured run would leave it.

Greedy answers of 32 to 64 tokens, one prompt a request, at concurrency 32: a baseline whose chunks
hold a token each, and a drafter of k = 3 whose verify steps bring 17 chunks or more. One request in
a hundred fails, one answer in fifty of the speculative cells parts from the baseline's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.measure.columns import Drafts, Ints, Lists, Names, Texts, constant
from harness.measure.store import RunFolder
from harness.measure.table import RequestTable
from harness.plan.schema import Plan, as_dict
from harness.records import (
    SCHEMA_VERSION,
    Cell,
    DraftCounts,
    EngineCounters,
    LoadPoint,
    Manifest,
    Timeline,
    Variant,
)

K = 3
CONCURRENCY = 32
STEPS = 16
"""Verify steps that each answer has at least: a chunk each, behind the prefill's own."""
KEPT = 0.45
FAILED, PARTED = 0.01, 0.02
WORDS = [" ".join(f"word{(i * j) % 97}" for j in range(28)) for i in range(1, 200)]
CATEGORIES = ("chat", "code", "maths", "prose")
STARTED_NS = 5_000_000_000_000


def ints(values: np.ndarray, known: np.ndarray | None = None) -> Ints:
    return Ints(values, constant(True, len(values), bool) if known is None else known)


def missing(size: int) -> Ints:
    return Ints(constant(0, size, np.int64), constant(False, size, bool))


def lists(values: np.ndarray, sizes: np.ndarray) -> Lists:
    known = constant(True, len(sizes), bool)
    return Lists(values, np.cumsum(sizes) - sizes, sizes, known)


def names(words: tuple[str, ...], codes: np.ndarray) -> Names:
    return Names(codes, words)


def answer_lengths(n: int) -> np.ndarray:
    """Of each prompt, in tokens; the same in every cell."""
    return np.random.default_rng(1).integers(32, 65, n)


def verify_steps(rng: np.random.Generator, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens of every step, flat, and each answer's number of steps."""
    drawn = np.minimum(rng.geometric(1 - KEPT, (len(tokens), 63)) - 1, K).astype(np.int8)
    made = np.cumsum(drawn + 1, axis=1)
    few = made[:, STEPS - 2] >= tokens - 1  # would have ended before so many steps
    drawn[few] = np.arange(63) % 2
    made[few] = np.cumsum(drawn[few] + 1, axis=1)
    steps = 1 + (made < (tokens - 1)[:, None]).sum(axis=1)
    return drawn[np.arange(63) < steps[:, None]].astype(np.int64), steps


def chunk_sizes(tokens: np.ndarray, accepted: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Tokens of each chunk, flat: the prefill's, then a step's each, the last one cut."""
    ends = np.cumsum(steps)
    sizes = accepted + 1
    over = np.add.reduceat(sizes, ends - steps) - (tokens - 1)
    sizes[ends - 1] -= over
    first = np.repeat(np.arange(len(steps)), steps + 1)
    whole = np.ones(int((steps + 1).sum()), np.int64)
    whole[np.diff(first, prepend=-1) == 0] = sizes
    return whole


def table_of(cell: Cell, n: int, seed: int) -> RequestTable:
    """One cell's records."""
    rng = np.random.default_rng(seed)
    tokens = answer_lengths(n)
    drafting = cell.variant == "speculative"
    if drafting:
        accepted, steps = verify_steps(rng, tokens)
        sizes, chunks = chunk_sizes(tokens, accepted, steps), steps + 1
    else:
        sizes, chunks = np.ones(int(tokens.sum()), np.int64), tokens
    lost = rng.random(n) < FAILED
    times, sent = _times(rng, chunks, 14e6 if drafting else 10e6)
    ids = np.random.default_rng(2).integers(0, 160_000, int(tokens.sum()))
    if drafting:
        at = np.flatnonzero(rng.random(n) < PARTED)
        ids[(np.cumsum(tokens) - 1)[at]] += 1
    some = ~lost
    words = np.arange(n)
    nothing = names((), constant(-1, n, np.int64))
    columns = {
        "cell_id": names((cell.cell_id,), constant(0, n, np.int64)),
        "index": ints(words),
        "prompt_id": names(tuple(f"prompt-{i}" for i in range(n)), words),
        "category": names(CATEGORIES, words % len(CATEGORIES)),
        "due_ns": missing(n),
        "sent_ns": ints(sent),
        "chunk_ns": lists(times, chunks),
        "chunk_tokens": lists(sizes, chunks),
        "end_ns": ints(times[np.cumsum(chunks) - 1]),
        "status": names(("ok", "failed"), lost.astype(np.int64)),
        "error": names(("connection closed",), np.where(lost, 0, -1)),
        "http_status": ints(constant(200, n, np.int64)),
        "prompt_tokens": ints(rng.integers(20, 400, n)),
        "output_tokens": ints(np.where(lost, 0, tokens), some),
        "token_source": names(("token_ids",), np.where(lost, -1, 0)),
        "token_ids": lists(ids, tokens),
        "text": Texts.of([f"{i} {WORDS[i % len(WORDS)]}" for i in range(n)]),
        "reasoning": Texts.of([None] * n),
        "finish_reason": names(("stop", "length"), (rng.random(n) < 0.1).astype(np.int64)),
        "acceptance": _drafts(accepted, steps) if drafting else Drafts.of([None] * n),
        "correct": Ints(constant(0, n, np.int64), constant(False, n, bool), True),
        "first_reasoning_ns": missing(n),
        "first_answer_ns": missing(n),
        "connect_ns": missing(n),
        "conversation": nothing,
        "turn": ints(constant(0, n, np.int64)),
        "worker": ints(words % 2),
        "tries": ints(constant(1, n, np.int64)),
    }
    return RequestTable(n, columns.__getitem__)


def _times(
    rng: np.random.Generator, chunks: np.ndarray, gap_ns: float
) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals of all chunks, flat, and when each request was sent: a closed loop of senders."""
    gaps = rng.uniform(0.8 * gap_ns, 1.2 * gap_ns, int(chunks.sum())).astype(np.int64)
    begins = np.cumsum(chunks) - chunks
    gaps[begins] = rng.uniform(20e6, 90e6, len(chunks)).astype(np.int64)
    lasted = np.add.reduceat(gaps, begins)
    sent = np.zeros(len(chunks), np.int64)
    for sender in range(CONCURRENCY):
        own = lasted[sender::CONCURRENCY]
        sent[sender::CONCURRENCY] = np.cumsum(own) - own
    sent += STARTED_NS
    since = np.cumsum(gaps)
    return since - np.repeat(since[begins] - gaps[begins] - sent, chunks), sent


def _drafts(accepted: np.ndarray, steps: np.ndarray) -> Drafts:
    begins = np.cumsum(steps) - steps
    told = [np.add.reduceat((accepted > j).astype(np.int64), begins) for j in range(K)]
    n = len(steps)
    return Drafts(
        told=constant(True, n, bool),
        drafts=steps,
        drafted=ints(K * steps),
        accepted=np.add.reduceat(accepted, begins),
        per_position=lists(np.stack(told, axis=1).reshape(-1), np.full(n, K)),
        past_end=missing(n),
        steps=lists(accepted, steps),
    )


def write_run(path: Path, requests: int, *, repeats: int = 5, blocks: int = 2) -> list[Cell]:
    """A run of about so many requests; its cells."""
    n = requests // (2 * repeats * blocks)
    load = LoadPoint(mode="closed", concurrency=CONCURRENCY, num_requests=n)
    cells = [
        Cell(
            cell_id=f"reference-{variant}-r{repeat}-b{block}",
            engine="reference",
            variant=variant,
            repeat=repeat,
            block=block,
            load=load,
            seed=repeat,
        )
        for repeat in range(repeats)
        for variant in _order(repeat)
        for block in range(blocks)
    ]
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.write_manifest(
        Manifest(
            schema_version=SCHEMA_VERSION,
            run_id="many",
            created="2026-01-01T00:00:00+00:00",
            command=("run",),
            plan={"engines": {"reference": as_dict(Plan())}, "models": {"reference": {}}},
            environment={},
            versions={},
            git_commit=None,
            git_dirty=None,
            clock_anchor={},
            cells=tuple(cells),
        )
    )
    for seed, cell in enumerate(cells):
        _save(folder, cell, table_of(cell, n, seed))
    return cells


def _order(repeat: int) -> tuple[Variant, Variant]:
    return ("speculative", "baseline") if repeat % 2 else ("baseline", "speculative")


def _save(folder: RunFolder, cell: Cell, table: RequestTable) -> None:
    counts = table.drafts
    positions = counts.per_position.flat().reshape(-1, K).sum(axis=0).tolist()
    delta = DraftCounts(
        drafts=int(counts.drafts.sum()),
        drafted=int(counts.drafted.values.sum()),
        accepted=int(counts.accepted.sum()),
        per_position=tuple(positions),
    )
    folder.save_cell(
        cell.cell_id,
        table,
        EngineCounters(
            before={},
            after={},
            delta=delta if cell.variant == "speculative" else None,
            generation_tokens=int(table.lists("token_ids").sizes.sum()),
            settled=True,
        ),
        Timeline(startup=(), ready_s=1.0, window_start_ns=0, window_end_ns=1),
        None,
    )
