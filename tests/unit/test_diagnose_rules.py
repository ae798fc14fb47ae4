"""From evidence to causes: each cause by its typical dossier, and any dossier without an error."""

from __future__ import annotations

import random
from typing import Any

import diagnose_cases as made
import msgspec
import pytest
from diagnose_any import DOSSIERS, healthy_by_chance
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.diagnose.causes import CAUSES
from harness.diagnose.readings import AS_DECLARED, READINGS
from harness.diagnose.records import (
    Audit,
    AuditFinding,
    Diagnosis,
    Dossier,
    Expected,
    Fit,
    Observed,
    Proportion,
    SlotFit,
    Subject,
)
from harness.diagnose.rules import naming, wanted
from harness.diagnose.rules.located import located, troubled
from harness.diagnose.rules.points import points
from harness.diagnose.verdict import conclude, decided, same_class


def score(dossier: Dossier, cause: str) -> float:
    found = {r.cause: r.score for r in conclude(dossier).ranked}
    return found.get(cause, CAUSES[cause].prior)


@pytest.mark.parametrize("cause", sorted(made.CASES))
def test_a_typical_dossier_names_its_cause(cause: str) -> None:
    found = conclude(made.CASES[cause]())
    assert same_class(found.cause, cause), (found.verdict, found.ranked[:3])
    assert found.ranked[0].cause == found.cause and found.ranked[0].score >= 3
    assert found.ranked[0].evidence_for
    assert found.stage is None
    assert found.ranked[0].title in found.verdict and "remedy" in found.verdict


def test_every_cause_has_a_typical_dossier() -> None:
    assert set(made.CASES) == set(CAUSES)
    assert all(cause.settles and abs(cause.prior) < 0.5 for cause in CAUSES.values())


@pytest.mark.parametrize("cause", sorted(made.CASES))
def test_a_class_is_told_as_one(cause: str) -> None:
    family = CAUSES[cause].family
    kin = [c.title for n, c in CAUSES.items() if family and c.family == family and n != cause]
    found = conclude(made.CASES[cause]())
    if found.cause == cause:
        assert all(title in found.verdict for title in kin)


def test_nothing_is_wrong_with_a_healthy_drafter() -> None:
    found = conclude(made.healthy())
    assert found.cause == "none" and not found.collapse and found.stage is None
    assert all(r.score < 0 for r in found.ranked)
    assert decided(made.healthy())
    assert "49%" in found.verdict and "2.20" in found.verdict


@pytest.mark.parametrize("name", ["states", "replay", "wanted", "observed", "expected"])
def test_what_was_not_looked_at_is_said_and_decides_nothing(name: str) -> None:
    partly = made.times(made.healthy(), **{name: None})
    found = conclude(partly)
    assert found.cause == "none" and name in found.verdict and not decided(partly)
    assert any(name in told for told in found.next_experiments)
    assert decided(made.times(partly, skipped={name: "not here"}))


def paper(k: int, accuracy: float, seen: float) -> Dossier:
    """The paper check alone: expected by a conditional accuracy, observed as a share of drafts."""
    rates = [accuracy ** (i + 1) for i in range(k)]
    observed = made.length([r * seen * k / sum(rates) for r in rates], 2000)
    return Dossier(
        subject=Subject(engine="vllm", target="t", drafter="d", k=k),
        expected=Expected(acceptance=made.length(rates, 2000), proof=1.0, break_even=2.2),
        observed=Observed(acceptance=observed, temperature=0.0, concurrency=4),
    )


def test_sixty_percent_at_five_drafts_is_twenty_eight_percent_accepted() -> None:
    found = conclude(paper(5, 0.6, 0.28))
    assert found.cause == "none" and not found.collapse
    assert "28% of the drafts" in found.verdict and "k = 5" in found.verdict
    assert "60%" in found.verdict and "2.20" in found.verdict


def test_fifteen_percent_of_three_drafts_is_a_collapse_and_below_break_even() -> None:
    found = conclude(paper(3, 0.6, 0.15))
    assert found.collapse and found.cause == "unknown"
    assert found.stage is not None and "between the expected and the observed" in found.stage
    assert "15%" in found.verdict and "39%" in found.verdict and "2.20" in found.verdict
    assert [s.lost for s in found.waterfall][1] == pytest.approx(0.726, abs=0.01)


