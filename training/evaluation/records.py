"""What an evaluation finds: the offline expectation, and what each engine accepted beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from harness.records import DraftCounts

if TYPE_CHECKING:
    from training import evaluate

Source = Literal["counters", "requests", "client"]
WalkedFrom = Literal["engine", "states"]
LEAST_PROOF = 0.98
"""Of greedy answers' tokens: those that are the argmax of the state before them."""

SERVED = 8
"""Prompts of an evaluation that a loaded export answers."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the token ids that every engine is asked with, and how long it may answer.

    `greedy_ids`: the target's greedy answer where the samples hold it, to be proved and taken.
    """

    prompt_id: str
    category: str | None
    token_ids: tuple[int, ...]
    max_tokens: int
    greedy_ids: tuple[int, ...] | None = None


class Walked(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out prompt offline: the target's answer, and the drafter walked over it."""

    prompt_id: str
    category: str | None
    prompt_tokens: int
    token_ids: tuple[int, ...]
    counts: DraftCounts


class Offline(msgspec.Struct, frozen=True, kw_only=True):
    """The expectation. `proof`: how often the states' own argmax is the answer's next token.

    `least_proof`: what that is held to. `walked_from`: the reference engine's answers and states,
    or samples and their captured states; `why` one was taken. `greedy`: False where the answers
    were sampled: engines are then asked with the plan's sampling, and answer otherwise.
    """

    answers: tuple[Walked, ...]
    counts: DraftCounts
    proof: float
    seconds: float
    least_proof: float = LEAST_PROOF
    walked_from: WalkedFrom = "engine"
    why: str = ""
    greedy: bool = True


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out prompt in an engine; `token_ids` None where the engine sends none."""

    prompt_id: str
    token_ids: tuple[int, ...] | None
    output_tokens: int | None
    finish_reason: str | None
    counts: DraftCounts | None
    error: str | None = None


class Online(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's acceptance: by its counters around the load, and by its requests' own figures.

    `counts` is what is compared, `source` where it comes from. `ready_s`: the engine's start.
    """

    engine: str
    answers: tuple[Asked, ...]
    counters: DraftCounts | None
    requests: DraftCounts | None
    counts: DraftCounts | None
    source: Source | None
    note: str | None
    ready_s: float | None
    seconds: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the comparison. `gap`: the offline rate less this one's, as a share.

    `most`: how far the gap may be from 0 to either side.
    """

    name: str
    drafts: int | None
    rate: float | None
    length: float | None
    per_position: tuple[float, ...] | None
    gap: float | None = None
    most: float | None = None
    same_outputs: int | None = None
    answered: int
    verdict: str = ""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """`evaluation.json`: the comparison and what it was made of."""

    drafter: str
    drafter_digest: str
    target: str
    k: int
    prompts: int
    largest_gap: float
    rows: tuple[Row, ...]
    offline: Offline
    online: tuple[Online, ...]


def counts_of(walked: evaluate.DraftCounts) -> DraftCounts:
    """The counts of a walk as those of an engine are kept."""
    return DraftCounts(
        drafts=walked.drafts,
        drafted=walked.drafted,
        accepted=walked.accepted,
        per_position=walked.per_position,
    )
