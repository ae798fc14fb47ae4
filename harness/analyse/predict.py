"""What speculation would gain at another number of draft tokens, from what was measured.

Tokens a step: a chain's first k' drafts are the same whatever comes behind them, so that for a
smaller k' the measured rates give the length as it is. For a larger one the last conditional rate
is taken to go on, between the bounds "nothing more is accepted" and "everything is".

A step's cost: a line in k, a fixed part and a part for each draft token. Several measured k fit
it. One k only bounds it: the fixed part is at least one baseline token, the other at least 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

import msgspec

from harness.analyse.data import by_repeat
from harness.analyse.statistics import geometric_interval
from harness.findings import Interval, Prediction

BEYOND = 2
"""So many draft tokens beyond the largest measured k are predicted as well."""
FEWEST_STARTS = 2
"""With as many or more the starts are the units of an interval, of one alone its blocks."""

Key = tuple[int, int]
"""Repeat and block."""


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of blocks: acceptance by position (unconditional), and a step's relative cost."""

    key: Key
    rates: tuple[float, ...]
    cost: float


class MeasuredK(msgspec.Struct, frozen=True, kw_only=True):
    """The units measured at one k, at one load."""

    k: int
    units: tuple[Unit, ...]


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """A figure between bounds; `value` None where the bounds are all that is known."""

    low: float
    value: float | None
    high: float


def estimate(values: Sequence[tuple[int, float]], *, confidence: float) -> Interval:
    """Geometric mean and interval of (repeat, value) pairs; starts are units where enough are."""
    return geometric_interval(units_of(values), confidence=confidence)


def units_of(values: Sequence[tuple[int, float]]) -> list[float]:
    """What counts as independent: a start's geometric mean, or of a single start each block."""
    starts = by_repeat(values, lambda value: value[0])
    if len(starts) < FEWEST_STARTS:
        return [v for _, v in values]
    return [geometric_mean(v for _, v in own) for own in starts]


def predictions(measured: Sequence[MeasuredK], *, confidence: float) -> tuple[Prediction, ...]:
    """For every k from 1 to a little beyond the largest; none where no block has all the k."""
    if not measured:
        return ()
    longest = max(m.k for m in measured)
    told = (predict(measured, k, confidence=confidence) for k in range(1, longest + BEYOND + 1))
    return tuple(p for p in told if p is not None)


def predict(measured: Sequence[MeasuredK], k: int, *, confidence: float) -> Prediction | None:
    """The decode phase's gain at `k`; None where nothing was measured, or not in the same blocks.

    Each block gives its own figure, so that the interval holds what differs from block to block.
    """
    by_k = {m.k: {u.key: u for u in m.units} for m in measured}
    keys = sorted(set.intersection(*(set(units) for units in by_k.values()))) if by_k else []
    if not keys:
        return None
    lengths, costs = [], []
    for key in keys:
        at = {m: units[key] for m, units in by_k.items()}
        lengths.append(length_at(_rates_for(at, k), k))
        costs.append(cost_at({m: unit.cost for m, unit in at.items()}, k))

    def over(values: Iterable[float]) -> Interval:
        pairs = list(zip((repeat for repeat, _ in keys), values, strict=True))
        return estimate(pairs, confidence=confidence)

    both = list(zip(lengths, costs, strict=True))
    low = over(length.low / cost.high for length, cost in both)
    high = over(length.high / cost.low for length, cost in both)
    values = [c.value for c in costs if c.value is not None]
    known = len(values) == len(costs)
    middle = [length.value or length.low for length in lengths]
    gains = [length / cost for length, cost in zip(middle, values, strict=False)]
    return Prediction(
        k=k,
        acceptance_length=geometric_mean(middle),
        relative_step_cost=geometric_mean(values) if known else None,
        speedup=over(gains).value if known else None,
        low=low.value if low.ci_low is None else low.ci_low,
        high=high.value if high.ci_high is None else high.ci_high,
        basis=basis_words(sorted(by_k), k),
    )


def _rates_for(at: dict[int, Unit], k: int) -> tuple[float, ...]:
    """Of the smallest measured k that reaches as far, else of the largest."""
    reaching = [m for m in at if m >= k]
    return at[min(reaching) if reaching else max(at)].rates


def length_at(rates: Sequence[float], k: int) -> Range:
    """Tokens a verify step of `k` drafts yields, from unconditional rates by position."""
    told = 1 + sum(rates[:k])
    more = k - len(rates)
    if more <= 0:
        return Range(low=told, value=told, high=told)
    last = rates[-1] if rates else 1.0
    before = rates[-2] if len(rates) > 1 else 1.0
    going_on = min(1.0, last / before) if before > 0 else 0.0
    expected = told + sum(last * going_on**i for i in range(1, more + 1))
    return Range(low=told, value=expected, high=told + last * more)


def cost_at(costs: dict[int, float], k: int) -> Range:
    """What a verify step of `k` drafts costs in baseline tokens, from costs by measured k."""
    if k in costs:
        return Range(low=costs[k], value=costs[k], high=costs[k])
    if len(costs) == 1:
        ((measured, cost),) = costs.items()
        ends = sorted((cost, max(1e-9, 1 + (cost - 1) * k / measured)))
        return Range(low=ends[0], value=None, high=ends[1])
    fixed, each = line(costs)
    found = max(1e-9, fixed + each * k)
    return Range(low=found, value=found, high=found)


def line(costs: dict[int, float]) -> tuple[float, float]:
    """Least squares: the fixed part, and the part of each draft token. Needs two k."""
    n = len(costs)
    mean_k, mean_c = sum(costs) / n, sum(costs.values()) / n
    spread = sum((k - mean_k) ** 2 for k in costs)
    each = sum((k - mean_k) * (c - mean_c) for k, c in costs.items()) / spread
    return mean_c - each * mean_k, each


def basis_words(ks: Sequence[int], k: int) -> str:
    """What a prediction stands on, in words."""
    if k in ks:
        return "measured"
    reaching = [m for m in ks if m >= k]
    if reaching:
        accepted = f"acceptance as at k = {min(reaching)}"
    else:
        accepted = f"acceptance beyond k = {max(ks)} as at its last position, between all and none"
    if len(ks) == 1:
        return f"{accepted}; step cost bounded from k = {ks[0]} alone"
    where = "" if min(ks) < k < max(ks) else " drawn on"
    return f"{accepted}; step cost by a line through k = {', '.join(map(str, ks))}{where}"