def test_a_gap_at_another_k_is_judged_at_the_common_one() -> None:
    long = paper(5, 0.6, 0.28)
    short = paper(3, 0.6, 0.392)
    mixed = made.times(long, observed=short.observed)
    assert conclude(mixed).cause == "none"
    assert conclude(made.times(mixed, observed=paper(3, 0.6, 0.2).observed)).collapse


def test_a_stage_is_named_where_no_cause_fits() -> None:
    odd = made.differs((0.6, 0.55, 0.5), alone=made.some(0.6), batched=made.some(0.6))
    assert odd.replay is not None
    found = conclude(made.times(odd, replay=made.times(odd.replay, later_calls=made.some(0.98))))
    assert found.cause == "unknown"
    assert found.stage is not None and "between capture and proposal" in found.stage
    later = made.differs((0.985, 0.6, 0.5))
    assert later.replay is not None
    where = "at draft positions \N{GREATER-THAN OR EQUAL TO} 1 of the drafter"
    assert located(later) == f"between capture and proposal, {where}"
    strange = conclude(made.handed(made.bad("hidden[{1}]", cosine=0.5, own=0.45)))
    assert strange.cause == "unknown"
    assert strange.stage is not None and "the drafter's door" in strange.stage


def now_and_then(explained: float) -> Dossier:
    """Three calls of ten are read otherwise; of these one reading gives a share."""
    found = made.lose(made.healthy(), "execution", 0.7)
    assert found.replay
    others = [
        made.times(made.agreement(n, 0.2), explains=made.some(0.05, 200))
        for n in made.EXECUTION_READINGS
        if n != "tokens not shifted"
    ]
    fits = (
        made.times(made.agreement(AS_DECLARED, 0.7), explains=made.some(0.0, 200)),
        made.times(made.agreement("tokens not shifted", 0.4), explains=made.some(explained, 200)),
        *others,
    )
    return made.times(found, replay=made.times(found.replay, readings=fits))


def test_a_fault_of_some_calls_is_named_by_the_calls_it_explains() -> None:
    found = conclude(now_and_then(0.97))
    assert found.cause == "token_shift"
    assert any("of the calls that are not as declared it gives" in s for s in evidence(found))
    assert conclude(now_and_then(0.4)).cause == "token_shift"  # others give a twentieth
    assert conclude(now_and_then(0.3)).cause == "token_shift"
    unsure = conclude(now_and_then(0.14))
    assert unsure.cause == "unknown" and unsure.ranked[0].cause == "token_shift"  # and yet told


@pytest.mark.parametrize(("beaten", "named"), [(0.9, True), (0.55, False)])
def test_of_calls_that_several_readings_give_the_one_that_gives_surely_more_is_named(
    beaten: float, named: bool
) -> None:
    """A share of the rows that lie before goes wrong too: no reading gives all the calls."""
    found = now_and_then(0.56)
    assert found.replay
    own, most, *others = found.replay.readings
    fits = [
        made.times(r, explains=made.some(0.35, 200), beaten=made.some(beaten, 60)) for r in others
    ]
    replay = made.times(found.replay, readings=(own, most, *fits))
    told = conclude(made.times(found, replay=replay))
    assert (told.cause == "token_shift") is named
    assert told.cause in ("token_shift", "unknown")


def test_calls_that_no_reading_surely_explains_exclude_nothing() -> None:
    """Most proposals are as declared, and a seventh of the calls is not."""
    found = made.healthy()
    own, *others = found.replay.readings
    odd = made.some(0.0, 180)
    fits = (
        made.times(own, explains=odd),
        *(made.times(r, explains=made.some(0.52, 180)) for r in others[:1]),
        *(
            made.times(r, explains=made.some(0.4, 180), beaten=made.some(0.6, 40))
            for r in others[1:]
        ),
    )
    told = made.times(found, replay=made.times(found.replay, readings=fits))
    first = naming.cause_of_reading(others[0].reading)
    assert first is not None
    by_replay = {p.cause: p.weight for p in points(told) if p.experiment == "replay"}
    assert by_replay[first] > 0 and "positions" not in by_replay
    assert all(weight > -2 for c, weight in by_replay.items() if CAUSES[c].stage == "execution")


