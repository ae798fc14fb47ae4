"""Whether last states passed the target's final norm once, or twice.

Their size tells a missing norm, never a second one: x / rms(x) * w has the same size after w is
applied again. Their argmax tells it, a little: with the second norm undone the answers' tokens are
predicted better than without.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

MOST_TOKENS = 1024
HEAD_ROWS = 16384
STANDARD_ERRORS = 3.0
"""Of the votes' difference, under chance: near ties that rounding turns over fall on both sides."""


class Votes(msgspec.Struct, frozen=True, kw_only=True):
    """Answer tokens that are the argmax of the state before them in one way only: `kept` as the
    states are, `undone` with one norm undone; of `tokens` that were looked at."""

    kept: int
    undone: int
    tokens: int

    @property
    def twice(self) -> bool:
        """Whether undoing one norm helps, beyond chance: once-normed states only lose by it."""
        differ = self.kept + self.undone
        return self.undone - self.kept > STANDARD_ERRORS * differ**0.5


def ranks(states: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """How many tokens of the vocabulary score above `tokens` [N], after states [N, H].

    The head [V, H] is taken some rows at a time.
    """
    import torch

    states = states.float()
    own = (states * head[tokens].float()).sum(-1, keepdim=True)  # [N, 1]
    # The token's own score comes out of another product: equal but for rounding.
    own = own + own.abs() * 1e-5 + 1e-5
    above = torch.zeros(len(tokens), dtype=torch.int64)
    for begin in range(0, len(head), HEAD_ROWS):
        above += (states @ head[begin : begin + HEAD_ROWS].float().T > own).sum(-1)
    return above


def undone(last: Tensor, norm: Tensor) -> Tensor:
    """States [..., H] with one norm of weights [H] undone, float32.

    A row's length stays: it does not change the argmax. Where a weight is 0 so is the state.
    """
    import torch

    weight = norm.float()
    return torch.where(weight == 0, 0.0, last.float() / torch.where(weight == 0, 1.0, weight))


def count_votes(found: Iterable[tuple[Tensor, Tensor]], head: Tensor, norm: Tensor) -> Votes:
    """The votes of the first `MOST_TOKENS` answer tokens.

    `found`: of each sample the states before its answer's tokens [N, H] and those tokens [N].
    """
    kept = without = tokens = 0
    for states, ids in found:
        some = slice(MOST_TOKENS - tokens)
        own = ranks(states[some], head, ids[some]) == 0
        other = ranks(undone(states[some], norm), head, ids[some]) == 0
        kept, without = kept + int((own & ~other).sum()), without + int((other & ~own).sum())
        tokens += len(own)
        if tokens >= MOST_TOKENS:
            break
    return Votes(kept=kept, undone=without, tokens=tokens)
