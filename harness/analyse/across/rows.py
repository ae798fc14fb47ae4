"""Every metric of one candidate against the reference, before its verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from harness.analyse.across.effect import Effect, effect, sample
from harness.analyse.across.matching import Match, unpaired
from harness.analyse.across.metrics import SHARES, Figure, figure_of, fits, order_of, question_of
from harness.analyse.across.readings import Key, Reading, Unit, ended, plain, pooled, readings
from harness.analyse.across.records import Group, Kind, Row, Side, Stored
from harness.analyse.across.shares import Answers, share_effect
from harness.analyse.compare import interval_confidence
from harness.analyse.data import MOST_FAILED
from harness.analyse.speed import forced_length
from harness.analyse.statistics import LARGEST, LogMean, percent_of
from harness.records import LoadPoint

Tolerances = Mapping[str, float]
"""By the name of a metric; "" is of all others."""
ONE_START = "one start alone bears no verdict"
SIDES: tuple[Side, ...] = ("baseline", "speculative", "ratio")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for. `metrics` empty: all of them."""

    tolerances: Tolerances = {}
    metrics: tuple[str, ...] = ()
    anyway: bool = False


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A row before its verdict; `withheld`: it is to have none, as its note says."""

    row: Row
    found: LogMean | None
    alpha: float
    withheld: bool


def tolerance_of(metric: str, tolerances: Tolerances, default: float) -> float:
    """What was declared for a metric, by its longest name that was given; else for all."""
    named = [name for name in tolerances if name and fits(name, metric)]
    if named:
        return tolerances[max(named, key=len)]
    return tolerances.get("", default)


class Rows:
    """The rows of one candidate; readings of both sides are made once."""

    def __init__(self, reference: Group, candidate: Group, match: Match, wanted: Wanted) -> None:
        self.sides = (reference, candidate)
        self.match = match
        self.wanted = wanted
        self.by_run = any(len(side.runs) > 1 for side in self.sides)
        self._readings = [[readings(run) for run in side.runs] for side in self.sides]
        self._unpaired: dict[tuple[str, LoadPoint], str | None] = {}
        self._answers = [Answers([run.run for run in side.runs]) for side in self.sides]

    def all(self, void: str | None) -> Iterator[Measured]:
        """In the order of a table. `void`: why none of them has a verdict."""
        wanted = self.wanted.metrics
        keys = dict.fromkeys(key for of in self._readings[0] for key in of)
        for key in sorted(keys, key=self._order):
            other = self._other(key)
            known = other is not None and any(other in of for of in self._readings[1])
            if other is None or not known:
                continue
            if not wanted or any(fits(name, key.metric) for name in wanted):
                yield self._measured(key, other, void)

    def alone(self) -> list[str]:
        """The figures, not the details, that only one side has of a variant that both have."""
        ours, theirs = ({(k.side, k.metric) for of in side for k in of} for side in self._readings)
        told = []
        for words, here, there in (("reference", ours, theirs), ("candidate", theirs, ours)):
            sides = {side for side, _ in there}
            told += [
                f"{metric} of {side}: only in the {words}"
                for side, metric in sorted(here - there)
                if side in sides and figure_of(metric).kind == "figure"
            ]
        return told

    def _order(self, key: Key) -> tuple[Any, ...]:
        """By engine, what is of a start behind the loads, categories behind what is of all."""
        loads = list(self.match.loads)
        engines = list(self.match.engines)
        return (
            engines.index(key.engine) if key.engine in engines else len(engines),
            loads.index(key.load) if key.load in loads else len(loads),
            key.category or "",
            *order_of(key.metric),
            SIDES.index(key.side),
        )

    def _other(self, key: Key) -> Key | None:
        """The candidate's key that a key of the reference is held against."""
        engine = self.match.engines.get(key.engine)
        load = None if key.load is None else self.match.loads.get(key.load)
        if engine is None or (key.load is not None and load is None):
            return None
        return key._replace(engine=engine, load=load)

    def _measured(self, key: Key, other: Key, void: str | None) -> Measured:
        figure = figure_of(key.metric)
        told = self._effect(key, other)
        found = told.found
        withheld = void or self._withheld(key, other)
        plan = self.sides[0].last.plans[key.engine]["compare"]
        confidence = max(
            interval_confidence(side.last.run, k.engine)
            for side, k in zip(self.sides, (key, other), strict=True)
        )
        low, high = (found.interval(confidence) if found else None) or (None, None)
        row = _row(key, figure, told)
        row = msgspec.structs.replace(
            row,
            kind=_kind(key, figure, plan),
            ci_low=low,
            ci_high=high,
            tolerance=tolerance_of(key.metric, self.wanted.tolerances, plan["min_effect"]),
            method=told.method.format(percent_of(confidence)),
            confidence=confidence,
            p_value=found.p_value() if found else None,
            unpaired=told.unpaired,
            note="; ".join(n for n in (told.note, withheld) if n) or None,
        )
        return Measured(row=row, found=found, alpha=1 - confidence, withheld=withheld is not None)

    def _effect(self, key: Key, other: Key) -> Effect:
        if key.metric in SHARES:
            found = self._of_prompts(key, other)
            if found is not None:
                return found
        parts = [
            [of[k] for of in side if k in of]
            for side, k in zip(self._readings, (key, other), strict=True)
        ]
        samples = [sample(runs, by_run=self.by_run) for runs in parts]
        first, second = samples
        if first is None or second is None:
            return _nothing(parts, "a value of 0 has no ratio")
        told = effect(first, second, unpaired=self._why_unpaired(key, other))
        if told.found is not None and abs(told.found.mean) > LARGEST:
            return _nothing(parts, "so far apart that no number holds the ratio")
        if key.metric in SHARES:
            return msgspec.structs.replace(
                told,
                found=LogMean(mean=told.found.mean, error=None, units=1) if told.found else None,
                note="the requests are not there: prompts cannot be held against each other",
            )
        return told

    def _of_prompts(self, key: Key, other: Key) -> Effect | None:
        if not all(run.run.cells for side in self.sides for run in side.runs):
            return None
        mine, theirs = self._answers
        return share_effect(mine.shares(key), theirs.shares(other))

    def _why_unpaired(self, key: Key, other: Key) -> str | None:
        if self.by_run:
            return ""
        if key.load is None or other.load is None:
            return None  # a start has no prompts: first starts are held against first starts
        place = key.engine, key.load
        if place not in self._unpaired:
            self._unpaired[place] = unpaired(
                self.sides[0].last,
                self.sides[1].last,
                (key.engine, other.engine),
                (key.load, other.load),
            )
        return self._unpaired[place]

    def _withheld(self, key: Key, other: Key) -> str | None:
        """Why a row is to have no verdict."""
        both = list(zip(self.sides, (key, other), strict=True))
        for side, k in both:
            for run in side.runs:
                if k.side != "baseline" and _forced(run, k):
                    return "an acceptance that was forced says nothing"
                if k.metric != "answered" and _many_failed(run, k):
                    return f"more than {MOST_FAILED:.0%} of the requests of a block failed"
        if self.by_run:
            return None
        starts = [_starts(of[0][k]) for of, (_, k) in zip(self._readings, both, strict=True)]
        return ONE_START if min(starts) < 2 else None