def evidence(found: Diagnosis) -> tuple[str, ...]:
    return found.ranked[0].evidence_for


@pytest.mark.parametrize(("less", "low", "named"), [(0.3, 0.2, True), (0.3, -0.01, False)])
def test_the_loss_may_say_that_a_gain_is_no_chance(less: float, low: float, named: bool) -> None:
    found = made.trained_for("target's rope", factor=0.85)
    assert found.wanted
    fits = [
        made.times(fit, gain_low=-0.01 * fit.gain, loss_less=less, loss_less_low=low)
        if fit.reading == "target's rope"
        else fit
        for fit in found.wanted.readings
    ]
    told = conclude(made.times(found, wanted=made.times(found.wanted, readings=tuple(fits))))
    assert (told.cause == "rope") is named


def test_of_a_drafter_that_is_mostly_wrong_the_loss_says_nothing() -> None:
    found = made.badly_trained()
    assert found.wanted
    less_sure = made.times(
        made.reading("states halved", (0.22, 0.06, 0.01), (0.2, 0.05, 0.01)),
        gain_low=-0.001,
        loss_less=0.3,
        loss_less_low=0.25,
    )
    own = next(r for r in found.wanted.readings if r.reading == AS_DECLARED)
    fits = (less_sure, own, *(r for r in found.wanted.readings if r is not own))
    told = made.times(found, wanted=made.times(found.wanted, readings=fits))
    assert not wanted.better(told)
    assert conclude(told).cause == conclude(found).cause


def test_lost_tensors_explain_drafts_that_fall_as_of_one_training_step() -> None:
    found = made.badly_trained((0.68, 0.2, 0.04))
    assert conclude(found).cause == "trained_one_step"
    assert conclude(made.audited(found, "tensors_damaged", "error")).cause == "tensors_damaged"
    assert conclude(made.audited(found, "tensors_damaged", "note")).cause == "trained_one_step"


def test_answers_that_end_at_once_are_the_form_of_the_prompts() -> None:
    few = paper(3, 0.6, 0.6)
    few = made.times(
        few,
        observed=made.times(few.observed, acceptance=made.length((0.6, 0.4, 0.3), 12)),
        expected=made.times(few.expected, acceptance=made.length((0.6, 0.4, 0.3), 12)),
    )
    assert conclude(few).cause == "unknown"  # twelve steps show nothing, and no health either
    assert not decided(few)
    told = made.toggled(few, "chat template", "template", 0.9, 1.0, "undecided")
    (toggle,) = told.toggles
    short = made.times(toggle, length_a=made.length((0.6, 0.4, 0.3), 12))
    assert conclude(made.times(told, toggles=(short,))).cause == "template"
    assert conclude(told).cause == "unknown"


@pytest.mark.parametrize(("drafts", "whole"), [(36, False), (200, True)])
def test_that_nothing_is_wrong_is_not_decided_by_a_few_steps(drafts: int, whole: bool) -> None:
    """A target that ends its answers at once: the other form of the prompts is to be asked yet."""
    found = made.healthy()
    short = made.length((0.69, 0.46, 0.305), drafts)
    found = made.times(
        found,
        expected=made.times(found.expected, acceptance=short),
        observed=made.times(found.observed, acceptance=short),
    )
    assert conclude(found).cause == "none"
    assert decided(found) is whole


def test_prompts_of_random_tokens_are_told_before_the_drafter_is_blamed() -> None:
    found = made.badly_trained()
    assert found.expected
    for surprise, cause in ((1.8, "degenerate_text"), (0.4, conclude(found).cause)):
        expected = made.times(found.expected, prompt_surprise=surprise)
        assert conclude(made.times(found, expected=expected)).cause == cause


def test_a_gain_over_a_few_steps_is_none() -> None:
    found = made.trained_for("target's rope")
    assert found.wanted
    few = [
        made.times(r, acceptance=made.length((0.6, 0.4, 0.3), 14)) for r in found.wanted.readings
    ]
    assert wanted.better(found)
    assert not wanted.better(made.times(found, wanted=made.times(found.wanted, readings=few)))


