"""Checks that the captured last states passed the final norm once: their size cannot show two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engines.capture.target import final_norm
from training.capture.checks import Probe, cosines
from training.capture.inputs import Row
from training.gate import Check
from training.norm_count import count_votes

if TYPE_CHECKING:
    from torch import Tensor

_TWICE = "the final norm was applied twice"


def norm_once_check(found: Sequence[tuple[Row, Tensor]], head: Tensor, norm: Tensor) -> Check:
    """The answers' tokens are not predicted better with one norm undone (`norm_count`)."""
    import torch

    answers = []
    for row, last in found:
        begin = max(row.loss_from, 1)
        tokens = torch.tensor(row.token_ids[begin:].tolist(), dtype=torch.int64)
        answers.append((last[begin - 1 : -1], tokens))
    votes = count_votes(answers, head, norm)
    return Check(
        name="norm_once",
        passed=not votes.twice,
        value=votes.undone,
        reason=f"of {votes.tokens} answer tokens are predicted only with one norm undone, "
        f"{votes.kept} only as captured",
        advice=_TWICE,
    )


def reference_norm_check(probes: Sequence[Probe], norm: Tensor, eps: float) -> Check:
    """The last state is closer to the reference's than to the reference's normed once more."""
    pairs = [(p.got[:, -1:], p.every[:, -1:]) for p in probes if p.every is not None]
    once = _mean_over(pairs)
    twice = _mean_over([(got, final_norm(true, norm, eps)) for got, true in pairs])
    return Check(
        name="reference_norm",
        passed=once >= twice - 1e-6,
        value=once,
        limit=twice,
        relation=">=",
        reason="mean cosine to the reference's last state; the limit is that to the same normed "
        "once more",
        advice=_TWICE,
    )


def _mean_over(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    return sum(float(cosines(got, other).mean()) for got, other in pairs) / max(len(pairs), 1)