def _starts(blocks: Mapping[Unit, Reading]) -> int:
    return len({repeat for repeat, _ in blocks})


def _forced(run: Stored, key: Key) -> bool:
    plan = run.plans.get(key.engine)
    return plan is not None and forced_length(plan) is not None


def _many_failed(run: Stored, key: Key) -> bool:
    """Of a block that the figure is of; a start's figures are of no request."""
    cells = [
        c.metrics
        for c in ended(run)
        if c.engine == key.engine and key.load == plain(c.load) and key.side in (c.variant, "ratio")
    ]
    return any(
        m.requests_failed > MOST_FAILED * (m.requests_failed + m.requests_ok) for m in cells if m
    )


def _kind(key: Key, figure: Figure, compare: Mapping[str, Any]) -> Kind:
    if key.category is not None:
        return "detail"
    asked = question_of(compare.get("metric", "output_tokens_per_s"))
    return "question" if key.metric == asked else figure.kind


def _nothing(parts: list[list[Any]], why: str) -> Effect:
    values = [[pooled(list(blocks.values())) for blocks in runs] for runs in parts]
    means = [sum(own) / len(own) for own in values]
    return Effect(
        found=None,
        reference=means[0],
        candidate=means[1],
        paired=False,
        units=(len(values[0]), len(values[1])),
        method="no ratio",
        note=why,
    )


def _row(key: Key, figure: Figure, told: Effect) -> Row:
    return Row(
        metric=key.metric,
        unit=figure.unit,
        better=figure.better,
        area=figure.area,
        kind=figure.kind,
        engine=key.engine,
        side=key.side,
        load=key.load,
        category=key.category,
        reference=told.reference,
        candidate=told.candidate,
        ratio=math.exp(told.found.mean) if told.found else None,
        ci_low=None,
        ci_high=None,
        verdict="undecided",
        tolerance=0.0,
        paired=told.paired,
        units=told.units,
        method=told.method,
    )