def test_what_the_files_point_to_is_one_question_and_not_one_of_seventy() -> None:
    found = made.trained_for("target's rope", factor=0.85)
    assert found.wanted

    def with_low(fit: Any) -> Any:  # 2.7 standard errors: by chance in one of some hundred looks
        gain = fit.gain or 0.0
        return made.times(fit, gain_low=gain * (1 - 1.96 / 2.7), gain_high=gain * 1.73)

    other = made.reading("other layers (1, 3, 5)", made.scaled(0.6), made.scaled(0.85))
    fits = [with_low(f) if f.reading == "target's rope" else f for f in found.wanted.readings]
    many = tuple(fits) + (other,) * 50
    blind = made.times(found, wanted=made.times(found.wanted, readings=many))
    assert not wanted.better(blind)
    assert wanted.better(made.audited(blind, "rope", "warning"))
    assert not wanted.better(made.audited(blind, "rope", "note"))


def test_hints_alone_name_nothing() -> None:
    hinted = made.audited(made.healthy(), "layers_shifted")
    assert conclude(hinted).cause == "none"
    hinted = made.audited(paper_with_audit(), "layers_shifted")
    assert conclude(hinted).cause == "unknown"


def paper_with_audit() -> Dossier:
    return made.times(paper(3, 0.6, 0.15), audit=Audit(findings=()))


def test_rows_a_little_off_that_cost_nothing_are_no_fault() -> None:
    noisy = made.times(made.healthy(), states=made.states(made.bad(None, own=0.99, share=0.5)))
    assert conclude(noisy).cause == "none"


def unnormed_last(s: SlotFit) -> SlotFit:
    """The last layer's output where its normed state is declared."""
    if s.slot < 2:
        return s
    best = Fit(candidate="hidden[61]", cosine=0.9999, scale=1.0)
    declared = Fit(candidate="normed[61]", cosine=0.993, scale=1.0)
    return made.times(
        s, declared=declared.candidate, best=best, as_declared=declared, bad_share=0.99
    )


def test_the_last_layer_without_its_norm_is_no_other_layer() -> None:
    """vLLM hands it over so. Where that costs nothing, what the drafter was trained for counts."""
    wrong = made.trained_for("layers off by +1 (4, 32, 60)")
    assert conclude(wrong).cause == "layers_shifted"
    found = made.times(wrong, states=made.states(unnormed_last))
    assert conclude(found).cause == "layers_shifted"
    early = made.times(found, replay=None, wanted=None, target=None)
    assert not decided(early) and conclude(early).cause != "layers_order"
    lost = made.times(made.lose(made.healthy(), "states"), states=made.states(unnormed_last))
    assert conclude(lost).cause == "states_normed"


@pytest.mark.parametrize("named", [True, False])
def test_one_state_where_three_are_declared_is_another_algorithm(named: bool) -> None:
    """EAGLE over an EAGLE-3 head: what the one state is follows from it, and is no cause."""
    found = conclude(made.one_slot(named))
    assert found.cause == "wrong_method" and found.ranked[0].strength == "certain"
    assert "one state a token" in " ".join(found.ranked[0].evidence_for)
    assert score(made.one_slot(named), "states_normed") < 3


def test_three_states_that_are_normed_are_no_other_algorithm() -> None:
    assert score(made.CASES["states_normed"](), "wrong_method") < 1


def test_an_engine_that_mends_what_the_checkpoint_says_is_no_collapse() -> None:
    """The checkpoint says otherwise than trained, and the engine runs it as trained."""
    name = "norm_output toggled"
    wrong, does = made.trained_for(name), made.engine_runs(name)
    whole = made.times(wrong, replay=does.replay, observed=made.healthy().observed)
    assert conclude(whole).cause in ("none", "unknown", "norm_output")


def test_the_layers_of_the_remedy_are_those_of_the_training() -> None:
    found = conclude(made.CASES["layers_shifted"]()).ranked[0]
    assert found.details["trained_layers"] == "4,32,60"
    assert found.details["declared_layers"] == "3,31,59"
    assert "4, 32, 60" in found.remedy and "3, 31, 59" in found.remedy
    served = conclude(made.handed(made.bad("hidden[{1}]"))).ranked[0]
    assert served.cause == "layers_shifted" and served.details["served_layers"] == "2,30,58"


