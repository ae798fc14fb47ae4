"""Whether what was looked at could have shown a cause: where it could not, silence says nothing.

Every rule that speaks against a cause because nothing of it was seen asks here first. There is
power where the whole interval lies on this side of the least that would matter: `LEAST` of the
accepted drafts for what costs acceptance, a stated share for what shows in calls or rows. Where
there is none the cause is told with a point of no weight: it stays possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.diagnose.records import Length, Point, Proportion, ReadingFit
from harness.diagnose.rules.measures import (
    FEWEST,
    bare,
    critical,
    finite,
    length,
    length_error,
    step_error,
    surely_above,
)
from harness.diagnose.rules.weights import point

LEAST = 0.05
"""What costs a smaller share of the accepted drafts does not matter."""
CANNOT_TELL = "that cannot tell"


def against(
    causes: Iterable[str], weight: float, says: str, experiment: str, *, able: bool
) -> list[Point]:
    """Points against causes of which nothing was seen; of no weight where nothing could be."""
    if able:
        return [point(cause, -weight, says, experiment) for cause in causes]
    return [point(cause, 0.0, f"{says}: {CANNOT_TELL}", experiment) for cause in causes]


def no_gain(fit: ReadingFit, own: Length | None, least: float) -> bool:
    """Whether a reading surely gains less than `least` tokens a step over the checkpoint's own."""
    most = _most_gained(fit, own)
    return most is not None and most < least


def _most_gained(fit: ReadingFit, own: Length | None) -> float | None:
    """The upper end of the gain's interval: paired by prompt, else of two walks."""
    gain, low, high = finite(fit.gain), finite(fit.gain_low), finite(fit.gain_high)
    if gain is None or low is None:
        return most_lost(own, fit.acceptance)
    return max(gain, 2 * gain - low if high is None else high)


def most_lost(less: Length | None, more: Length | None) -> float | None:
    """By how many tokens a step one may be shorter than the other: the interval's upper end."""
    low, high = length(less), length(more)
    if less is None or more is None or low is None or high is None:
        return None
    one, other = length_error(less), length_error(more)
    if one is None or other is None:
        return None
    return high - low + critical(1) * math.hypot(one, other)


def not_shorter(less: Length | None, more: Length | None, least: float) -> bool:
    """Whether surely less than the share `least` of the accepted drafts is lost between the two."""
    most, whole = most_lost(less, more), length(more)
    return most is not None and whole is not None and most < least * (whole - 1)


def not_shorter_on_same(less: Length | None, exact: float | None, least: float) -> bool:
    """`not_shorter` than a figure of the very same steps, whose own chance alone counts."""
    seen = length(less)
    if less is None or seen is None or exact is None:
        return False
    error = step_error(less) or length_error(less)
    return error is not None and exact - seen + critical(1) * error < least * (exact - 1)


def mostly(counted: Proportion | None, share: float) -> bool:
    """Whether surely more than this share was as it should be, by the counts alone."""
    return surely_above(bare(counted), share, looks=1)


def rarely(counted: Proportion | None, share: float, *, fewest: int = FEWEST) -> bool:
    """Whether surely less than this share was, by the counts alone."""
    other = Proportion(hits=counted.of - counted.hits, of=counted.of) if counted else None
    return surely_above(other, 1 - share, looks=1, fewest=fewest)
