"""What became of the proposals: verified rightly, sampled as asked for, counted as accepted."""

from __future__ import annotations

from harness.diagnose.records import Dossier, Point
from harness.diagnose.rules import gap, power
from harness.diagnose.rules.measures import (
    FEWEST_STEPS,
    counted,
    critical,
    finite,
    known,
    length,
    lost,
    number,
    percent,
    rate,
    shorter,
    span,
    step_error,
    surely_above,
    surely_below,
)
from harness.diagnose.rules.weights import DECISIVE, GOOD, STRONG, WEAK, point

VERIFIED = 0.97
"""Greedy steps whose accepted count is what the target's own tokens make of their drafts; where a
near-tie falls otherwise, one differs."""
WRONGLY = 0.07
"""A wrong verification goes wrong in more steps than this."""
COUNTED = 0.05
"""Ends of answers inside a step move a count by less."""
STRICT, SLACK = 0.1, 1.2
"""Share of the drafts that a strict rejection must cost, and by how much chance is widened."""
PRICE = 0.03
"""Share of the drafts that greedy drafting must cost at a temperature to be named."""
LIKELIEST = 0.9
"""Of drafts that are drawn so many are no likeliest tokens at any temperature worth the name."""


def verification_points(dossier: Dossier) -> list[Point]:
    """What the trace and the two distributions say of verification and of counting."""
    return [*_verified(dossier), *_counted(dossier), *_sampled(dossier)]


def _verified(dossier: Dossier) -> list[Point]:
    """Greedy: whether each step accepted what the target's own tokens confirm."""
    replay = dossier.replay
    if replay is None or not known(replay.verified) or gap.sampled(dossier):
        return []
    says = f"{counted(replay.verified)} steps accepted what the target's own tokens make of them"
    if surely_below(replay.verified, VERIFIED):
        weight = DECISIVE if surely_below(replay.verified, 0.9) else STRONG
        return [point("verification", weight, says, "replay")]
    if (rate(replay.verified) or 0.0) >= VERIFIED:
        able = power.mostly(replay.verified, VERIFIED - WRONGLY)
        return power.against(["verification"], STRONG, says, "replay", able=able)
    return []


def _counted(dossier: Dossier) -> list[Point]:
    """Whether the counters say what the trace does."""
    observed = dossier.observed
    if observed is None or (dossier.replay is None and observed.counted_otherwise is None):
        return []
    if observed.counted_otherwise is None:
        says = "the engine's counters say what its trace does"
        return [point("counting", -STRONG, says, "observed")]
    told, seen = length(observed.acceptance), length(gap.by_trace(dossier))
    if told is None or seen is None:
        return []
    says = f"the counters say {number(told)} tokens a step, the trace of the same steps "
    says += number(seen)
    # Both count the same steps: what differs is no chance.
    if abs(told - seen) > COUNTED * max(seen - 1, 0.2):
        return [point("counting", DECISIVE, says, "observed")]
    return [point("counting", -STRONG, says, "observed")]


def _sampled(dossier: Dossier) -> list[Point]:
    """Whether a sampled target accepts what its distribution and the drafter's ask for."""
    found = dossier.sampling
    sampled, greedy = (
        (None, None)
        if found is None
        else (finite(found.implied_sampled), finite(found.implied_greedy))
    )
    if found is None or (sampled is None and greedy is None):
        return []
    at = f"at temperature {found.temperature:g}"
    implied, seen = gap.implied(dossier), found.observed
    says = f"{at} {span(seen)} tokens a step, and the two distributions imply "
    says += f"{number(sampled)} for drawn drafts, {number(greedy)} for the likeliest"
    points: list[Point] = []
    strict = rejects(dossier)
    if strict:
        share = lost(seen, implied)
        says += f": {percent(share)} of what the drafts should bring is rejected"
        weight = DECISIVE if (share or 0.0) > 0.2 else STRONG
        points.append(point("strict_rejection", weight, says, "sampling"))
    elif length(seen) is not None:
        able = power.not_shorter_on_same(seen, length(implied), STRICT)
        points += power.against(["strict_rejection"], STRONG, says, "sampling", able=able)
    return [*points, *_greedy_price(dossier, sampled, greedy, at, strict)]


def rejects(dossier: Dossier) -> bool:
    """Whether surely fewer sampled drafts are accepted than the distributions imply.

    What is implied is of the same steps, so that only the steps' own chance stands between the two,
    and some steps at the answers' ends.
    """
    found = dossier.sampling
    implied = gap.implied(dossier)
    seen, could = (None if found is None else length(found.observed)), length(implied)
    if found is None or seen is None or could is None:
        return False
    error = step_error(found.observed)
    if error is None:
        return shorter(found.observed, implied, least=STRICT)
    return could - seen > max(SLACK * critical() * error, STRICT * (could - 1))


def _greedy_price(
    dossier: Dossier, sampled: float | None, greedy: float | None, at: str, strict: bool
) -> list[Point]:
    """What drafting greedily costs beside drawing the drafts."""
    if sampled is None or greedy is None or dossier.sampling is None:
        return []
    price = (sampled - greedy) / max(sampled - 1, 1e-9)
    argmax = dossier.sampling.drafts_are_argmax
    says = f"{counted(argmax)} drafts are the drafter's likeliest token; {at} drawn drafts would "
    says += f"be accepted {number(sampled)} tokens a step, and these are {number(greedy)}"
    if gap.drafts_greedily(dossier) and price > PRICE:
        weight = DECISIVE if price > 0.2 else STRONG if price > 0.1 else STRONG - 0.5
        if strict:
            weight = GOOD
        if not surely_above(argmax, LIKELIEST):
            weight -= WEAK
        return [point("greedy_drafts_sampled", weight, says, "sampling")]
    enough = dossier.sampling.observed.counts.drafts >= FEWEST_STEPS
    able = power.rarely(argmax, gap.BY_DRAFTS) or (price <= PRICE and enough)
    return power.against(["greedy_drafts_sampled"], GOOD, says, "sampling", able=able)
