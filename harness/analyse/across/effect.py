"""How much a figure of one side differs from the other side's: log ratio, error, how it is made.

The units are starts of the engine, as within a run; blocks of a single start stand in for them, but
then no verdict is drawn. Where a side holds several runs, the runs are the units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from harness.analyse.across.readings import Reading, Unit, pooled
from harness.analyse.data import by_repeat
from harness.analyse.statistics import LogMean, log_mean

NOTHING = 0.5
"""Where nothing was counted, such as no draft accepted to a position: so much has a logarithm."""
INTERVAL = "{} t interval on the log scale"
ONE_START = "blocks of one start"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One side's independent values of a figure, as logarithms, by unit.

    `value`: the figure over all of them. `what`: what a unit is. `blocks`: what was measured.
    """

    logs: dict[Unit, float]
    value: float
    what: str
    blocks: frozenset[Unit]


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Candidate over reference on the log scale; `found` None: no logarithm could be taken.

    `method` has a place for the confidence. `unpaired`: why the units do not pair.
    """

    found: LogMean | None
    reference: float
    candidate: float
    paired: bool
    units: tuple[int, int]
    method: str
    unpaired: str | None = None
    note: str | None = None


def sample(runs: Sequence[dict[Unit, Reading]], *, by_run: bool = False) -> Sample | None:
    """One side's values, from the blocks of each of its runs; None where a logarithm is wanting.

    `by_run`: one of the sides has several runs, so that a run is the unit on both.
    """
    if by_run or len(runs) > 1:
        values = {(i, 0): pooled(list(blocks.values()), NOTHING) for i, blocks in enumerate(runs)}
        return _sample(values, {}, "runs")
    (blocks,) = runs
    starts = by_repeat(blocks, lambda unit: unit[0])
    if len(starts) > 1:
        values = {(own[0][0], 0): pooled([blocks[u] for u in own], NOTHING) for own in starts}
        return _sample(values, blocks, "starts")
    values = {unit: pooled([reading], NOTHING) for unit, reading in blocks.items()}
    return _sample(values, blocks, ONE_START)


def _sample(values: dict[Unit, float], blocks: dict[Unit, Reading], what: str) -> Sample | None:
    """Where the blocks are of counts, the figure over all units is that of all counts pooled."""
    if not values or any(v <= 0 for v in values.values()):
        return None
    logs = {unit: math.log(v) for unit, v in values.items()}
    parts = list(blocks.values())
    counted = parts and parts[0].below is not None
    value = pooled(parts) if counted else math.exp(sum(logs.values()) / len(logs))
    return Sample(logs=logs, value=value, what=what, blocks=frozenset(blocks))


def effect(reference: Sample, candidate: Sample, *, unpaired: str | None) -> Effect:
    """The candidate over the reference.

    `unpaired`: why their units do not pair, empty where that goes without saying; None: they do.
    Units that pair had the same prompts in the same order, so that what a prompt brings falls on
    both alike; else it is part of both sides' spread, and the interval has to hold it.
    """
    a, b = reference.logs, candidate.logs
    units = len(a), len(b)
    if unpaired is None and reference.blocks != candidate.blocks:
        unpaired = "not the same blocks were measured"
    if unpaired is None:
        found = log_mean([b[unit] - a[unit] for unit in a])
        method = f"{_counted(units[0], reference.what, 'paired')}, {INTERVAL}"
    else:
        found, how = apart(list(a.values()), list(b.values()))
        method = f"{_said(units, reference.what, candidate.what)}, {how}"
    return Effect(
        found=found,
        reference=reference.value,
        candidate=candidate.value,
        paired=unpaired is None,
        units=units,
        method=method,
        unpaired=unpaired or None,
    )


def _said(units: tuple[int, int], a: str, b: str) -> str:
    return f"{_counted(units[0], a)} against {_counted(units[1], b)}, unpaired"


def _counted(n: int, what: str, how: str = "") -> str:
    """So many units in words: 3 paired starts, 1 run, 1 block of one start."""
    first, _, rest = what.partition(" ")
    words = [str(n), how, first.removesuffix("s") if n == 1 else first, rest]
    return " ".join(word for word in words if word)


def apart(a: Sequence[float], b: Sequence[float]) -> tuple[LogMean, str]:
    """The difference of two independent means, and how its interval is made.

    Neither side's spread is taken for the other's: standard errors are added as squares, and t has
    as many degrees of freedom as the smaller side has (P. L. Hsu, Statistical Research Memoirs 2,
    1938). Whichever side spreads more, that covers as much as it says; Welch's degrees, which are
    more, do not with so few values. A single value has no spread: then it is held to be one more of
    the other side's kind, and the interval is a prediction's, s sqrt(1 + 1/n).
    """
    first, second = log_mean(a), log_mean(b)
    mean, units = second.mean - first.mean, len(a) + len(b)
    if first.error is not None and second.error is not None:
        error, degrees = math.hypot(first.error, second.error), min(len(a), len(b)) - 1
        return LogMean(mean=mean, error=error, units=units, degrees=degrees), INTERVAL
    many = first if second.error is None else second
    if many.error is None:
        return LogMean(mean=mean, error=None, units=units), "which have no interval"
    spread = many.error * math.sqrt(many.units)
    error = spread * math.sqrt(1 + 1 / many.units)
    found = LogMean(mean=mean, error=error, units=units, degrees=many.units - 1)
    return found, f"{INTERVAL}, the single one held to spread as the others do"