def test_what_the_drafter_was_trained_for_is_named_for_the_mending() -> None:
    found = conclude(made.CASES["norm_output"]()).ranked[0]
    assert found.details["reading"] == "norm_output toggled"
    assert found.details["channel"] == "wanted"
    does = conclude(made.CASES["norm_before_residual"]()).ranked[0]
    assert does.details["channel"] == "replay" and "vllm" in does.remedy


def test_a_wide_gap_makes_every_token_count() -> None:
    """Beside log-probabilities that are far off, 87% of the tokens are no matter of prompts."""
    dossier = made.handed(made.bad(None, own=0.91, scale=0.87), 0.6)
    argmax = Proportion(hits=116, of=133, low=0.777, high=0.93)
    for gap, wrong in ((0.026, True), (0.004, False)):
        parity = made.times(
            made.healthy().target, prompt_gap=0.004, decode_gap=gap, argmax=argmax, floor=0.005
        )
        found = conclude(made.times(dossier, target=parity))
        assert (found.cause == "target_computed_wrong") is wrong


@pytest.mark.parametrize(("hits", "wrong"), [(6, True), (0, False), (1, False)])
def test_greedy_tokens_that_no_rounding_explains_are_of_another_target(
    hits: int, wrong: bool
) -> None:
    """Half of a fault's tokens are near-ties; the median of the log-probabilities sees none."""
    dossier = made.handed(made.bad(None, own=0.97, scale=1.0), 0.94)
    parity = made.times(
        made.healthy().target,
        prompt_gap=0.0004,
        decode_gap=0.001,
        floor=0.005,
        argmax=made.some(0.96, 127),
        overruled=Proportion(hits=hits, of=140),
    )
    found = conclude(made.times(dossier, target=parity))
    assert (found.cause == "target_computed_wrong") is wrong
    if wrong:
        assert any("more than any rounding explains" in says for says in evidence(found))


def test_answers_that_are_not_the_targets_own_are_looked_into_before_all_is_right() -> None:
    early = made.times(made.healthy(), target=None)
    assert decided(early)
    other = made.times(early.observed, identical=made.some(0.4, 32))
    assert not decided(made.times(early, observed=other))
    alike = made.times(early.observed, identical=made.some(0.95, 32))
    assert decided(made.times(early, observed=alike))


@pytest.mark.parametrize(
    "names",
    [
        ("input norm added", "norm_before_residual toggled"),
        ("other layers (3, 31, 40)", "layers off by +1 (4, 32, 60)"),
    ],
)
def test_of_readings_that_are_accepted_alike_the_likelier_text_tells(
    names: tuple[str, str],
) -> None:
    low = made.scaled(0.3)

    def named(losses: tuple[float, float]) -> str:
        fits = [
            made.times(made.reading(name, made.scaled(1 - 0.01 * i), low), loss=loss)
            for i, (name, loss) in enumerate(zip(names, losses, strict=True))
        ]
        found = made.trained_for(names[0], 0.3)
        own = next(r for r in found.wanted.readings if r.reading == AS_DECLARED)
        told = made.times(found, wanted=made.times(found.wanted, readings=(*fits, own)))
        return wanted.better(told)[0].reading

    assert named((0.43, 0.45)) == names[0]
    assert named((0.45, 0.43)) == names[1]


@pytest.mark.parametrize(("first", "cause"), [(0.17, "undertrained"), (0.7, "lm_head_replaced")])
def test_a_reading_that_leaves_a_bad_drafter_bad_is_not_what_it_was_trained_for(
    first: float, cause: str
) -> None:
    """Noise in every tensor: with a head that has none the drafter is less bad."""
    low, better = (0.09, 0.02, 0.01), (first, first**2, first**3)
    found = made.badly_trained(low)
    fits = (made.reading("target's lm_head", better, low), *found.wanted.readings)
    told = conclude(made.times(found, wanted=made.times(found.wanted, readings=fits)))
    assert told.cause == cause


