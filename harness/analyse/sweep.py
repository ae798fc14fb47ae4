"""A sweep's answer: every setting's speed-up, and the best one where the intervals name one.

A setting is one choice of the values swept. Keys that change the drafting alone (`speculative.*`,
`drafter.*`) are what is chosen among; the others, and the load, are the conditions under which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import geometric_mean
from typing import Any

import msgspec

from harness.analyse.compare import PRIMARY
from harness.analyse.data import RunData
from harness.analyse.predict import FEWEST_STARTS, Key, estimate, predictions
from harness.analyse.speed import forced_length, measured_of
from harness.findings import Interval, Prediction, Summary
from harness.records import Axis, LoadPoint, Record, Setting, Variant

NO_DRAFTER = "no drafter"
"""The baseline among the settings to choose from."""
WITH_DRAFTER = "with the drafter"
"""The one setting where nothing of the drafting is swept."""


class Point(Record, frozen=True, kw_only=True):
    """One setting at one load. `speedup` is of output tokens/s, speculative by baseline."""

    engine: str
    setting: str
    condition: tuple[str, ...]
    load: LoadPoint
    speedup: Interval | None
    output_tokens_per_s: float | None
    acceptance_length: float | None
    relative_step_cost: Interval | None
    decode: Interval | None
    pairs: int
    forced_length: float | None = None
    void: str | None = None


class Best(Record, frozen=True, kw_only=True):
    """The choice at one load under one condition. `named` None: undecided between `undecided`.

    `speedup` is the leader's over the baseline at `confidence`, `lead` its ratio to the next at
    `each`, the confidence of every comparison after the correction. `starts` they are over.
    """

    engine: str
    condition: tuple[str, ...]
    load: LoadPoint
    leader: str
    named: str | None
    undecided: tuple[str, ...]
    speedup: Interval | None
    lead: Interval | None
    compared: int
    confidence: float
    each: float
    starts: int


class Outlook(Record, frozen=True, kw_only=True):
    """Other k at one load, from the settings that differ in k alone (`same` is what they share)."""

    engine: str
    same: tuple[str, ...]
    load: LoadPoint
    predictions: tuple[Prediction, ...]


class Sweep(Record, frozen=True, kw_only=True):
    """`sweep.json`. Without points it was begun and is to be resumed."""

    schema_version: str
    sweep_id: str
    request: dict[str, Any]
    axes: tuple[Axis, ...]
    settings: tuple[Setting, ...]
    points: tuple[Point, ...] = ()
    best: tuple[Best, ...] = ()
    outlooks: tuple[Outlook, ...] = ()
    failures: tuple[str, ...] = ()
    void: str | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The leader among candidates, and who it could not be told from."""

    leader: str
    named: str | None
    undecided: tuple[str, ...]
    lead: Interval | None
    each: float
    starts: int


def choose(candidates: Mapping[str, Mapping[Key, float]], *, confidence: float) -> Choice | None:
    """The fastest candidate, named where it beats every other one; None without candidates.

    Candidates are compared in the blocks they share. Any of them may turn out to lead, so that all
    pairs count as compared: each has the confidence 1 - (1 - confidence) / pairs (Bonferroni).
    """
    if not candidates:
        return None
    keys = sorted(set.intersection(*(set(values) for values in candidates.values())))
    if not keys:
        return None
    means = {name: geometric_mean(at[k] for k in keys) for name, at in candidates.items()}
    leader = max(means, key=lambda name: means[name])
    compared = max(1, len(list(combinations(candidates, 2))))
    each = 1 - (1 - confidence) / compared
    starts = len({repeat for repeat, _ in keys})
    close: list[str] = []
    leads: list[Interval] = []
    for name, at in candidates.items():
        if name == leader:
            continue
        lead = estimate([(k[0], candidates[leader][k] / at[k]) for k in keys], confidence=each)
        leads.append(lead)
        # One start of each setting names no winner: what a start brings with it is not seen.
        if starts < FEWEST_STARTS or lead.ci_low is None or lead.ci_low <= 1:
            close.append(name)
    return Choice(
        leader=leader,
        named=None if close else leader,
        undecided=(leader, *sorted(close, key=lambda name: -means[name])) if close else (),
        lead=min(leads, key=lambda e: e.value, default=None),
        each=each,
        starts=starts,
    )


