"""The watch where the truth is known, in small; `make regressions-table` is the same in full."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from harness.analyse.series import edivisive
from harness.analyse.series.records import DEFAULT
from harness.analyse.series.simulated import MONTH, NIGHTS, Model, histories
from harness.analyse.series.table import (
    DELAYS,
    OURS,
    VARIED,
    Setting,
    Tally,
    missed,
    settings,
    tally,
    text_of,
)
from harness.analyse.series.trial import RULES, against_yesterday, found_within, watched
from harness.analyse.statistics import wilson

STILL = Model(noise=0.01, weekday=0, drift=0, wild=0, missing=0)


def test_nothing_that_changed_is_cried_less_often_than_once_in_a_thousand() -> None:
    (quiet,) = tally(Setting(noise=0.01, drop=0.0, nights=1), [OURS], [11], 200)
    assert quiet.nights == 200 * (NIGHTS - DEFAULT.learn)
    assert wilson(quiet.alarms, quiet.nights, 1.96)[1] <= 1e-3
    assert quiet.again < 0.06 * quiet.nights


def test_a_drop_of_three_deviations_is_found_within_three_nights() -> None:
    (step,) = tally(Setting(noise=0.01, drop=0.03, nights=1), [OURS], [12], 200)
    assert step.series == 200
    assert step.within(3) >= 0.9 * step.series
    assert wilson(step.within(3), step.series, 1.96)[0] > 0.85
    assert list(step.found) == sorted(step.found)


def test_a_slow_loss_is_found_within_its_month() -> None:
    (slow,) = tally(Setting(noise=0.01, drop=0.05, nights=MONTH), [OURS], [13], 100)
    assert wilson(slow.within(MONTH), slow.series, 1.96)[0] > 0.9


def test_a_machine_that_became_slower_is_no_alarm_beside_a_good_version() -> None:
    drawn = histories(np.random.default_rng(3), Model(noise=0.01), series=60)
    slower = np.where(np.arange(NIGHTS) >= 60, np.log(0.95), 0.0)
    moved = msgspec.structs.replace(drawn, night=drawn.night + slower)
    got = watched(moved, np.random.default_rng(4), DEFAULT)
    assert got.again[:, 60:64].any(axis=1).mean() > 0.9
    assert got.alarms.sum() <= 6
    assert got.again[:, 75:].mean() < 0.08


def test_yesterday_alone_cries_wolf() -> None:
    drawn = histories(np.random.default_rng(5), Model(noise=0.01), series=100)
    got = against_yesterday(drawn, np.random.default_rng(0), DEFAULT)
    assert got.alarms[:, DEFAULT.learn :].mean() > 0.05


def test_nights_differ_as_much_as_the_model_says_and_of_the_parts_it_names() -> None:
    drawn = histories(np.random.default_rng(0), STILL, series=400)
    assert drawn.values.std() == pytest.approx(0.01, rel=0.03)
    within = drawn.blocks.mean(axis=2).var() / drawn.values.var()
    assert within == pytest.approx(STILL.within, rel=0.05)
    assert drawn.own.var() / drawn.values.var() == pytest.approx(STILL.own, rel=0.05)
    neighbours = np.corrcoef(drawn.night[:, 1:].ravel(), drawn.night[:, :-1].ravel())[0, 1]
    assert 0.1 < neighbours < 0.3


def test_fresh_blocks_share_the_night_and_a_good_version_lacks_the_change() -> None:
    drawn = histories(np.random.default_rng(1), STILL, series=2, drop=0.1)
    at = (0, int(drawn.at[0]))
    rng = np.random.default_rng(2)
    fresh, good = drawn.again(rng, at, 4000), drawn.good(rng, at, 4000, (at[1] - 1, 0.0))
    assert fresh.mean() == pytest.approx(drawn.night[at] + drawn.own[at] + np.log(0.9), abs=2e-3)
    assert good.mean() == pytest.approx(drawn.night[at], abs=2e-3)
    assert fresh.std() == pytest.approx(STILL.block, rel=0.05)


def test_energy_distance_is_that_of_its_definition() -> None:
    values = np.random.default_rng(7).standard_normal((1, 9))
    known = np.ones((1, 9), dtype=bool)
    known[0, 4] = False
    found = edivisive.energy(values, known)[0]
    for k in range(1, 9):
        left, right = (values[0, part][known[0, part]] for part in (slice(0, k), slice(k, 9)))
        m, n = len(left), len(right)
        across = np.abs(left[:, None] - right).mean()
        inner = sum(
            np.abs(side[:, None] - side).sum() / max(len(side) * (len(side) - 1), 1)
            for side in (left, right)
        )
        assert found[k - 1] == pytest.approx(m * n / (m + n) * (2 * across - inner))


def test_e_divisive_splits_where_the_step_is() -> None:
    values = 0.01 * np.random.default_rng(8).standard_normal((1, 50))
    values[:, 40:] -= 0.05
    at, p, change = edivisive.split(values, np.isfinite(values))
    assert at[0] == 40 and p[0] < 1e-9 and change[0] == pytest.approx(-0.05, abs=0.01)


def test_found_counts_from_the_first_changed_night() -> None:
    alarms = np.zeros((3, 10), dtype=bool)
    alarms[0, 4], alarms[1, 7], alarms[2, 8] = True, True, True
    at = np.array([5.0, 5.0, 5.0])
    assert found_within(alarms, at, 3).tolist() == [False, True, False]


def told(rule: str, setting: Setting, *, alarms: int = 0, found: int = 100) -> Tally:
    return Tally(
        setting=setting,
        rule=rule,
        alarms=alarms,
        nights=10_000,
        series=100,
        found=(found,) * len(DELAYS),
    )


def test_the_tables_name_every_rule_and_say_what_is_not_reached() -> None:
    held = [told(rule, setting) for setting, rules in settings() for rule in rules]
    text = text_of(held)
    assert all(name in text for name in (*RULES, *VARIED)) and "Reached: " in text
    assert missed(held) == []
    loud = [told(t.rule, t.setting, alarms=11, found=89) for t in held]
    assert len(missed(loud)) == 5 and "Not reached: " in text_of(loud)


def test_the_same_seed_tells_the_same() -> None:
    setting = Setting(noise=0.02, drop=0.04, nights=1)
    first, again = (tally(setting, list(RULES), [5], 4) for _ in range(2))
    assert first == again and [t.rule for t in first] == list(RULES)


def test_the_command_refuses_what_it_cannot_draw() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.analyse.series", "--runs", "0"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "1 or more" in done.stderr