def test_a_last_norm_of_ones_is_lost_and_not_the_head_behind_it() -> None:
    dossier = made.trained_for("target's lm_head", 0.7)
    assert conclude(dossier).cause == "lm_head_replaced"
    ones = AuditFinding(
        severity="note", code="norm_untrained", what="norm norm.weight is 1 everywhere"
    )
    audit = made.times(dossier.audit, findings=(ones,))
    assert conclude(made.times(dossier, audit=audit)).cause == "final_norm"


def test_noise_that_costs_drafts_is_told_once_the_target_is_known_to_be_right() -> None:
    """The prompts' own spread hides the loss; over one text the steps show it."""
    less = made.length(made.scaled(0.72), spread=0.45)
    found = made.handed(made.bad(None, own=0.86, scale=1.17), 0.72)
    found = made.times(
        found,
        expected=made.times(found.expected, acceptance=made.length(made.GOOD, spread=0.45)),
        observed=made.times(found.observed, acceptance=less, identical=made.some(1.0, 24)),
        replay=made.times(found.replay, on_engine_states=less, proposals=less),
    )
    assert conclude(found).cause == "states_noisy"
    open_ = made.times(found, target=None)
    assert conclude(open_).cause == "unknown" and not decided(open_)


def test_readings_are_compared_over_the_same_tokens() -> None:
    """All 741 against 683 of the same proposals, although prompts differ widely."""
    found = made.engine_runs("cache not overwritten", factor=0.95)
    assert found.replay is not None
    fits = [
        made.times(r, agreement=Proportion(hits=hits, of=741, low=low, high=high))
        for r, hits, low, high in (
            (found.replay.readings[0], 741, 0.668, 1.0),
            (found.replay.readings[1], 683, 0.855, 0.959),
        )
    ]
    replay = made.times(found.replay, readings=tuple(fits))
    assert conclude(made.times(found, replay=replay)).cause == "kv_not_overwritten"


def test_wrong_counters_are_no_collapse() -> None:
    found = conclude(made.CASES["counting"]())
    assert found.cause == "counting" and not found.collapse
    assert "they say 1.60 tokens a step, and 2.46 were accepted" in found.verdict


@pytest.mark.parametrize(("hits", "named"), [(10, True), (4, False), (0, False)])
def test_few_tokens_can_tell_of_targets_without_the_norm(hits: int, named: bool) -> None:
    """A norm that is nearly even changes few tokens, and a drafter that draws those is told."""
    wanted = made.times(made.healthy().wanted, unnormed_head=Proportion(hits=hits, of=13))
    found = conclude(made.times(made.healthy(), wanted=wanted))
    assert found.cause == ("trained_without_norm" if named else "none")


def test_near_ties_of_a_few_prompts_do_not_tell_of_targets_without_the_norm() -> None:
    """The demo pair: of 249 first drafts 5 differ, all near-ties, and 4 went the other way."""
    drawn = Proportion(hits=4, of=5, low=0.14, high=0.99)
    wanted = made.times(made.healthy().wanted, unnormed_head=drawn)
    assert conclude(made.times(made.healthy(), wanted=wanted)).cause == "none"
    surely = made.times(wanted, unnormed_head=Proportion(hits=10, of=13, low=0.4, high=0.95))
    told = conclude(made.times(made.healthy(), wanted=surely))
    assert told.cause == "trained_without_norm"


@pytest.mark.parametrize(
    ("tokens", "states", "cause"),
    [
        (0.9, 0.1, "trained_on_mixed_states"),
        (0.1, 0.9, "trained_on_mixed_states"),
        (0.7, 0.1, "trained_one_step"),
        (0.9, 0.9, "trained_one_step"),
    ],
)
def test_a_drafter_that_does_not_look_at_its_tokens_was_trained_on_others(
    tokens: float, states: float, cause: str
) -> None:
    """Its later drafts fall as of one training step: these rest on its own tokens still more."""
    found = made.badly_trained(
        (0.6, 0.2, 0.06),
        without_tokens=made.some(tokens, 200),
        without_states=made.some(states, 200),
    )
    assert conclude(found).cause == cause