def rates(summary: Summary, engine: str, load: LoadPoint, variant: Variant) -> dict[Key, float]:
    """Output tokens/s of whole cells by repeat and block."""
    return {
        (c.repeat, c.block): c.metrics.output_tokens_per_s
        for c in summary.cells
        if (c.engine, c.load, c.variant) == (engine, load, variant)
        and c.status == "ok"
        and c.metrics is not None
        and c.metrics.output_tokens_per_s
    }


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as measured: its records, and its summary."""

    setting: Setting
    run: RunData
    summary: Summary


def points_of(one: Measurement) -> list[Point]:
    """A setting's figures at every load."""
    return [
        _point(one, engine, load) for engine in one.run.engines() for load in one.run.loads(engine)
    ]


def _point(one: Measurement, engine: str, load: LoadPoint) -> Point:
    speed = next((s for s in one.summary.speed if (s.engine, s.load) == (engine, load)), None)
    found = next(
        (
            c
            for c in one.summary.comparisons
            if (c.engine, c.load, c.metric) == (engine, load, PRIMARY)
        ),
        None,
    )
    told = rates(one.summary, engine, load, "speculative")
    ratio = found.ratio if found else None
    return Point(
        engine=engine,
        setting=one.setting.name,
        condition=one.setting.condition,
        load=load,
        speedup=Interval(value=ratio, ci_low=found.ci_low, ci_high=found.ci_high)
        if found and ratio is not None
        else None,
        output_tokens_per_s=geometric_mean(told.values()) if told else None,
        acceptance_length=speed.acceptance_length if speed else None,
        relative_step_cost=speed.relative_step_cost if speed else None,
        decode=speed.decode if speed else None,
        pairs=found.pairs if found else 0,
        forced_length=forced_length(one.run.plan(engine)),
        void=one.summary.void,
    )


def choice_name(setting: Setting) -> str:
    """What is chosen with a setting, in the words of a candidate: `k=3`."""
    told = (item.partition("=") for item in setting.choice)
    words = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in told)
    return words or WITH_DRAFTER


def best_of(measured: Sequence[Measurement]) -> list[Best]:
    """The best choice for every engine, condition and load.

    Void, failed and forced settings take no part: the first two would spoil it for the others,
    and what is forced is no drafter's doing.
    """
    found: list[Best] = []
    groups: dict[tuple[str, tuple[str, ...], LoadPoint], list[Measurement]] = {}
    for one in measured:
        for engine in one.run.engines():
            forced = forced_length(one.run.plan(engine)) is not None
            if one.summary.void is not None or one.summary.failures or forced:
                continue
            for load in one.run.loads(engine):
                groups.setdefault((engine, one.setting.condition, load), []).append(one)
    for (engine, condition, load), members in groups.items():
        candidates = {
            choice_name(m.setting): rates(m.summary, engine, load, "speculative") for m in members
        }
        base = rates(members[0].summary, engine, load, "baseline")
        if base:
            candidates[NO_DRAFTER] = base
        candidates = {name: at for name, at in candidates.items() if at}
        confidence = members[0].run.plan(engine)["compare"]["confidence"]
        choice = choose(candidates, confidence=confidence)
        if choice is not None:
            found.append(
                Best(
                    engine=engine,
                    condition=condition,
                    load=load,
                    leader=choice.leader,
                    named=choice.named,
                    undecided=choice.undecided,
                    speedup=None
                    if choice.leader == NO_DRAFTER
                    else _over(base, candidates[choice.leader], confidence),
                    lead=choice.lead,
                    compared=len(candidates),
                    confidence=confidence,
                    each=choice.each,
                    starts=choice.starts,
                )
            )
    return found


def _over(
    base: Mapping[Key, float], leader: Mapping[Key, float], confidence: float
) -> Interval | None:
    keys = sorted(set(base) & set(leader))
    if not keys:
        return None
    return estimate([(k[0], leader[k] / base[k]) for k in keys], confidence=confidence)


def outlooks_of(measured: Sequence[Measurement]) -> list[Outlook]:
    """Predictions at other k, from all settings that differ in k alone, at every load measured."""
    groups: dict[tuple[str, tuple[str, ...]], list[Measurement]] = {}
    for one in measured:
        if one.summary.void is None:
            rest = tuple(s for s in one.setting.sets if not s.startswith("speculative.k="))
            for engine in one.run.engines():
                if forced_length(one.run.plan(engine)) is None:
                    groups.setdefault((engine, rest), []).append(one)
    found = []
    for (engine, rest), members in groups.items():
        confidence = members[0].run.plan(engine)["compare"]["confidence"]
        for load in members[0].run.loads(engine):
            known = [
                measured_of(
                    m.run,
                    engine,
                    load,
                    {c.cell_id: c.metrics for c in m.summary.cells if c.metrics is not None},
                )
                for m in members
            ]
            told = predictions([m for m in known if m is not None], confidence=confidence)
            if told:
                found.append(Outlook(engine=engine, same=rest, load=load, predictions=told))
    return found
