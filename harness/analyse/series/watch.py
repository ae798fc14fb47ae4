"""Many series watched night by night: the likeliest change on each night, and levels that follow.

Series are on a scale where lower is worse and a difference is relative (`detect` puts them there).
One series or two hundred: the same code, so that what is simulated is what is used.
"""

from __future__ import annotations

import math
from typing import Self

import msgspec
import numpy as np
from scipy.special import stdtr, stdtrit

from harness.analyse.series.records import Config, Direction
from harness.analyse.series.robust import Noise, huber, median, noise_of
from harness.analyse.series.templates import (
    BANK,
    Bools,
    Floats,
    Ints,
    Template,
    level_spread,
    spread,
)

FAR = 3.5
"""No night weighs more than so many deviations: what is surer has to last."""
FEWEST, FEWEST_AGAIN = 7, 3
"""Nights that a level needs: at first, and after a change, when noise and weekdays are known."""
BADLY = 2.5
"""Standard errors from a few blocks scatter: one counts as large from so many times the usual."""
GUARDS = (5, 14, 42)
"""Noise is taken from nights before the change: so many nights back, as the template needs."""
SETTLED = 7
"""Nights at the end of a drift that its new level is taken from."""


class Contrasts(msgspec.Struct, frozen=True, kw_only=True):
    """[series] each: one template's nights against the level before. NaN where it cannot be told.

    `z`: in standard errors; `loss`: the change on the last night, negative is worse; `error`: its
    standard error; `nights`: how many of it are known.
    """

    z: Floats
    loss: Floats
    error: Floats
    level: Floats
    level_error: Floats
    nights: Floats


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """One night of all series: `best` is the place in BANK of the likeliest change; [series] each.

    `p`: two-sided, corrected for the bank; 1 where nothing can be told.
    """

    night: int
    noise: Noise
    best: Ints
    p: Floats
    found: Contrasts

    def is_suspect(self, config: Config) -> Bools:
        """A loss that is worth fresh blocks."""
        return np.asarray((self.p < config.suspect) & (self.found.loss < 0))

    def is_certain(self, config: Config) -> Bools:
        """A change, to either side, that stands without fresh blocks."""
        return np.asarray((self.p < config.certain) & (self.found.nights >= 3))