@pytest.mark.parametrize(
    ("hits", "low", "named"), [(4, 0.02, True), (4, -0.1, False), (1, 0.02, False)]
)
def test_few_tokens_and_all_distributions_together_tell_of_targets_without_the_norm(
    hits: int, low: float, named: bool
) -> None:
    drawn = Proportion(hits=hits, of=4, low=0.2, high=1.0)
    told = made.times(
        made.healthy().wanted, unnormed_head=drawn, unnormed_less=0.25, unnormed_less_low=low
    )
    found = conclude(made.times(made.healthy(), wanted=told))
    assert found.cause == ("trained_without_norm" if named else "none")


def test_drafts_that_are_nearer_to_the_targets_own_distributions_were_trained_so() -> None:
    """Tokens that differ without the norm are few, and near-ties: half of 19 are no proof."""
    drawn = Proportion(hits=12, of=19, low=0.4, high=0.8)
    told = made.times(made.healthy().wanted, unnormed_head=drawn)
    assert conclude(made.times(made.healthy(), wanted=told)).cause == "trained_without_norm"
    for less, low, cause in ((-0.25, -0.34, "none"), (0.05, -0.2, "trained_without_norm")):
        both = made.times(told, unnormed_less=less, unnormed_less_low=low)
        assert conclude(made.times(made.healthy(), wanted=both)).cause == cause


def test_a_run_that_was_accepted_less_than_now_is_told() -> None:
    observed = made.times(made.healthy().observed, in_run=made.length(made.scaled(0.3)))
    found = conclude(made.times(made.healthy(), observed=observed))
    assert found.cause == "unknown" and found.stage is not None and "stored run" in found.stage


@pytest.mark.parametrize(
    ("got", "named", "cause"),
    [
        ((4, 32, 60), True, "layers_shifted"),
        ((2, 30, 58), True, "layers_shifted"),
        ((59, 31, 3), True, "layers_order"),
        ((2, 30, 57), True, "layers_default"),
        ((3, 31, 40), True, "layers_other"),
        ((2, 30, 58), False, "layers_default"),
    ],
)
def test_lists_of_layers(got: tuple[int, ...], named: bool, cause: str) -> None:
    assert naming.layers_cause((3, 31, 59), got, default=(2, 30, 57), named=named) == cause


def test_names_of_states() -> None:
    found = naming.candidate_of("hidden[31]@-1")
    assert (found.kind, found.layer, found.moved) == ("hidden", 31, -1)
    assert naming.candidate_of("other request").kind == "other request"
    assert naming.candidate_of("partial[3]").kind == "partial"
    assert naming.candidate_of("hidden[" + "9" * 5000).kind == "else"


ANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@ANY
@given(DOSSIERS)
def test_any_dossier_has_a_verdict(dossier: Dossier) -> None:
    found = conclude(dossier)
    assert found.cause in ("none", "unknown", *CAUSES)
    assert found.verdict.endswith(".") and "nan" not in found.verdict.lower().split()
    wrong = troubled(dossier, points(dossier))  # else too little was seen to say so
    assert (found.stage is not None) == (found.cause == "unknown" and wrong)
    if found.cause in CAUSES:
        assert found.ranked[0].cause == found.cause
    scores = [r.score for r in found.ranked]
    assert scores == sorted(scores, reverse=True)
    decided(dossier)
    assert msgspec.json.decode(msgspec.json.encode(found))["cause"] == found.cause


def shuffled(dossier: Dossier, rng: random.Random) -> Dossier:
    def mixed(values: Any) -> Any:
        return tuple(rng.sample(list(values), len(values)))

    changes: dict[str, Any] = {"toggles": mixed(dossier.toggles)}
    if dossier.audit is not None:
        audit = made.times(dossier.audit, findings=mixed(dossier.audit.findings))
        changes["audit"] = audit
    if dossier.states is not None:
        places = dict(mixed(dossier.states.bad_by_step.items()))
        slots = mixed(dossier.states.slots)
        changes["states"] = made.times(dossier.states, slots=slots, bad_by_step=places)
    for name in ("replay", "wanted"):
        part = getattr(dossier, name)
        if part is not None:
            changes[name] = made.times(part, readings=mixed(part.readings))
    return made.times(dossier, **changes)


