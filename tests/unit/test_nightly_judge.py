"""What a night's figures are judged to be: gates, changes, confirmations, accepted ones."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from nightly_points import SPEED, case, finding, night, night_name

from harness.analyse.series.records import DEFAULT
from harness.nightly.accepted import Accepted
from harness.nightly.judge import judge, wanted
from harness.nightly.records import Finding
from harness.nightly.suite import Gate, Suite

SERIES = f"chat/vllm/speculative/c8/{SPEED}"


def noisy(level: float, n: int, seed: int = 1, noise: float = 0.005) -> list[float]:
    """`n` nights around a level."""
    draw = random.Random(seed)
    return [level * (1 + draw.gauss(0, noise)) for _ in range(n)]


QUIET = noisy(100.0, 30)
DROP = [*QUIET, 92.0]


def only(found: Any) -> Finding:
    """The one finding there is."""
    (one,) = found.findings
    assert isinstance(one, Finding)
    return one


def test_quiet_nights_are_no_news() -> None:
    found = judge(case(QUIET))
    assert found.findings == () and found.wanted == 0


def test_a_drop_is_a_suspect_until_fresh_blocks_are_measured() -> None:
    one = only(judge(case(DROP)))
    assert (one.status, one.direction, one.kind) == ("unconfirmed", "worse", "step")
    assert one.first_bad == night_name(30) and one.last_good == night_name(29)
    assert one.ratio is not None and abs(one.ratio - 0.92) < 0.01
    assert wanted(case(DROP)) == DEFAULT.blocks


def test_fresh_blocks_beside_a_good_version_confirm_it() -> None:
    fresh, good = noisy(92.0, 4, 2), noisy(100.0, 4, 3)
    one = only(judge(case(DROP, fresh=fresh, control=good)))
    assert one.status == "confirmed"
    assert "fell by 8" in one.text and "between the nights of" in one.text
    assert wanted(case(DROP, fresh=fresh, control=good)) == 0


def test_fresh_blocks_that_do_not_show_it_refute_it() -> None:
    one = only(judge(case(DROP, fresh=noisy(100.0, 4, 2), control=noisy(100.0, 4, 3))))
    assert one.status == "refuted"
    assert only(judge(case(DROP, fresh=noisy(100.0, 4, 2)))).status == "refuted"


def test_a_good_version_that_lost_as_much_blames_the_machine() -> None:
    one = only(judge(case(DROP, fresh=noisy(92.0, 4, 2), control=noisy(92.0, 4, 3))))
    assert one.status == "machine" and "the machine's, not the version's" in one.text


def test_a_bad_first_night_alone_waits_for_another() -> None:
    one = only(judge(case(DROP, fresh=noisy(92.0, 4, 2))))
    assert one.status == "unconfirmed" and "another night" in one.text


def test_a_confirmed_loss_is_told_until_it_is_gone() -> None:
    told = finding(found=night_name(30), first_bad=night_name(30))
    nights = (night(30, findings=(told,)),)
    stands = judge(case([*DROP, *noisy(92.0, 3, 4)], nights=nights))
    assert [(f.status, f.found) for f in stands.findings] == [("confirmed", night_name(30))]
    assert stands.wanted == 0
    gone = judge(case([*DROP, *noisy(92.0, 3, 4), *noisy(100.0, 6, 5)], nights=nights))
    assert [f for f in gone.findings if f.direction == "worse"] == []


def test_an_accepted_change_fails_nothing_any_more() -> None:
    told = finding(found=night_name(30), first_bad=night_name(30))
    nights = (night(30, findings=(told,)),)
    change = Accepted(series="chat/*", since=night_name(30), reason="slower, but right")
    found = judge(case([*DROP, *noisy(92.0, 5, 4)], nights=nights, accepted=(change,)))
    assert [(f.status, f.reason) for f in found.findings] == [("known", "slower, but right")]
    gate = Gate(metric=SPEED, tolerance=0.03)
    after = judge(
        case([*DROP, *noisy(92.0, 5, 4)], nights=nights, accepted=(change,), gates=(gate,))
    )
    assert [g.status for g in after.gates] == ["pass"]
    before = judge(case([*DROP, *noisy(92.0, 5, 4)], nights=nights, gates=(gate,)))
    assert [g.status for g in before.gates] == ["unconfirmed"]


def test_what_is_known_to_be_bad_needs_no_fresh_blocks() -> None:
    change = Accepted(series="*", since=night_name(30), kind="known-bad", reason="issue 12")
    found = judge(case(DROP, accepted=(change,), gates=(Gate(metric=SPEED, min=95),)))
    assert only(found).status == "known" and found.wanted == 0
    assert [g.status for g in found.gates] == ["known"]


def test_a_latency_that_rises_is_worse() -> None:
    values = [*noisy(0.2, 30), 0.23]
    one = only(judge(case(values, metric="ttft_s.mean", better="lower")))
    assert one.direction == "worse" and " rose by 1" in one.text
    assert one.ratio is not None and one.ratio > 1.1


def test_a_metric_that_is_not_watched_is_not_judged() -> None:
    found = judge(case(DROP, suite=Suite(name="s", watch=("acceptance_length",))))
    assert found.findings == ()


@pytest.mark.parametrize(
    ("gate", "status"),
    [
        (Gate(metric=SPEED, min=80), "pass"),
        (Gate(metric=SPEED, min=95), "unconfirmed"),
        (Gate(metric=SPEED, max=80), "unconfirmed"),
        (Gate(metric=SPEED, tolerance=0.1), "pass"),
        (Gate(metric=SPEED, tolerance=0.02), "unconfirmed"),
        (Gate(metric=SPEED, variant="baseline", min=1), "unknown"),
        (Gate(metric=SPEED, load="c9", min=1), "unknown"),
        (Gate(metric="output_*", min=80), "pass"),
    ],
)
def test_a_gate_looks_at_tonight(gate: Gate, status: str) -> None:
    (result,) = judge(case(DROP, gates=(gate,))).gates
    assert result.status == status


def test_a_gate_fails_when_fresh_blocks_break_it_too() -> None:
    gate = Gate(metric=SPEED, min=95)
    (fails,) = judge(case(DROP, gates=(gate,), fresh=(92.0, 93.0, 92.4, 92.6))).gates
    assert fails.status == "fail" and "4 fresh blocks gave 92.50 too" in fails.text
    (kept,) = judge(case(DROP, gates=(gate,), fresh=(99.0, 101.0, 100.0, 99.5))).gates
    assert kept.status == "refuted"
    exact = judge(case(DROP, gates=(gate,), fresh=(92.0, 92.0)))
    assert [g.status for g in exact.gates] == ["fail"]


def test_blocks_that_scatter_across_a_limit_ask_for_more_until_their_mean_decides() -> None:
    gate, quiet = Gate(metric=SPEED, min=95), Suite(name="s", watch=())
    some = judge(case(DROP, gates=(gate,), fresh=(90.0, 99.0), suite=quiet))
    assert [g.status for g in some.gates] == ["unconfirmed"] and some.wanted == DEFAULT.blocks
    many = (90.0, 99.0) * (DEFAULT.looks * DEFAULT.blocks // 2)
    all_of_them = judge(case(DROP, gates=(gate,), fresh=many, suite=quiet))
    assert [g.status for g in all_of_them.gates] == ["fail"] and all_of_them.wanted == 0


def test_an_unknown_metric_is_told_with_the_nearest() -> None:
    (result,) = judge(case(DROP, gates=(Gate(metric="output_token_per_s", min=1),))).gates
    assert "did you mean 'output_tokens_per_s'?" in result.text


def test_a_relative_gate_waits_for_a_baseline() -> None:
    (result,) = judge(case([100.0], gates=(Gate(metric=SPEED, tolerance=0.1),), pinned=None)).gates
    assert result.status == "no_baseline"


def test_a_young_series_is_held_to_its_baseline() -> None:
    few = [100.0, 100.4, 99.7, 100.1, 90.0]
    one = only(judge(case(few)))
    assert (one.source, one.status) == ("baseline", "unconfirmed")
    assert "against the baseline" in one.text
    shown = case(few, fresh=noisy(90.0, 4, 2), control=noisy(100.0, 4, 3))
    assert only(judge(shown)).status == "confirmed"
    assert judge(case([100.0, 100.4, 99.7, 100.1, 98.9])).findings == ()
    assert judge(case([100.0])).findings == ()


def test_a_young_loss_that_lasts_is_confirmed_without_a_good_version() -> None:
    few = [100.0, 100.4, 99.7, 100.1, 99.9, 90.0, 90.3]
    earlier = night(5, findings=(finding(source="baseline", status="unconfirmed"),))
    one = only(judge(case(few, nights=(earlier,), fresh=noisy(90.0, 4, 2))))
    assert one.status == "confirmed" and one.first_bad == night_name(5)
    third = night(6, findings=(msgspec.structs.replace(one, status="confirmed"),))
    stands = only(judge(case([*few, 90.1], nights=(earlier, third))))
    assert stands.status == "confirmed" and wanted(case([*few, 90.1], nights=(earlier, third))) == 0


def test_figures_of_another_definition_are_another_series() -> None:
    from nightly_points import kept, point

    from harness.nightly.series import series_of

    nights = [kept(0, [point(100.0)], digest="old"), kept(1, [point(50.0)])]
    found = series_of("chat", nights, "d")
    assert [r.value for r in found[SERIES].readings] == [50.0]
    void = [kept(0, [point(100.0, void=True)])]
    assert series_of("chat", void, "d") == {}


def test_false_alarms_stay_rare_through_the_whole_judgement() -> None:
    cried = 0
    for seed in range(60):
        values = noisy(100.0, 40, seed, noise=0.01)
        fresh, good = noisy(100.0, 4, seed + 1000, 0.01), noisy(100.0, 4, seed + 2000, 0.01)
        found = judge(case(values, fresh=fresh, control=good))
        cried += any(f.status == "confirmed" and f.direction == "worse" for f in found.findings)
    assert cried <= 1
