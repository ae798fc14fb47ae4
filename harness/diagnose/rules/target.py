"""Whether the engine computes the target: what is wrong before any drafter is asked."""

from __future__ import annotations

from harness.diagnose.records import Dossier, Point, Proportion, TargetParity
from harness.diagnose.rules import power
from harness.diagnose.rules.measures import (
    counted,
    finite,
    known,
    number,
    rate,
    surely_above,
    surely_below,
)
from harness.diagnose.rules.weights import DECISIVE, GOOD, STRONG, WEAK, point

NAME = "target"
RIGHT, WRONG = 0.97, 0.95
"""Share of generated tokens that must be the reference's argmax; near-ties are not counted."""
SOME = 0.9
"""A target that is computed otherwise has other likeliest tokens in more than a tenth."""
FLOOR = 0.05
"""Gap of log-probabilities, in nats, that two honest computations may have; where none is told."""
OVERRULED = 0.002
"""Of greedy tokens so many may be behind the reference's choice by more than rounding explains: an
expert that is chosen by a near-tie in one of the layers."""
GAP = 3.0
"""So many times the floor is no honest computation's gap."""


def is_right(parity: TargetParity | None) -> bool | None:
    """Whether the engine's target is the reference's; None where that is open or not asked."""
    if parity is None:
        return None
    if surely_above(parity.overruled, OVERRULED):
        return False
    if known(parity.argmax):
        if surely_below(parity.argmax, WRONG):
            return False
        # No prompt is harder for an honest engine: beside a wide gap each token counts.
        alone = Proportion(hits=parity.argmax.hits, of=parity.argmax.of) if parity.argmax else None
        if is_wide(parity) and surely_below(alone, WRONG):
            return False
        if (rate(parity.argmax) or 0.0) >= RIGHT:
            return True
    gaps = _gaps(parity)
    if not gaps or known(parity.argmax):
        return None
    return True if max(gaps.values()) <= _limit(parity) else None


def is_wide(parity: TargetParity) -> bool:
    """Whether log-probabilities differ by more than two honest computations'."""
    return max(_gaps(parity).values(), default=0.0) > _limit(parity)


def _gaps(parity: TargetParity) -> dict[str, float]:
    told = {
        "on given text": parity.prompt_gap,
        "while decoding": parity.decode_gap,
        "between decoding and the same text as a prompt": parity.rescored_gap,
    }
    return {name: gap for name, value in told.items() if (gap := finite(value)) is not None}


def _limit(parity: TargetParity) -> float:
    return GAP * max(finite(parity.floor) or FLOOR, 1e-6)


def target_points(dossier: Dossier) -> list[Point]:
    """What parity with the reference says of the target, and of states that follow from it."""
    parity = dossier.target
    if parity is None:
        return []
    right = is_right(parity)
    says = f"{counted(parity.argmax)} generated tokens are the reference's likeliest"
    if parity.overruled is not None and parity.overruled.hits:
        says += f"; {counted(parity.overruled)} tokens that it chose greedily are behind the "
        says += "reference's choice by more than any rounding explains"
    gaps = _gaps(parity)
    if gaps:
        name, gap = max(gaps.items(), key=lambda item: (item[1], item[0]))
        says += f"; log-probabilities differ by {number(gap, 3)} nats {name}"
    if right:
        able = not known(parity.argmax) or power.mostly(parity.argmax, SOME)
        return power.against(["target_computed_wrong"], DECISIVE, says, NAME, able=able)
    if right is None:
        wide = is_wide(parity)
        odd = known(parity.argmax) and not surely_above(parity.argmax, WRONG)
        weight = GOOD if wide and odd else WEAK if wide else 0.0
        return [point("target_computed_wrong", weight, says, NAME)] if weight else []
    weight = DECISIVE + (WEAK if surely_below(parity.argmax, 0.85) else 0.0)
    follows = "the target itself is computed otherwise: its states follow"
    return [
        point("target_computed_wrong", weight, says, NAME),
        *(
            point(cause, -STRONG, follows, NAME)
            for cause in ("states_noisy", "states_partial_sums", "states_scaled")
        ),
    ]
