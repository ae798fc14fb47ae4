"""Whether sampled outputs (temperature above 0) have the baseline's distribution.

Token by token they cannot be compared, so their statistics are: how often each token comes, and how
long the answers are. A permutation test tells chance from change: if speculation changes nothing,
the two answers to a prompt may be swapped.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from harness.analyse.data import RunData, pairs
from harness.analyse.integrity import SIGNIFICANT, matched_rows
from harness.findings import Caution, EngineIntegrity
from harness.records import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

PERMUTATIONS = 1999
LEAST_PROMPTS = 10
MOST_PAIRS = 4000
KINDS = 200
"""Commonest tokens counted one by one; the others count together."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """The test's outcome: Bonferroni's p-value of both statistics, and over how many prompts."""

    p_value: float
    tokens_p: float
    lengths_p: float
    prompts: int


def sampled(run: RunData, engine: str) -> Sampled | None:
    """The test on one engine; None: greedy, or too few prompts answered by both variants."""
    if run.greedy(engine):
        return None
    both = [
        (base.ok, cand.ok, *matched_rows(base.ok, cand.ok, first_turns=True))
        for base, cand in pairs(run.select(engine))
    ]
    step = max(1, -(-sum(len(ours) for *_, ours in both) // MOST_PAIRS))
    matched: list[tuple[RequestRecord, RequestRecord]] = []
    skip = 0  # every so many of all pairs, cell after cell
    for base, cand, theirs, ours in both:
        taken = slice(skip, None, step)
        matched += zip(
            base.take(theirs[taken]).records(), cand.take(ours[taken]).records(), strict=True
        )
        skip = (skip - len(ours)) % step
    return permutation_test(matched)


def permutation_test(
    matched: Sequence[tuple[RequestRecord, RequestRecord]], *, seed: int = 0
) -> Sampled | None:
    """Swap the answers of whole prompts at random and see how extreme the true order is.

    Statistics: the sum over tokens of (difference of counts)^2 / (count of both), as in a
    two-sample chi-square test, and the difference of the total lengths. Whole prompts are swapped,
    since equal seeds may give a prompt the same answer in every block.
    """
    import numpy as np

    prompts: dict[str, int] = {}
    rows = [prompts.setdefault(a.prompt_id, len(prompts)) for a, _ in matched]
    if len(prompts) < LEAST_PROMPTS:
        return None
    ids = all(r.token_ids is not None for both in matched for r in both)
    bags = [(_bag(a, ids), _bag(b, ids)) for a, b in matched]
    pooled: Counter[int | str] = Counter()
    for a, b in bags:
        pooled.update(a)
        pooled.update(b)
    kind = {token: i for i, (token, _) in enumerate(pooled.most_common(KINDS))}
    differences = np.zeros((len(prompts), len(kind) + 1))
    totals = np.zeros(len(kind) + 1)
    for row, bag in zip(rows, bags, strict=True):
        for sign, side in ((-1, bag[0]), (1, bag[1])):
            for token, count in side.items():
                column = kind.get(token, len(kind))
                differences[row, column] += sign * count
                totals[column] += count
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(PERMUTATIONS, len(prompts)))
    signs = np.vstack([np.ones(len(prompts)), signs])
    weights = np.divide(1.0, totals, out=np.zeros_like(totals), where=totals > 0)
    tokens_p = _share(((signs @ differences) ** 2) @ weights)
    lengths_p = _share(np.abs(signs @ differences.sum(axis=1)))
    return Sampled(
        p_value=min(1.0, 2 * min(tokens_p, lengths_p)),
        tokens_p=tokens_p,
        lengths_p=lengths_p,
        prompts=len(prompts),
    )


def _share(statistics: np.ndarray) -> float:
    """How many permutations are at least as extreme as the first, itself counted."""
    return float((statistics >= statistics[0] * (1 - 1e-12)).mean())


def _bag(record: RequestRecord, ids: bool) -> Counter[int | str]:
    if ids:
        return Counter(record.token_ids or ())
    return Counter(f"{record.reasoning or ''} {record.text or ''}".split())


def sampling_caution(found: EngineIntegrity) -> Caution | None:
    """Speculation changed the distribution of what is said."""
    if found.sampling_p is None or found.sampling_p >= SIGNIFICANT:
        return None
    return Caution(
        code="distribution_differs",
        text=(
            f"{found.engine}: sampled answers with speculation differ from those without in their "
            f"tokens or lengths (permutation test over {found.sampling_prompts} prompts, "
            f"p = {found.sampling_p:.2g})"
        ),
        advice=(
            "Rejection sampling keeps the target's distribution; see whether the engine verifies "
            "greedily, and compare at sampling.temperature=0."
        ),
    )
