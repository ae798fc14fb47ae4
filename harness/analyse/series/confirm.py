"""Whether fresh blocks show what a series made suspect: the second stage before an alarm.

The night is still the same: what the machine, the weekday or the neighbours did to it, they do to
the fresh blocks too. So fresh blocks of the suspect alone can refute what was chance within the
run, not what the night did. Beside fresh blocks of a version that was good, measured in turn with
them, whatever the night does falls on both and cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from harness.analyse.series.records import DEFAULT, Answer, Change, Config, Confirmation
from harness.analyse.statistics import t_quantile
from harness.findings import Interval
from harness.measure.metrics import Better


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh blocks of one version: mean on the scale where lower is worse, its squared error."""

    mean: float
    variance: float
    n: int


class Ruler(msgspec.Struct, frozen=True, kw_only=True):
    """Logarithms where all is positive, else differences relative to the level before."""

    sign: float
    unit: float | None

    def of(self, value: float) -> float:
        """A value on the scale."""
        return self.sign * (math.log(value) if self.unit is None else value / self.unit)

    def ratio(self, difference: float, half: float) -> Interval:
        """A difference on the scale as a ratio, give or take `half`."""

        def one(place: float) -> float:
            return math.exp(self.sign * place) if self.unit is None else 1 + self.sign * place

        if not math.isfinite(half):
            return Interval(value=one(difference))
        ends = sorted((one(difference - half), one(difference + half)))
        return Interval(value=one(difference), ci_low=ends[0], ci_high=ends[1])


def confirm(
    change: Change,
    fresh: Sequence[float | None],
    *,
    reference: Sequence[float | None] | None = None,
    better: Better | None = "higher",
    config: Config = DEFAULT,
) -> Confirmation:
    """Decide a suspected loss by fresh blocks of tonight's version, and of a good one beside it.

    `fresh`, `reference`: the metric of each block (one start of the engine), in the metric's unit,
    measured in turn on the suspect night; all blocks so far, when called again after `more` of
    them. Confirmed: the loss is surely more than nothing, by Welch's interval (B. L. Welch,
    Biometrika 34, 1947) at `alpha` over `looks`, and at least `least`. At ten times `alpha` where
    the series is certain already. Refuted: it is surely less than half of what was suspected.
    """
    new, old = _known(fresh), _known(reference or ())
    enough = len(new) >= 2 and (reference is None or len(old) >= 2)
    if not enough:
        return _too_few(change, max(len(fresh), len(reference or ())), config)
    ruler = _ruler(change, [*new, *old], better)
    suspected = abs(ruler.of(change.after.value) - ruler.of(change.before.value))
    side = _side([ruler.of(v) for v in new])
    if reference is None:
        return _alone(change, side, ruler, suspected, config)
    return _beside(change, (side, _side([ruler.of(v) for v in old])), ruler, suspected, config)


def _beside(
    change: Change, sides: tuple[Side, Side], ruler: Ruler, suspected: float, config: Config
) -> Confirmation:
    """The version of tonight against the good one, on the same night."""
    new, good = sides
    loss, half = _welch(new, good, _level(change, config))
    _, less = _welch(new, good, config.beta / config.looks)
    effect = ruler.ratio(loss, half)
    level = ruler.of(change.before.value)
    night = math.hypot(_relative(change, ruler), math.sqrt(good.variance))
    wide = t_quantile(0.5 + config.confidence / 2, good.n - 1)
    machine = ruler.ratio(good.mean - level, wide * night)
    least = -math.log1p(-config.least)
    if loss + half < 0 and -loss >= least:
        why = f"tonight's version has {_percent(effect)} against a good one on the same night"
        return _said("confirmed", effect, machine, why)
    if loss - less > -max(least, suspected / 2):
        if good.mean - level <= -suspected / 2:
            why = f"the good version lost as much tonight ({_percent(machine)}): the machine"
            return _said("machine", effect, machine, why)
        why = f"beside a good version nothing like it is left ({_percent(effect)})"
        return _said("refuted", effect, machine, why)
    return _open(change, effect, machine, new.n, config)


