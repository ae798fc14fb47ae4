"""The rules over simulated histories: on which nights each would have cried.

Values are log values, lower is worse, as `simulated` draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import msgspec
import numpy as np
from scipy.special import stdtr

from harness.analyse.series import edivisive
from harness.analyse.series.confirm import confirm
from harness.analyse.series.detect import Scale, decide, told
from harness.analyse.series.records import Change, Config, Decision
from harness.analyse.series.robust import median
from harness.analyse.series.simulated import Histories
from harness.analyse.series.templates import Bools, Floats, Ints
from harness.analyse.series.watch import Scan, Watch

LOG = Scale(sign=1.0, unit=None)
PUBLIC_BAND, PUBLIC_NIGHTS = 0.20, 14
YESTERDAY = 0.05


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """[series, nights]: the nights that a rule cried on; `again`: nights that were measured again.

    `blocks`: fresh blocks that this took, of both versions together.
    """

    alarms: Bools
    again: Bools
    blocks: Ints


class Watched:
    """The watch over histories, with fresh blocks and a good version (`beside`) or without."""

    def __init__(
        self: Self,
        drawn: Histories,
        rng: np.random.Generator,
        config: Config,
        *,
        beside: bool = True,
    ) -> None:
        self.drawn, self.rng, self.config, self.beside = drawn, rng, config, beside
        self.alarms = np.zeros(drawn.night.shape, dtype=bool)
        self.again = np.zeros(drawn.night.shape, dtype=bool)
        self.blocks = np.zeros(drawn.night.shape, dtype=np.int64)

    def run(self: Self) -> Outcome:
        """Every night of all series, one after the other."""
        watch = Watch(self.drawn.values, self.drawn.errors, self.config)
        for night in range(self.config.learn, self.drawn.night.shape[1]):
            scan = watch.scan(night)
            spoken = scan.is_suspect(self.config) | scan.is_certain(self.config)
            for row in np.flatnonzero(spoken):
                self._judge(watch, int(row), scan)
        return Outcome(alarms=self.alarms, again=self.again, blocks=self.blocks)

    def _judge(self: Self, watch: Watch, row: int, scan: Scan) -> None:
        template, change = told(watch, scan, row, LOG)
        assert change is not None
        decision = self._decided(row, change) if change.direction == "worse" else None
        self.alarms[row, scan.night] = decision == "confirmed"
        decide(watch, row, scan, template, decision, certain=change.certain)

    def _decided(self: Self, row: int, change: Change) -> Decision | None:
        """Fresh blocks, look by look, until they decide or no more help."""
        drawn, rng, at = self.drawn, self.rng, (row, change.found)
        good = (change.good, drawn.own_of_another(rng))
        self.again[at] = True
        fresh, other = np.zeros(0), np.zeros(0)
        more = self.config.blocks
        while more:
            fresh = np.concatenate([fresh, drawn.again(rng, at, more)])
            if self.beside:
                other = np.concatenate([other, drawn.good(rng, at, more, good)])
            said = confirm(
                change,
                np.exp(fresh).tolist(),
                reference=np.exp(other).tolist() if self.beside else None,
                config=self.config,
            )
            more = said.more
        self.blocks[at] = len(fresh) + len(other)
        return None if said.verdict == "undecided" else said.verdict


def watched(drawn: Histories, rng: np.random.Generator, config: Config) -> Outcome:
    """Detection, then fresh blocks beside a good version."""
    return Watched(drawn, rng, config).run()


def watched_alone(drawn: Histories, rng: np.random.Generator, config: Config) -> Outcome:
    """Detection, then fresh blocks of the suspect only."""
    return Watched(drawn, rng, config, beside=False).run()


def unconfirmed(drawn: Histories, rng: np.random.Generator, config: Config) -> Outcome:
    """Every suspicion taken for an alarm at once, and for a new level."""
    watch = Watch(drawn.values, drawn.errors, config)
    alarms = np.zeros(drawn.night.shape, dtype=bool)
    for night in range(config.learn, drawn.night.shape[1]):
        scan = watch.scan(night)
        alarms[:, night] = suspect = scan.is_suspect(config)
        for row in np.flatnonzero(suspect | scan.is_certain(config)):
            template, _ = told(watch, scan, int(row), LOG)
            decide(watch, int(row), scan, template, None, certain=True)
    return _plain(alarms)


def public_band(drawn: Histories, rng: np.random.Generator, config: Config) -> Outcome:
    """More than 20% below the median of the last nights."""
    values = drawn.values
    alarms = np.zeros(values.shape, dtype=bool)
    for night in range(config.learn, values.shape[1]):
        middle = median(values[:, max(0, night - PUBLIC_NIGHTS) : night])
        alarms[:, night] = values[:, night] < middle + np.log1p(-PUBLIC_BAND)
    return _plain(alarms)


def against_yesterday(drawn: Histories, rng: np.random.Generator, config: Config) -> Outcome:
    """Student's t test of tonight's blocks against those of the last measured night, two-sided."""
    each = drawn.each
    alarms = np.zeros(drawn.night.shape, dtype=bool)
    n, last = drawn.model.blocks, np.asarray(each[:, 0])
    for night in range(1, each.shape[1]):
        tonight = each[:, night]
        change = tonight.mean(axis=1) - last.mean(axis=1)
        error = np.sqrt((tonight.var(axis=1, ddof=1) + last.var(axis=1, ddof=1)) / n)
        p = 2 * stdtr(2 * n - 2, -np.abs(change) / np.maximum(error, 1e-300))
        if night >= config.learn:
            alarms[:, night] = (p < YESTERDAY) & (change < 0)
        last = np.where(np.isfinite(tonight), tonight, last)
    return _plain(alarms)


def energy_split(drawn: Histories, rng: np.random.Generator, config: Config) -> Outcome:
    """E-divisive with a t-test, on every night anew."""
    return _plain(edivisive.alarms(drawn.values, config.learn))


def _plain(alarms: Bools) -> Outcome:
    none = np.zeros(alarms.shape, dtype=np.int64)
    return Outcome(alarms=alarms, again=none > 0, blocks=none)


Rule = Callable[[Histories, np.random.Generator, Config], Outcome]
RULES: dict[str, Rule] = {
    "watch, confirmed beside a good version": watched,
    "watch, confirmed without one": watched_alone,
    "watch, not confirmed": unconfirmed,
    "E-divisive and t-test (Hunter, Otava)": energy_split,
    "±20% of the median": public_band,
    "t-test against yesterday": against_yesterday,
}


def found_within(alarms: Bools, at: Floats, nights: int) -> Bools:
    """[series]: whether there is an alarm within `nights`, of which the first changed is one."""
    place = np.arange(alarms.shape[1])
    window = (place >= at[:, None]) & (place < at[:, None] + nights)
    return np.asarray((alarms & window).any(axis=1))
