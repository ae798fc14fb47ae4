"""Shares and lengths held against each other: what differs, and by how much more than by chance.

Everything here takes what it gets: counts of nothing, counts that contradict each other and figures
that are no numbers lead to None, never to an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist

from harness.analyse.statistics import wilson
from harness.diagnose.records import Length, Proportion

USUAL = NormalDist().inv_cdf(0.975)
"""Standard errors to each side of a 95% interval."""
FEWEST = 20
"""Below so many trials a share says nothing."""
FEWEST_STEPS = 30
"""Below so many verify steps nothing can be said of a drafter, for it or against."""
SAME_TEXT = 1.2
"""How much wider the chance of steps is taken where prompts cancel."""
CLUSTERED = 1.5
"""How much wider an interval by prompt usually is than one that takes steps as independent."""
LONGEST = 1e6
"""Tokens a step."""
LOOKS = 12
"""So many comparisons are made of a whole dossier, beside those within one experiment."""


def critical(looks: int = LOOKS, alpha: float = 0.05) -> float:
    """Standard errors that a difference must exceed, one-sided, of `looks` taken (Bonferroni)."""
    return NormalDist().inv_cdf(1 - alpha / max(1, looks))


def finite(value: float | None) -> float | None:
    """The number, or None where it is none."""
    return value if value is not None and math.isfinite(value) else None


def rate(counted: Proportion | None) -> float | None:
    """The share, within 0 and 1; None where nothing was counted."""
    if counted is None or counted.of <= 0:
        return None
    return min(1.0, max(0.0, counted.hits / counted.of))


def known(counted: Proportion | None, fewest: int = FEWEST) -> bool:
    """Whether enough was counted to say anything."""
    return counted is not None and counted.of >= fewest


def error(counted: Proportion) -> float:
    """Standard error of a share: from its own interval, and never less than Wilson's.

    Where all or nothing hits, prompts tell nothing of how they differ: then Wilson's, widened.
    """
    if counted.of <= 0:
        return 1.0
    low, high = wilson(min(max(counted.hits, 0), counted.of), counted.of, USUAL)
    plain = (high - low) / 2 / USUAL
    if not 0 < counted.hits < counted.of:
        return CLUSTERED * plain
    return max(plain, _half(counted.low, counted.high) or 0.0)


def _half(low: float | None, high: float | None) -> float | None:
    """Standard error that the ends of a 95% interval are of."""
    low, high = finite(low), finite(high)
    return None if low is None or high is None or high < low else (high - low) / 2 / USUAL


def ends(counted: Proportion, z: float = USUAL) -> tuple[float, float]:
    """The share's interval, `z` standard errors to each side."""
    share = rate(counted) or 0.0
    if z == USUAL and _half(counted.low, counted.high) is not None:
        return max(0.0, counted.low or 0.0), min(1.0, counted.high or 0.0)
    half = z * error(counted)
    return max(0.0, share - half), min(1.0, share + half)


def above(
    more: Proportion | None, less: Proportion | None, *, margin: float = 0.0, looks: int = LOOKS
) -> bool:
    """Whether one share is above another by more than `margin`, and not by chance."""
    if more is None or less is None or not (known(more) and known(less)):
        return False
    difference = (rate(more) or 0.0) - (rate(less) or 0.0) - margin
    return difference > critical(looks) * math.hypot(error(more), error(less))


def bare(counted: Proportion | None) -> Proportion | None:
    """The counts alone, for what is held against another share of the very same trials."""
    return None if counted is None else Proportion(hits=counted.hits, of=counted.of)


def surely_below(counted: Proportion | None, limit: float, *, looks: int = LOOKS) -> bool:
    """Whether the share is below `limit`, and not by chance."""
    if counted is None or not known(counted):
        return False
    _, high = wilson(min(max(counted.hits, 0), counted.of), counted.of, critical(looks))
    return max(high, (rate(counted) or 0.0) + critical(looks) * error(counted)) < limit


def surely_above(
    counted: Proportion | None, limit: float, *, looks: int = LOOKS, fewest: int = FEWEST
) -> bool:
    """Whether the share is above `limit`, and not by chance."""
    if counted is None or not known(counted, max(1, fewest)):
        return False
    low, _ = wilson(min(max(counted.hits, 0), counted.of), counted.of, critical(looks))
    return low > limit


def pooled(parts: Iterable[Proportion | None]) -> Proportion:
    """All of them counted as one."""
    some = [p for p in parts if p is not None and p.of > 0]
    return Proportion(hits=sum(p.hits for p in some), of=sum(p.of for p in some))


def length(found: Length | None) -> float | None:
    """The acceptance length: as told, else from the counts. At least 1: a step brings one.

    None for one beyond `LONGEST`, which no step brings: nothing could be drawn to its scale.
    """
    if found is None:
        return None
    told = finite(found.length)
    if told is None and found.counts.drafts > 0:
        told = 1 + found.counts.accepted / found.counts.drafts
    return None if told is None or told > LONGEST else max(1.0, told)


