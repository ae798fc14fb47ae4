"""What the watch finds and what it cries for nothing, where the truth is known."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Self

import msgspec
import numpy as np

from harness.analyse.series.records import DEFAULT
from harness.analyse.series.simulated import (
    MONTH,
    NIGHTS,
    SERIES,
    Model,
    histories,
    together,
)
from harness.analyse.series.trial import RULES, found_within
from harness.analyse.statistics import wilson

OURS = next(iter(RULES))
NOISES = (0.01, 0.02, 0.04)
DROPS = (0.02, 0.03, 0.04)
LOSS = 0.05
DELAYS = (1, 2, 3, 7, 14, MONTH, MONTH + 7)
HISTORIES = 5
"""Histories of SERIES series of each kind."""
NORMAL_95 = 1.959964
MOST_FALSE, LEAST_POWER = 1e-3, 0.90
VARIED: dict[str, dict[str, float]] = {
    "as above": {},
    "within the run 20%": {"within": 0.20},
    "within the run 70%": {"within": 0.70},
    "a version's own 0%": {"own": 0.0},
    "a version's own 15%": {"own": 0.15},
    "nothing slow": {"slow": 0.0},
    "correlation up to 0.95": {"correlation": 0.95},
    "weekdays twice as far apart": {"weekday": 1.0},
    "no weekdays": {"weekday": 0.0},
    "drift twice as strong": {"drift": 2.0},
    "5% of nights wild": {"wild": 0.05},
    "no wild night": {"wild": 0.0},
    "10% of nights missing": {"missing": 0.10},
    "5 blocks a night": {"blocks": 5},
}
"""The parts of the model, one by one otherwise."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Which histories: how noisy, how large a loss, over how many nights it comes."""

    noise: float
    drop: float
    nights: int
    varied: str = "as above"

    @property
    def model(self: Self) -> Model:
        """The noise of its nights."""
        given = {"noise": self.noise, **VARIED[self.varied]}
        return msgspec.convert(given, Model)


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What one rule did in histories of one setting.

    `alarms` on `nights` watched nights without a change; `again`, `blocks`: nights measured again
    among them, and the fresh blocks for it; `found`: of `series` with a change, those with an
    alarm within each of DELAYS.
    """

    setting: Setting
    rule: str
    alarms: int = 0
    nights: int = 0
    again: int = 0
    blocks: int = 0
    series: int = 0
    found: tuple[int, ...] = (0,) * len(DELAYS)

    def within(self: Self, nights: int) -> int:
        """Series whose change was found so soon."""
        return self.found[DELAYS.index(nights)]


def settings() -> list[tuple[Setting, tuple[str, ...]]]:
    """Every setting, and the rules that are tried in it."""
    every = tuple(RULES)
    found = []
    for noise in NOISES:
        for drop, nights in ((0.0, 1), *((d, 1) for d in DROPS), (LOSS, MONTH)):
            found.append((Setting(noise=noise, drop=drop, nights=nights), every))
    for varied in list(VARIED)[1:]:
        for drop in (0.0, 0.03):
            varied_setting = Setting(noise=0.01, drop=drop, nights=1, varied=varied)
            found.append((varied_setting, (OURS,)))
    return found


def tally(
    setting: Setting, rules: Sequence[str], seed: Sequence[int], series: int, runs: int = 1
) -> list[Tally]:
    """`runs` histories, and what each rule does in them. The same seed draws the same."""
    drawn = together(
        [
            histories(
                np.random.default_rng([*seed, run]),
                setting.model,
                series=series,
                drop=setting.drop,
                nights=setting.nights,
            )
            for run in range(runs)
        ]
    )
    told = []
    for index, rule in enumerate(rules):
        got = RULES[rule](drawn, np.random.default_rng([*seed, 0, index]), DEFAULT)
        same = np.arange(NIGHTS) < drawn.at[:, None]
        same[:, : DEFAULT.learn] = False
        changed = drawn.at < NIGHTS
        found = [int((found_within(got.alarms, drawn.at, d) & changed).sum()) for d in DELAYS]
        told.append(
            Tally(
                setting=setting,
                rule=rule,
                alarms=int((got.alarms & same).sum()),
                nights=int(same.sum()),
                again=int((got.again & same).sum()),
                blocks=int(got.blocks[same].sum()),
                series=int(changed.sum()),
                found=tuple(found),
            )
        )
    return told


def simulate(
    *, seed: int = 0, runs: int = HISTORIES, series: int = SERIES, processes: int = 1
) -> list[Tally]:
    """Every setting, `runs` histories of `series` series each; progress to stderr."""
    jobs = [
        (setting, rules, (seed, index), series, runs)
        for index, (setting, rules) in enumerate(settings())
    ]
    found = {(t.setting, t.rule): t for told in _done(jobs, processes) for t in told}
    return [found[setting, rule] for setting, rules in settings() for rule in rules]


Job = tuple[Setting, Sequence[str], Sequence[int], int, int]


def _done(jobs: Sequence[Job], processes: int) -> Iterable[list[Tally]]:
    every = max(len(jobs) // 10, 1)
    if processes < 2:
        for done, job in enumerate(jobs, 1):
            yield tally(*job)
            _progress(done, len(jobs), every)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for done, future in enumerate(as_completed(pool.submit(tally, *job) for job in jobs), 1):
            yield future.result()
            _progress(done, len(jobs), every)


def _progress(done: int, of: int, every: int) -> None:
    if done % every == 0 or done == of:
        print(f"{done} of {of} kinds of histories", file=sys.stderr, flush=True)


def text_of(tallies: Sequence[Tally]) -> str:
    """The tables as Markdown."""
    parts = [_false_table(tallies), _found_table(tallies), _delay_table(tallies)]
    parts += [_drift_table(tallies), _varied_table(tallies), _held(tallies)]
    return "\n\n".join(parts) + "\n"


def missed(tallies: Sequence[Tally]) -> list[str]:
    """What was asked of the watch and is not so; empty where all is."""
    said = []
    for noise in NOISES:
        quiet = _of(tallies, OURS, Setting(noise=noise, drop=0.0, nights=1))
        if quiet.alarms > MOST_FALSE * quiet.nights:
            said.append(f"more than 1 false alarm in 1,000 series-nights at {noise:.0%} noise")
    step = _of(tallies, OURS, Setting(noise=0.01, drop=0.03, nights=1))
    if step.within(3) < LEAST_POWER * step.series:
        said.append("a drop of 3% at 1% noise is found within 3 nights less often than in 90%")
    slow = _of(tallies, OURS, Setting(noise=0.01, drop=LOSS, nights=MONTH))
    if slow.within(MONTH) < LEAST_POWER * slow.series:
        said.append("a drift of 5% over a month at 1% noise is found in it less often than in 90%")
    return said


def _held(tallies: Sequence[Tally]) -> str:
    said = missed(tallies)
    return (
        "Not reached: " + "; ".join(said) + "."
        if said
        else (
            "Reached: at most 1 false alarm in 1,000 series-nights at every noise; a drop of 3% at "
            "1% noise found within 3 nights in 90% or more; a drift of 5% over a month found in it "
            "in 90% or more."
        )
    )


def _false_table(tallies: Sequence[Tally]) -> str:
    head = ["nothing changed: alarms in 1,000 series-nights", *(f"{n:.0%} noise" for n in NOISES)]
    rows = []
    for rule in RULES:
        own = [_of(tallies, rule, Setting(noise=n, drop=0.0, nights=1)) for n in NOISES]
        rows.append([rule, *(_per_thousand(t.alarms, t.nights) for t in own)])
    for title, name in (("nights measured again", "again"), ("fresh blocks for it", "blocks")):
        own = [_of(tallies, OURS, Setting(noise=n, drop=0.0, nights=1)) for n in NOISES]
        per = (f"{1000 * getattr(t, name) / t.nights:.0f}" for t in own)
        rows.append([f"{title}, in 1,000 series-nights", *per])
    return _markdown(head, rows)


def _found_table(tallies: Sequence[Tally]) -> str:
    cases = [(n, d) for n in NOISES for d in DROPS]
    head = ["found within 3 nights", *(f"-{d:.0%} at {n:.0%}" for n, d in cases)]
    rows = []
    for rule in RULES:
        own = [_of(tallies, rule, Setting(noise=n, drop=d, nights=1)) for n, d in cases]
        rows.append([rule, *(_share(t.within(3), t.series, brief=rule != OURS) for t in own)])
    return _markdown(head, rows)


def _delay_table(tallies: Sequence[Tally]) -> str:
    delays = (1, 2, 3, 7, 14)
    head = [OURS, *(f"{d} night{'s' * (d > 1)}" for d in delays)]
    rows = []
    for noise in NOISES:
        for drop in DROPS:
            own = _of(tallies, OURS, Setting(noise=noise, drop=drop, nights=1))
            shares = (_share(own.within(d), own.series, brief=True) for d in delays)
            rows.append([f"-{drop:.0%} at {noise:.0%} noise, found within", *shares])
    return _markdown(head, rows)


def _drift_table(tallies: Sequence[Tally]) -> str:
    delays = (14, MONTH, MONTH + 7)
    head = [f"-{LOSS:.0%} over {MONTH} nights: found by night"]
    head += [f"{d}, at {n:.0%}" for n in NOISES for d in delays]
    rows = []
    for rule in RULES:
        own = [_of(tallies, rule, Setting(noise=n, drop=LOSS, nights=MONTH)) for n in NOISES]
        rows.append(
            [rule, *(_share(t.within(d), t.series, brief=True) for t in own for d in delays)]
        )
    return _markdown(head, rows)


def _varied_table(tallies: Sequence[Tally]) -> str:
    head = ["1% noise, otherwise", "false alarms in 1,000", "measured again in 1,000"]
    head += ["-3% found within 3 nights"]
    rows = []
    for varied in VARIED:
        quiet, step = (
            _of(tallies, OURS, Setting(noise=0.01, drop=d, nights=1, varied=varied))
            for d in (0.0, 0.03)
        )
        again = f"{1000 * quiet.again / quiet.nights:.0f}"
        share = _share(step.within(3), step.series)
        rows.append([varied, _per_thousand(quiet.alarms, quiet.nights), again, share])
    return _markdown(head, rows)


def _of(tallies: Sequence[Tally], rule: str, setting: Setting) -> Tally:
    return next(t for t in tallies if t.rule == rule and t.setting == setting)


def _per_thousand(hits: int, of: int) -> str:
    low, high = wilson(hits, of, NORMAL_95)
    digits = 2 if hits < 10 * of / 1000 else 0
    return f"{1000 * hits / of:.{digits}f} ({1000 * low:.{digits}f} to {1000 * high:.{digits}f})"


def _share(hits: int, of: int, *, brief: bool = False) -> str:
    told = f"{math.floor(1000 * hits / of + 0.5) / 10:.1f}%"
    low, high = wilson(hits, of, NORMAL_95)
    return told if brief else f"{told} ({low:.1%} to {high:.1%})"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