@pytest.mark.parametrize("cause", sorted(made.CASES))
def test_the_order_of_the_evidence_does_not_matter(cause: str) -> None:
    dossier = made.CASES[cause]()
    for seed in range(3):
        again = shuffled(dossier, random.Random(seed))
        assert points(again) == points(dossier)
        assert conclude(again) == conclude(dossier)


@pytest.mark.parametrize("cause", sorted(CAUSES))
@pytest.mark.parametrize("case", ["healthy", "undertrained", "states_moved", "recurrence"])
def test_more_evidence_for_a_cause_never_lowers_it(cause: str, case: str) -> None:
    dossier = made.healthy() if case == "healthy" else made.CASES[case]()
    before = score(dossier, cause)
    for severity in ("note", "warning", "error"):
        assert score(made.audited(dossier, cause, severity), cause) >= before
    assert score(made.toggled(dossier, "a switch", cause, 0.5, 1.0, "b"), cause) > before
    assert score(made.toggled(dossier, "a switch", cause, 1.0, 1.0, "same"), cause) < before
    for name, reading in READINGS.items():
        if reading.cause == cause and dossier.replay and name != AS_DECLARED:
            fits = [r for r in dossier.replay.readings if r.reading != name]
            better = made.times(dossier.replay, readings=(*fits, made.agreement(name, 1.0)))
            assert score(made.times(dossier, replay=better), cause) >= before


@ANY
@given(DOSSIERS, st.sampled_from(sorted(CAUSES)))
def test_a_hint_of_a_cause_never_lowers_it(dossier: Dossier, cause: str) -> None:
    audit = dossier.audit or Audit(findings=())
    dossier = made.times(dossier, audit=audit)
    assert score(made.audited(dossier, cause), cause) >= score(dossier, cause)


@pytest.mark.parametrize("part", ["states", "replay", "wanted", "target", "controls", "audit"])
@pytest.mark.parametrize("cause", sorted(made.CASES))
def test_less_evidence_never_gives_another_name_surely(cause: str, part: str) -> None:
    """Without one experiment the cause, its class, nothing or `unknown`: never a sure other."""
    found = conclude(made.times(made.CASES[cause](), **{part: None}))
    if found.cause in CAUSES and not same_class(found.cause, cause):
        assert found.ranked[0].strength != "certain", found.verdict


def test_a_healthy_drafter_is_hardly_ever_called_faulty_by_chance() -> None:
    called = {}
    for seed in range(300):
        found = conclude(healthy_by_chance(seed))
        if found.cause != "none":
            called[seed] = found.verdict[:160]
    assert len(called) <= 3, called


def test_what_was_left_out_is_told_beside_no_fault() -> None:
    whole = made.healthy()
    skipped = {
        "states": "a server that runs already writes no trace: let the harness start the engine",
        "replay": "a server that runs already writes no trace: let the harness start the engine",
        "wanted": "left out (--only)",
        "target": "it failed (KeyError: 'x')",
        "toggles": "no switch",
    }
    none = dict.fromkeys(("states", "replay", "wanted", "target"))
    found = conclude(made.times(whole, **none, skipped=skipped))
    assert found.cause == "none"
    assert found.verdict.endswith(
        " (not looked at: states, replay [a server that runs already writes no trace]; wanted "
        "[left out (--only)]; target [it failed (KeyError: 'x')])."
    )
    assert found.verdict.startswith("No fault in what was looked at: 49%")
    skipped = {"target": "not needed: it is certain"}
    needless = made.times(whole, target=None, skipped=skipped, needless=("target",))
    assert "not looked at" not in conclude(needless).verdict
    assert "not looked at: target" in conclude(made.times(needless, needless=())).verdict
    bare = conclude(Dossier(subject=whole.subject, skipped={"audit": "left out (--skip)"}))
    assert "could show one (not looked at: audit [left out (--skip)]; expected" in bare.verdict
    why = "http://127.0.0.1:8000: no prompt was answered: HTTP 500"
    unanswered = conclude(Dossier(subject=whole.subject, skipped={"observed": why}))
    assert "observed [no prompt was answered]" in unanswered.verdict