def length_error(found: Length) -> float | None:
    """Standard error of the length: from its interval, else from the counts, widened."""
    told = _half(found.low, found.high)
    if told is not None:
        return told
    drafts, mean = found.counts.drafts, length(found)
    if drafts <= 0 or mean is None:
        return None
    accepted = mean - 1  # of a step; its variance is the largest where all or nothing is accepted
    k = max(2.0, len(found.counts.per_position or ()), accepted)
    variance = max(accepted * (k - accepted), 0.25 / drafts)
    return CLUSTERED * math.sqrt(variance / drafts)


def step_error(found: Length) -> float | None:
    """Standard error of the length as steps alone vary, not the prompts; None without positions.

    For what is held against a figure of the very same steps.
    """
    positions, drafts = found.counts.per_position, found.counts.drafts
    if not positions or drafts <= 0:
        return None
    rates = [min(1.0, max(0, n) / drafts) for n in positions]
    mean = sum(rates)
    square = sum((2 * i + 1) * rate for i, rate in enumerate(rates))
    return math.sqrt(max(square - mean * mean, 0.25 / drafts) / drafts)


def shorter(
    less: Length | None, more: Length | None, *, least: float = 0.05, looks: int = LOOKS
) -> bool:
    """Whether fewer drafts a step are accepted in one than in the other, and not by chance.

    `least`: the share of the accepted drafts that must be lost for it to matter.
    """
    low, high = length(less), length(more)
    if less is None or more is None or low is None or high is None or high <= 1:
        return False
    one, other = length_error(less), length_error(more)
    if one is None or other is None or (high - low) < least * (high - 1):
        return False
    return high - low > critical(looks) * math.hypot(one, other)


def shorter_on_same(less: Length | None, more: Length | None, *, least: float = 0.05) -> bool:
    """`shorter` for two walks over the same text: what the prompts are like cancels.

    Only the steps' own chance is left, taken as independent of each other, which is the strict side
    of two walks that mostly agree; and a little more, as steps of one prompt are alike.
    """
    low, high = length(less), length(more)
    if less is None or more is None or low is None or high is None or high <= 1:
        return False
    one, other = step_error(less), step_error(more)
    if one is None or other is None:
        return shorter(less, more, least=least)
    bound = SAME_TEXT * critical() * math.hypot(one, other)
    return high - low > max(bound, least * (high - 1))


def loss_error(less: Length, more: Length, *, same: bool) -> float | None:
    """Half of the 95% interval of what is lost between the two; `same`: over the same text."""
    wider, one, other = SAME_TEXT, step_error(less), step_error(more)
    if not same or one is None or other is None:
        wider, one, other = 1.0, length_error(less), length_error(more)
    return None if one is None or other is None else wider * USUAL * math.hypot(one, other)


def lost(less: Length | None, more: Length | None) -> float | None:
    """Share of the accepted drafts that is lost between the two; negative where there are more."""
    low, high = length(less), length(more)
    if low is None or high is None or high <= 1:
        return None
    return (high - low) / (high - 1)


def first_rate(found: Length | None) -> Proportion | None:
    """How often the first draft is accepted."""
    if found is None or not found.counts.per_position or found.counts.drafts <= 0:
        return None
    return Proportion(hits=found.counts.per_position[0], of=found.counts.drafts)


def second_rate(found: Length | None) -> Proportion | None:
    """How often the second draft is accepted where the first one was."""
    positions = () if found is None else found.counts.per_position or ()
    return Proportion(hits=positions[1], of=positions[0]) if len(positions) > 1 else None


def percent(share: float | None) -> str:
    """A share for a sentence: 15%, 0.4%, 99.6%."""
    share = finite(share)
    if share is None:
        return "an unknown share"
    told = 100 * share
    close = 0 < told < 1 or 99 < told < 100
    return f"{told:.1f}%" if close else f"{told:.0f}%"


def counted(share: Proportion | None) -> str:
    """A share with what it was counted from: 96% of 1,204."""
    return "none" if share is None or share.of <= 0 else f"{percent(rate(share))} of {share.of:,d}"


def number(value: float | None, decimals: int = 2) -> str:
    """A number for a sentence."""
    value = finite(value)
    return "unknown" if value is None else f"{value:.{decimals}f}"


def span(found: Length | None) -> str:
    """A length with its interval: 2.18 (2.05 to 2.31); by its counts if none is told."""
    value = length(found)
    if found is None or value is None:
        return "unknown"
    low, high = finite(found.low), finite(found.high)
    error = length_error(found)
    if (low is None or high is None) and error is not None:
        low, high = max(1.0, value - USUAL * error), value + USUAL * error
    told = number(value)
    return told if low is None or high is None else f"{told} ({number(low)} to {number(high)})"