class Watch:
    """The state of the watch: where each level began, and since when nights count as evidence.

    `values`: [series, nights], NaN where missing; `errors`: standard errors of the nights by what
    is known of their own blocks, or None. Nights before a change are moved onto the new level, so
    that noise and weekdays need not be learnt again.
    """

    def __init__(self: Self, values: Floats, errors: Floats | None, config: Config) -> None:
        self.values = np.array(values, dtype=float)
        self.errors = errors
        self.config = config
        self.start = np.zeros(len(values), dtype=np.int64)
        self.floor = np.zeros(len(values), dtype=np.int64)
        self.phase = np.arange(values.shape[1], dtype=np.int64) % max(config.period, 1)

    def scan(self: Self, night: int) -> Scan:
        """The likeliest change by what is known on this night, `Config.learn` or a later one."""
        noises = {guard: self.noise(night - guard) for guard in GUARDS}
        every = [self.contrast(t, night, noises[guard_of(t)]) for t in BANK]
        size = np.abs(np.stack([c.z for c in every]))
        small = np.abs(np.stack([c.loss for c in every])) < math.log1p(self.config.least)
        size = np.where(np.isfinite(size) & ~small, size, -1.0)
        best = size.argmax(axis=0)
        z = np.take_along_axis(size, best[None], axis=0)[0]
        noise = _chosen(noises, best)
        p = np.where(z < 0, 1.0, 2 * len(BANK) * stdtr(noise.degrees, -np.abs(z)))
        return Scan(
            night=night,
            noise=noise,
            best=best,
            p=np.minimum(p, 1.0),
            found=_pick(every, best),
        )

    def noise(self: Self, night: int) -> Noise:
        """Noise, memory and weekdays by the nights before; by the first, if these are too few."""
        night = max(night, min(self.config.learn, self.values.shape[1]))
        low = max(0, night - self.config.reference)
        return noise_of(
            self.values[:, low:night],
            self.phase[low:night],
            self.config.period,
            self._least(low, night),
        )

    def contrast(self: Self, template: Template, night: int, noise: Noise) -> Contrasts:
        """What one template says on a night."""
        since = night - template.nights + 1
        low = max(0, since - self.config.reference)
        if since < 1:
            return _nothing(len(self.values))
        days = noise.weekday[:, self.phase[low : night + 1]]
        level_values = self.values[:, low : night + 1] - days
        before, after = level_values[:, : since - low], level_values[:, since - low :]
        before = np.where(np.arange(low, since) >= self.start[:, None], before, np.nan)
        count = np.isfinite(before).sum(axis=1).astype(float)
        level = huber(before, noise.sigma)
        level_variance = level_spread(count, noise.rho)
        off = (after - level[:, None]) * self._trust(since, night, noise.sigma)
        cut = FAR * noise.sigma[:, None]
        off = np.clip(off, -cut, cut)
        known = np.isfinite(off)
        weights = np.where(known, template.weights, 0.0)
        total = weights.sum(axis=1)
        variance = spread(weights, noise.rho) + total**2 * level_variance
        error = noise.sigma * np.sqrt(variance)
        loss = _loss(template, after - level[:, None], off, weights)
        square = (weights**2).sum(axis=1)
        usable = known[:, -1] & (2 * known.sum(axis=1) >= template.nights)
        usable &= (since >= self.floor) | (night >= self.floor + self.config.quiet)
        usable &= since >= self.start
        usable &= count >= np.where(self.start > 0, FEWEST_AGAIN, FEWEST)
        z = (weights * np.where(known, off, 0.0)).sum(axis=1) / np.maximum(error, 1e-300)
        return Contrasts(
            z=np.where(usable, z, np.nan),
            loss=np.where(usable, loss, np.nan),
            error=error / np.maximum(square, 1e-300) * _median_wider(template),
            level=level,
            level_error=noise.sigma * np.sqrt(level_variance),
            nights=known.sum(axis=1).astype(float),
        )

    def shape(self: Self, scan: Scan, row: int) -> Template:
        """The likeliest template of one series, a step's beginning searched for night by night."""
        template = BANK[int(scan.best[row])]
        if template.kind == "drift" or template.nights < 5:
            return template
        steps = [t.nights for t in BANK if t.kind == "step"]
        at = steps.index(template.nights)
        most = steps[at + 1] if at + 1 < len(steps) else template.nights + SETTLED
        one, noise = self.only(row), _row(scan.noise, row)
        tried = [Template(kind="step", nights=n) for n in range(steps[at - 1] + 1, most)]
        sizes = [abs(float(one.contrast(t, scan.night, noise).z[0])) for t in tried]
        return tried[int(np.nanargmax(sizes))]

    def only(self: Self, row: int) -> Watch:
        """The watch of one of the series."""
        errors = None if self.errors is None else self.errors[row : row + 1]
        one = Watch(self.values[row : row + 1], errors, self.config)
        one.start, one.floor = self.start[row : row + 1], self.floor[row : row + 1]
        return one

    def follow(self: Self, row: int, night: int, template: Template, loss: float) -> None:
        """A new level counts: of the nights since the change, or a drift's last."""
        at = night - template.nights + 1
        self.values[row, :at] += loss
        if template.kind == "drift":
            self.values[row, at : night + 1] += loss * (1 - template.weights)
            at = max(at, night - SETTLED + 1)
        self.start[row] = self.floor[row] = at

    def dismiss(self: Self, row: int, night: int) -> None:
        """Nothing up to this night counts as evidence for the next `Config.quiet` nights."""
        self.floor[row] = night + 1

    def quantile(self: Self, noise: Noise, row: int) -> float:
        """Half the width of an interval at the configured confidence, in standard errors."""
        return float(stdtrit(noise.degrees[row], 0.5 + self.config.confidence / 2))

    def _least(self: Self, low: int, night: int) -> Floats:
        least = np.full(len(self.values), self.config.floor)
        if self.errors is None:
            return least
        typical = median(self.errors[:, low:night])
        return np.fmax(least, typical)

    def _trust(self: Self, since: int, night: int, sigma: Floats) -> Floats:
        """[series, nights]: 1, less for a night that was measured less well than is usual."""
        if self.errors is None:
            return np.ones((1, 1))
        typical = median(self.errors[:, max(0, night - self.config.reference) : night])[:, None]
        own = self.errors[:, since : night + 1]
        limit = BADLY * typical
        more = np.where(own > limit, own**2 - limit**2, 0.0)
        return np.asarray(sigma[:, None] / np.sqrt(sigma[:, None] ** 2 + more))


def guard_of(template: Template) -> int:
    """How far back the noise for a template is taken from."""
    return next(guard for guard in GUARDS if template.nights <= guard)


def direction_of(loss: float) -> Direction:
    """Lower is worse on the scale of a watch."""
    return "worse" if loss < 0 else "better"


def _loss(template: Template, raw: Floats, off: Floats, weights: Floats) -> Floats:
    """[series]: the change on the last night: the median of a step, a line through a drift."""
    if template.kind == "step":
        return median(raw)
    square = np.maximum((weights**2).sum(axis=1), 1e-300)
    return np.asarray((weights * np.where(np.isfinite(off), off, 0.0)).sum(axis=1) / square)


def _median_wider(template: Template) -> float:
    """How much less sure a median is than the mean, of normal values."""
    return math.sqrt(math.pi / 2) if template.kind == "step" and template.nights >= 3 else 1.0


def _pick(every: list[Contrasts], best: Ints) -> Contrasts:
    def one(name: str) -> Floats:
        stacked = np.stack([getattr(c, name) for c in every])
        return np.asarray(np.take_along_axis(stacked, best[None], axis=0)[0])

    return Contrasts(**{name: one(name) for name in Contrasts.__struct_fields__})


def _chosen(noises: dict[int, Noise], best: Ints) -> Noise:
    """For each series the noise that its likeliest template was judged by."""
    of = np.array([GUARDS.index(guard_of(t)) for t in BANK])[best]
    rows = np.arange(len(best))

    def one(name: str) -> Floats:
        return np.asarray(np.stack([getattr(noises[g], name) for g in GUARDS])[of, rows])

    return Noise(**{name: one(name) for name in Noise.__struct_fields__})


def _nothing(series: int) -> Contrasts:
    nan = np.full(series, np.nan)
    return Contrasts(
        z=nan, loss=nan, error=nan, level=nan, level_error=nan, nights=np.zeros(series)
    )


def _row(noise: Noise, row: int) -> Noise:
    return Noise(**{name: getattr(noise, name)[row : row + 1] for name in Noise.__struct_fields__})
