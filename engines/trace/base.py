"""What an engine did in every verify step, as its own process wrote it down.

A trace is what tells bad input from bad drafter execution from bad verification: which states the
drafter was really handed, and what it really proposed. It is recorded at the drafter's door: after
whatever the engine did to the states, before the drafter saw them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

StepKind = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """One call of the drafter for one request.

    `request` holds the client's own id. `step` counts this request's calls from 0, `call` the
    engine's (requests of one batch share it) and `batch` the requests in that call.

    Rows: `positions` int64 [T], `token_ids` int64 [T] that the target was fed there, and `aux`
    [T, n * H], float32, what the drafter was handed for them, in the drafter's order. `valid`: the
    first so many rows are of tokens that became output (prefill: T; decode: accepted + 1); what
    follows belongs to rejected drafts, where the engine hands these over at all. `next_token`: the
    target's token behind the last valid row. `drafts` int64 [k]: what was then proposed.

    A prompt that goes through in chunks has a step for each; only the last chunk's has drafts,
    elsewhere they are empty and `next_token` is None. The step in which a request ended has no
    drafts where the engine did not ask the drafter any more; its valid rows may go beyond the
    output's end, where accepted drafts stood behind it.

    The reference engine hands over a prompt alone and drafts for all running requests at once:
    `batch` is then the most requests in one of the two.
    """

    request: str
    step: int
    call: int
    batch: int
    kind: StepKind
    positions: Tensor
    token_ids: Tensor
    aux: Tensor
    valid: int
    next_token: int | None
    drafts: Tensor
