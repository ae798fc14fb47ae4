"""What is asked of a series of nights, and what is found in it."""

from __future__ import annotations

from typing import Literal

import msgspec

from harness.findings import Interval

Kind = Literal["step", "drift"]
Direction = Literal["worse", "better"]
Answer = Literal["confirmed", "refuted", "machine", "undecided"]
Decision = Literal["confirmed", "accepted", "refuted", "machine"]
"""What became of a suspicion.

`confirmed`: fresh blocks showed it, or a person did; `accepted`: it is known and wanted or lived
with; both begin a new level. `refuted`: fresh blocks did not show it. `machine`: the last good
version lost as much on the same night.
"""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """How a series is watched. Nights are places in the series: one for each calendar night.

    `suspect`: a night whose p-value is below is a suspect, worth fresh blocks. It is corrected for
    13 shapes that much resemble each other, so that 0.3 speaks on about 1 night in 50 of normal
    values. `certain`: a change whose p-value is below stands without fresh blocks, given three
    nights of it. `least`: the smallest relative change worth a word. `confidence` of the intervals
    told. `period`: nights in a week, 0 for none. `learn`: nights before the first judgement.
    `reference`: nights, at most, that a level, the noise and the weekdays are taken from. `floor`:
    noise is never taken for less, relative to the level. `quiet`: nights for which what was refuted
    is no evidence. `alpha`: chance that fresh blocks confirm what is not there, all `looks` at them
    together; `beta`: chance that they refute what is there; `blocks`: fresh blocks of each version
    before each look.
    """

    suspect: float = 0.3
    certain: float = 1e-4
    least: float = 0.01
    confidence: float = 0.95
    period: int = 7
    learn: int = 14
    reference: int = 63
    floor: float = 5e-4
    quiet: int = 7
    alpha: float = 0.005
    beta: float = 0.1
    looks: int = 3
    blocks: int = 4


DEFAULT = Config()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A series left its level. Indices count nights of the series from 0.

    `at`: the first night of it, as far as can be told; `found`: the night it could first be told
    on; `good`: an earlier night that is surely before it, whose version fresh blocks are set
    against. `before`, `after`:
    levels in the metric's unit, weekdays taken out; of a drift, `after` is where it had come to on
    `found`. `effect`: after over before, less 1 is the relative change; None where the level is
    not positive, as `difference` (after less before) never is. `noise`: deviation of a night,
    relative to the level (in the metric's unit where `effect` is None). `p_value`: two-sided, that
    one night of an unchanged series shows as much, corrected for all the spans and shapes looked
    at, not for the number of nights. `certain`: below `Config.certain` over three nights or more,
    or decided; else a suspicion of the last night.
    """

    at: int
    found: int
    good: int
    kind: Kind
    direction: Direction
    before: Interval
    after: Interval
    difference: float
    effect: Interval | None
    noise: float
    p_value: float
    certain: bool


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """What fresh blocks say of a suspicion.

    `verdict`: `confirmed`: it is the version's, an alarm; `refuted`: it was chance; `machine`: the
    last good version lost as much tonight; `undecided`: more blocks are needed, or another night.
    `effect`: suspect over last good version (over the level before, without one); `machine`: last
    good version tonight over its level before, None without one. `why`: one sentence. `more`:
    further blocks of each that are worth running now, 0 when no more will help tonight.
    """

    verdict: Answer
    effect: Interval
    machine: Interval | None
    why: str
    more: int


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """A value against its baseline: `change` in the gate's own terms, None without a value.

    `change`: relative (value over baseline, less 1) or in the metric's unit (`absolute`); positive
    is more of the metric. `limit`: the change at which it fails, with its sign.
    """

    verdict: Literal["pass", "fail", "undecided"]
    change: Interval | None
    limit: float
    absolute: bool
    why: str
