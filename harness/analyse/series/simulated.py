"""Histories whose truth is known: nightly series with the noise that real machines show.

All on the log scale, lower is worse. The value of series s on night t is

    level + weekday + drift + slow + night + own + wild + within + change

`within` is chance within the run, the mean of the run's blocks: other blocks draw it anew. All
else but `own` and the run's own wild nights belongs to the night: any version that is measured on
it has the same. `own` is what one version has on one night and keeps when it is measured again,
but another version has not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np

from harness.analyse.series.templates import Bools, Floats

SERIES, NIGHTS = 200, 120
EARLIEST, LATEST = 40, 85
"""A change begins on a night between these two."""
MONTH = 30
"""Nights that a slow change takes."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """How nights differ.

    `noise`: deviation of a night from all that is not weekday, drift or wild, relative: the
    coefficient of variation. Of its square `within` is chance within the run, `own` the version's
    on that night, and the rest the night's: a share up to `slow` of that follows an AR(1) process
    with a correlation up to `correlation`, each series its own share and correlation.
    In units of `noise`: `weekday` is the deviation of weekdays, `drift` that of the machine's
    straight drift over all nights. `wild`: share of nights that are 3 to 8 deviations worse; half
    of these are the run's, half the night's. `missing`: share of nights without a value.
    """

    noise: float
    within: float = 0.40
    own: float = 0.05
    slow: float = 1.0
    correlation: float = 0.8
    weekday: float = 0.5
    drift: float = 1.0
    wild: float = 0.02
    missing: float = 0.02
    blocks: int = 3

    @property
    def block(self: Self) -> float:
        """Deviation of one block from the others of its run."""
        return self.noise * math.sqrt(self.within * self.blocks)


class Histories(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated series. [series, nights] but where said.

    `night`: what any version has on that night; `own`: what tonight's has besides; `change`: the
    true change of the version; `blocks`: [series, nights, blocks], chance of each block of the
    nightly run, its wild part in it; `known`: whether there is a value; `at`: [series], the first
    changed night, NIGHTS where there is none.
    """

    model: Model
    night: Floats
    own: Floats
    change: Floats
    blocks: Floats
    known: Bools
    at: Floats

    @property
    def each(self: Self) -> Floats:
        """[series, nights, blocks]: log value of each block; NaN where missing."""
        together = (self.night + self.own + self.change)[:, :, None] + self.blocks
        return np.where(self.known[:, :, None], together, np.nan)

    @property
    def values(self: Self) -> Floats:
        """[series, nights]: log value of the night."""
        return np.asarray(self.each.mean(axis=2))

    @property
    def errors(self: Self) -> Floats:
        """[series, nights]: standard error by the night's own blocks."""
        return np.asarray(self.each.std(axis=2, ddof=1) / math.sqrt(self.model.blocks))

    def again(self: Self, rng: np.random.Generator, at: tuple[int, int], n: int) -> Floats:
        """[n]: log values of fresh blocks of the version of night `at` = (series, night)."""
        return self.night[at] + self.own[at] + self.change[at] + self._chance(rng, n)

    def good(
        self: Self, rng: np.random.Generator, at: tuple[int, int], n: int, of: tuple[int, float]
    ) -> Floats:
        """[n]: the same night, but the version of night `of[0]`, which has `of[1]` of its own."""
        return self.night[at] + of[1] + self.change[at[0], of[0]] + self._chance(rng, n)

    def own_of_another(self: Self, rng: np.random.Generator) -> float:
        """What another version has of its own on a night."""
        return self.model.noise * math.sqrt(self.model.own) * float(rng.standard_normal())

    def _chance(self: Self, rng: np.random.Generator, n: int) -> Floats:
        wild = (rng.random(n) < self.model.wild / 2) * rng.uniform(3, 8, n)
        return self.model.block * (rng.standard_normal(n) - wild)


def histories(
    rng: np.random.Generator,
    model: Model,
    *,
    series: int = SERIES,
    drop: float = 0.0,
    nights: int = 1,
) -> Histories:
    """`series` histories of NIGHTS nights with a loss of `drop` that takes `nights` to come."""
    shape = (series, NIGHTS)
    wild = model.noise * (rng.random(shape) < model.wild) * rng.uniform(3, 8, shape)
    of_night = rng.random(shape) < 0.5
    weekdays = model.weekday * rng.standard_normal((series, 7))
    weekdays -= weekdays.mean(axis=1, keepdims=True)
    drift = model.drift * rng.standard_normal((series, 1)) * np.linspace(-0.5, 0.5, NIGHTS)
    shared = math.sqrt(1 - model.within - model.own) * _slow(rng, model, shape)
    night = model.noise * (shared + drift + weekdays[:, np.arange(NIGHTS) % 7])
    at = rng.integers(EARLIEST, LATEST + 1, (series, 1))
    since = np.arange(NIGHTS) - at + 1
    change = math.log1p(-drop) * np.clip(since / nights, 0, 1)
    chance = model.block * rng.standard_normal((*shape, model.blocks))
    return Histories(
        model=model,
        night=night - np.where(of_night, wild, 0.0),
        own=model.noise * math.sqrt(model.own) * rng.standard_normal(shape),
        change=change,
        blocks=chance - np.where(of_night, 0.0, wild)[:, :, None],
        known=rng.random(shape) >= model.missing,
        at=np.where(drop == 0, NIGHTS, at[:, 0]).astype(float),
    )


def together(every: Sequence[Histories]) -> Histories:
    """Several histories of one model as one of all their series."""
    parts = ("night", "own", "change", "blocks", "known", "at")
    joined = {name: np.concatenate([getattr(h, name) for h in every]) for name in parts}
    return Histories(model=every[0].model, **joined)


def _slow(rng: np.random.Generator, model: Model, shape: tuple[int, int]) -> Floats:
    """[series, nights] of deviation 1: an AR(1) process and what each night has alone."""
    share = model.slow * rng.random((shape[0], 1))
    near = model.correlation * rng.random(shape[0])
    slow = rng.standard_normal(shape)
    for t in range(1, shape[1]):
        slow[:, t] = near * slow[:, t - 1] + np.sqrt(1 - near**2) * slow[:, t]
    return np.sqrt(share) * slow + np.sqrt(1 - share) * rng.standard_normal(shape)
