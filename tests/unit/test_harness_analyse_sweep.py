"""A sweep's order of starts, its shared baselines, and how a winner is named."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from harness_records import run_of
from hypothesis import given
from hypothesis import strategies as st
from speed_records import Steps, pair

from harness.analyse.summary import summarise
from harness.analyse.sweep import (
    NO_DRAFTER,
    Measurement,
    best_of,
    choose,
    outlooks_of,
    points_of,
)
from harness.plan.axes import Step, kind_of, steps_of
from harness.plan.schema import Plan, SpeculativeSection
from harness.records import Setting

BOTH = ("baseline", "speculative")


def setting(name: str, baseline: str) -> Setting:
    return Setting(name=name, choice=(), condition=(), run=f"runs/{name}", baseline=baseline)


def told(steps: Sequence[Step]) -> list[str]:
    return [f"{s.repeat}{'-' if s.variant == 'baseline' else '+'}{s.setting}" for s in steps]


def test_a_baseline_runs_once_a_repeat_and_every_other_repeat_turns_round() -> None:
    settings = [setting("a", "a"), setting("b", "a"), setting("c", "c")]
    assert told(steps_of(settings, 2, BOTH)) == [
        *("0-a", "0+a", "0+b", "0-c", "0+c"),
        *("1+c", "1-c", "1+b", "1+a", "1-a"),
    ]
    assert told(steps_of(settings, 1, ("speculative",))) == ["0+a", "0+b", "0+c"]


@given(st.integers(1, 6), st.integers(1, 4))
def test_every_setting_has_every_repeat_once(size: int, repeats: int) -> None:
    settings = [setting(f"s{i}", "s0") for i in range(size)]
    steps = steps_of(settings, repeats, BOTH)
    assert len(steps) == len(set(told(steps))) == repeats * (size + 1)


def test_keys_of_the_drafting_are_chosen_among_and_others_are_conditions() -> None:
    assert kind_of("speculative.k") == kind_of("drafter.path") == "choice"
    assert kind_of("sampling.temperature") == kind_of("engine.threads") == "condition"


def blocks(values: Sequence[float]) -> dict[tuple[int, int], float]:
    return {(r, 0): v for r, v in enumerate(values)}


def test_a_clear_winner_is_named_with_its_lead_over_the_next() -> None:
    choice = choose(
        {
            "k=1": blocks([120, 121, 119, 120]),
            "k=3": blocks([150, 151, 149, 150]),
            NO_DRAFTER: blocks([100, 101, 99, 100]),
        },
        confidence=0.95,
    )
    assert choice is not None
    assert (choice.leader, choice.named, choice.undecided) == ("k=3", "k=3", ())
    assert choice.each == pytest.approx(1 - 0.05 / 3)
    assert choice.lead is not None
    assert choice.lead.value == pytest.approx(1.25, rel=1e-3)


def test_close_candidates_leave_it_undecided_between_them_alone() -> None:
    choice = choose(
        {
            "k=1": blocks([120, 121, 119, 120]),
            "k=2": blocks([148, 152, 151, 149]),
            "k=3": blocks([150, 151, 149, 153]),
        },
        confidence=0.95,
    )
    assert choice is not None
    assert choice.named is None
    assert choice.undecided == ("k=3", "k=2")


def test_one_start_names_no_winner() -> None:
    values = {(0, b): 100.0 + b for b in range(3)}
    double = {key: 2 * v + key[1] for key, v in values.items()}
    choice = choose({"a": values, "b": double}, confidence=0.95)
    assert choice is not None
    assert (choice.named, choice.undecided) == (None, ("b", "a"))
    assert choose({}, confidence=0.95) is None
    assert choose({"a": {(0, 0): 1.0}, "b": {(1, 0): 1.0}}, confidence=0.95) is None


def test_the_one_candidate_there_is_needs_to_beat_nobody() -> None:
    choice = choose({"a": blocks([1, 2])}, confidence=0.95)
    assert choice is not None
    assert (choice.named, choice.lead) == ("a", None)


def test_equal_candidates_are_rarely_told_apart() -> None:
    """Five alike, three starts: at most 5% of the sweeps name a winner, by the correction."""
    rng = random.Random(1)
    named = 0
    for _ in range(400):
        candidates = {
            f"k={k}": blocks([100 * rng.lognormvariate(0, 0.03) for _ in range(3)])
            for k in range(5)
        }
        choice = choose(candidates, confidence=0.95)
        assert choice is not None
        named += choice.named is not None
    assert named <= 20


def measured(
    k: int, steps: Steps, costs: Sequence[int], *, forced: float | None = None
) -> Measurement:
    """One setting at k, a baseline token of 1000 us, a step's cost in each of the starts."""
    plan = Plan(speculative=SpeculativeSection(k=k, forced_length=forced))
    cells = [c for r, cost in enumerate(costs) for c in pair(steps, 1000, cost, r)]
    run = run_of(cells, plan=plan)
    choice = (f"speculative.k={k}",)
    if forced is not None:
        choice += (f"speculative.forced_length={forced:g}",)
    made = Setting(name=f"k={k}", choice=choice, condition=(), run="runs/x", baseline="k=1")
    return Measurement(setting=made, run=run, summary=summarise(run))


def test_a_sweeps_figures_best_setting_and_prediction() -> None:
    # Steps of k = 1 and of k = 3 from one drafter; a step costs 1 + k / 10 baseline tokens.
    one = measured(1, [2, 2, 2, 1], [1100, 1101, 1099])
    three = measured(3, [4, 4, 2, 1], [1300, 1301, 1299])
    forced = measured(3, [4, 4, 4, 4], [1300, 1300, 1300], forced=4.0)
    all_of = [one, three, forced]
    points = [p for m in all_of for p in points_of(m)]
    assert [p.forced_length for p in points] == [None, None, 4.0]
    assert points[1].decode is not None
    assert points[1].decode.value == pytest.approx(2.75 / 1.3, rel=1e-3)
    (best,) = best_of(all_of)  # what is forced is no candidate
    assert (best.named, best.compared, best.starts) == ("k=3", 3, 3)
    (outlook,) = outlooks_of(all_of)
    by_k = {p.k: p for p in outlook.predictions}
    assert by_k[2].acceptance_length == pytest.approx(2.25)
    assert by_k[2].speedup == pytest.approx(2.25 / 1.2, rel=1e-3)
    assert by_k[2].low is not None
    assert by_k[2].low < 2.25 / 1.2 < (by_k[2].high or 0)


def test_void_and_failed_settings_take_no_part() -> None:
    one, three = measured(1, [2, 1], [1000] * 3), measured(3, [4, 1], [1000] * 3)
    void = msgspec.structs.replace(
        three, summary=msgspec.structs.replace(three.summary, void="broken")
    )
    (best,) = best_of([one, void])
    assert (best.leader, best.compared) == ("k=1", 2)
    assert points_of(void)[0].void == "broken"
    dead = msgspec.structs.replace(
        three, summary=msgspec.structs.replace(three.summary, failures=("it died",))
    )
    assert [b.compared for b in best_of([one, dead])] == [2]
    assert best_of([void]) == []
