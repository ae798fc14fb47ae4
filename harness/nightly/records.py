"""What a night leaves behind: `night.json`, its points, its findings, and the pinned baselines.

Series are named `entry/engine/variant/load/metric`. Times are UTC in ISO text, durations seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from harness.history.records import Point
from harness.records import Record

NIGHT_SCHEMA = "1.0"

Status = Literal["pending", "running", "done", "void", "failed", "cut_short", "left_out"]
"""`failed`: the run gave no summary. `cut_short`: the time budget ended it."""
ENDED: tuple[Status, ...] = ("done", "void", "failed", "cut_short", "left_out")


GateStatus = Literal["pass", "fail", "refuted", "unconfirmed", "known", "unknown", "no_baseline"]
FindingStatus = Literal["confirmed", "refuted", "unconfirmed", "machine", "known"]


class Attempt(Record, frozen=True, kw_only=True):
    """One run of `python -m harness run`. `run`: its folder below the results root, if it made one.

    `begun`: with `arguments` it tells the folder of a run that was killed. `exit_code` None: it
    has not ended, or nobody saw it end. `error`: its last line of complaint.
    """

    begun: str
    arguments: tuple[str, ...] = ()
    run: str | None = None
    exit_code: int | None = None
    seconds: float = 0.0
    error: str | None = None


class EntryState(Record, frozen=True, kw_only=True):
    """How far an entry is. `why`: why it stands where it does in the order, or was left out.

    `expected_s`: how long it was expected to take; None: not known. `fresh`: the runs that its
    suspects were measured again by; `control`: those of a version that was good, in turn with them.
    """

    name: str
    digest: str
    status: Status = "pending"
    why: str = ""
    expected_s: float | None = None
    attempt: Attempt | None = None
    fresh: tuple[Attempt, ...] = ()
    control: tuple[Attempt, ...] = ()


class GateResult(Record, frozen=True, kw_only=True):
    """One gate against one series. `bound`: the limit in the metric's unit, `told` in words.

    `unknown`: the figure is missing; `no_baseline`: what it is relative to.
    """

    series: str
    entry: str
    rule: str
    value: float | None
    bound: float | None
    status: GateStatus
    text: str


class Finding(Record, frozen=True, kw_only=True):
    """A change that a series shows, or a difference to the pinned baseline.

    `ratio` of after by before, its interval `low` and `high`. `first_bad`, `last_good`: nights.
    `unconfirmed`: fresh blocks could not decide it, or there was no time for them. `machine`: a
    good version lost as much on the same night. `found`: the night on which it was told first.
    `changed`: what differs in the environment between the last good and the first bad run, each in
    words.
    """

    series: str
    entry: str
    source: Literal["series", "baseline"]
    kind: Literal["step", "drift", "difference"]
    direction: Literal["worse", "better"]
    status: FindingStatus
    before: float | None
    after: float | None
    ratio: float | None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    first_bad: str | None = None
    found: str | None = None
    last_good: str | None = None
    reason: str | None = None
    changed: tuple[str, ...] = ()
    text: str = ""


class Night(Record, frozen=True, kw_only=True):
    """`night.json`: what was planned, what is done, and what was found.

    `spent_s` counts every session that worked at the night. `order`: the entries in the order in
    which they are run. `exit_code` None: the night has not been judged yet.
    """

    schema_version: str
    suite: str
    night: str
    begun: str
    ended: str | None = None
    budget_s: float | None = None
    spent_s: float = 0.0
    entries: tuple[EntryState, ...] = ()
    gates: tuple[GateResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    exit_code: int | None = None


class EntryPoints(Record, frozen=True, kw_only=True):
    """An entry's figures of one night, kept whatever becomes of the run's folder.

    `points` of the night's run. `fresh`: by series, one value for each fresh block (one start of
    the engine) that a suspect was measured by; `control`: the same of a version that was good.
    """

    entry: str
    digest: str
    night: str
    run: str
    points: tuple[Point, ...]
    fresh: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    control: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)


class Baseline(Record, frozen=True, kw_only=True):
    """What an entry is held to: one night's run, pinned. `run` below the results root."""

    suite: str
    entry: str
    digest: str
    night: str
    run: str
    pinned: str
    reason: str
    points: tuple[Point, ...]


class Probe(Record, frozen=True, kw_only=True):
    """One candidate of a bisection: its blocks, those of the good end beside it, and its label.

    `skip`: it could not be made, measured or decided.
    """

    name: str
    label: Literal["good", "bad", "skip"] | None = None
    why: str = ""
    blocks: tuple[float, ...] = ()
    beside: tuple[float, ...] = ()


class Hunt(Record, frozen=True, kw_only=True):
    """`bisect.json`: a search for the first bad one of `names`, the oldest first."""

    schema_version: str
    suite: str
    entry: str
    series: str
    names: tuple[str, ...]
    begun: str
    better: Literal["higher", "lower"] | None = None
    probes: dict[str, Probe] = msgspec.field(default_factory=dict)
    ended: str | None = None
    text: str = ""
    exit_code: int | None = None