def _alone(
    change: Change, new: Side, ruler: Ruler, suspected: float, config: Config
) -> Confirmation:
    """Without a good version: fresh blocks refute, only several nights confirm."""
    loss = new.mean - ruler.of(change.before.value)
    half, less = (
        t_quantile(1 - wrong / config.looks, new.n - 1) * math.sqrt(new.variance)
        for wrong in (config.alpha, config.beta)
    )
    effect = ruler.ratio(loss, half)
    least = -math.log1p(-config.least)
    if loss - less > -max(least, suspected / 2):
        why = f"measured again, nothing like it is left ({_percent(effect)})"
        return _said("refuted", effect, None, why)
    if loss + half < 0 and -loss >= least:
        nights = change.found - change.at + 1
        if change.p_value < config.certain and nights >= 2:
            why = f"{_percent(effect)} when measured again, and it has lasted {nights} nights"
            return _said("confirmed", effect, None, why)
        why = (
            f"{_percent(effect)} when measured again, but without a good version beside it a bad "
            "night cannot be told from a bad version: wait for another night"
        )
        return _said("undecided", effect, None, why)
    return _open(change, effect, None, new.n, config)


def _welch(new: Side, good: Side, alpha: float) -> tuple[float, float]:
    """The difference of two means, and half the width of its interval, `alpha` to each side."""
    variance = new.variance + good.variance
    if variance == 0:
        return new.mean - good.mean, 0.0
    degrees = variance**2 / (new.variance**2 / (new.n - 1) + good.variance**2 / (good.n - 1))
    return new.mean - good.mean, t_quantile(1 - alpha, degrees) * math.sqrt(variance)


def _level(change: Change, config: Config) -> float:
    """Chance of a wrong confirmation at each look (Bonferroni over the looks)."""
    return (10 if change.certain else 1) * config.alpha / config.looks


def _open(
    change: Change, effect: Interval, machine: Interval | None, n: int, config: Config
) -> Confirmation:
    more = config.blocks if n < config.looks * config.blocks else 0
    why = f"{n} fresh blocks do not decide it ({_percent(effect)})"
    return Confirmation(verdict="undecided", effect=effect, machine=machine, why=why, more=more)


def _too_few(change: Change, measured: int, config: Config) -> Confirmation:
    """`measured`: blocks with a value or without; where none ever has one, it ends all the same."""
    value = change.effect.value if change.effect else 1.0
    why = "fewer than two fresh blocks of a version have a value"
    effect = Interval(value=value)
    more = config.blocks if measured < config.looks * config.blocks else 0
    return Confirmation(verdict="undecided", effect=effect, machine=None, why=why, more=more)


def _said(verdict: Answer, effect: Interval, machine: Interval | None, why: str) -> Confirmation:
    return Confirmation(verdict=verdict, effect=effect, machine=machine, why=why, more=0)


def _ruler(change: Change, values: Sequence[float], better: Better | None) -> Ruler:
    sign = -1.0 if better == "lower" else 1.0
    if change.effect is not None and min(values) > 0:
        return Ruler(sign=sign, unit=None)
    return Ruler(sign=sign, unit=abs(change.before.value) or abs(change.difference) or 1.0)


def _relative(change: Change, ruler: Ruler) -> float:
    """A night's deviation on the ruler."""
    if change.effect is not None:
        return change.noise
    return change.noise / (ruler.unit or 1.0)


def _side(values: Sequence[float]) -> Side:
    n = len(values)
    mean = sum(values) / n
    return Side(mean=mean, variance=sum((v - mean) ** 2 for v in values) / (n - 1) / n, n=n)


def _known(values: Sequence[float | None]) -> list[float]:
    return [float(v) for v in values if v is not None and math.isfinite(v)]


def _percent(effect: Interval) -> str:
    told = f"{effect.value - 1:+.1%}"
    if effect.ci_low is None or effect.ci_high is None:
        return told
    return f"{told}, {effect.ci_low - 1:+.1%} to {effect.ci_high - 1:+.1%}"
