"""What was looked at excludes a cause only where it could have shown it."""

from __future__ import annotations

from typing import Any

import diagnose_cases as made
import pytest
from diagnose_any import DOSSIERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.diagnose.readings import AS_DECLARED
from harness.diagnose.records import (
    AuditFinding,
    Diagnosis,
    Dossier,
    Length,
    Point,
    Proportion,
    Ranked,
    ReadingFit,
)
from harness.diagnose.rules import power
from harness.diagnose.rules.points import points
from harness.diagnose.verdict import conclude

SHIFTED = "layers off by +1 (4, 32, 60)"
ANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def ranked(dossier: Dossier, cause: str) -> Ranked:
    return next(r for r in conclude(dossier).ranked if r.cause == cause)


def gaining(found: Dossier, name: str, gain: float, half: float) -> Dossier:
    """The reading gains so much over the checkpoint's own, give or take `half`."""
    assert found.wanted
    fits = [
        made.times(fit, gain=gain, gain_low=gain - half, gain_high=gain + half)
        if fit.reading == name
        else fit
        for fit in found.wanted.readings
    ]
    return made.times(found, wanted=made.times(found.wanted, readings=tuple(fits)))


def off_by_one(found: Dossier, gain: float, half: float) -> Dossier:
    """Both readings whose layers are off by one."""
    for name in (SHIFTED, "layers off by -1 (2, 30, 58)"):
        found = gaining(found, name, gain, half)
    return found


@pytest.mark.parametrize(
    ("gain", "half", "strength"),
    [(0.0, 0.04, "possible"), (-0.03, 0.05, "possible"), (-0.1, 0.04, "excluded")],
)
def test_where_little_is_accepted_a_reading_that_is_no_better_may_be_the_right_one(
    gain: float, half: float, strength: str
) -> None:
    low = off_by_one(made.badly_trained((0.25, 0.08, 0.02)), gain, half)
    found = ranked(low, "layers_shifted")
    assert found.strength == strength
    assert bool(found.undecided) == (strength == "possible")
    assert bool(found.evidence_against) == (strength == "excluded")
    told = conclude(low)
    assert told.cause == "undertrained" or told.cause == "trained_on_mixed_states"
    assert ("layers_shifted as well" in told.verdict) == (strength == "possible")


@pytest.mark.parametrize(
    ("gain", "half", "strength"),
    [(-0.05, 0.04, "excluded"), (0.0, 0.03, "excluded"), (-0.05, 0.2, "possible")],
)
def test_where_much_is_accepted_a_right_reading_would_have_been_seen_to_be_better(
    gain: float, half: float, strength: str
) -> None:
    high = off_by_one(made.healthy(), gain, half)
    assert ranked(high, "layers_shifted").strength == strength
    assert conclude(high).cause == "none"


def test_of_several_readings_of_a_cause_each_must_be_ruled_out() -> None:
    one = gaining(made.healthy(), SHIFTED, 0.0, 0.3)
    assert ranked(one, "layers_shifted").strength == "possible"


@pytest.mark.parametrize(("spread", "strength"), [(0.03, "excluded"), (0.4, "possible")])
@pytest.mark.parametrize(
    ("cause", "field"), [("overfit", "trained"), ("other_target", "other_target")]
)
def test_another_text_that_is_accepted_alike_excludes_only_where_both_are_known(
    cause: str, field: str, spread: float, strength: str
) -> None:
    rates = (0.25, 0.08, 0.02)
    found = made.badly_trained(rates, **{field: made.length(rates, spread=spread)})
    assert found.wanted
    own = next(r for r in found.wanted.readings if r.reading == AS_DECLARED)
    fits = [r for r in found.wanted.readings if r is not own]
    near = made.times(own, acceptance=made.length(rates, spread=spread / 4))
    found = made.times(found, wanted=made.times(found.wanted, readings=(near, *fits)))
    assert ranked(found, cause).strength == strength


@pytest.mark.parametrize(("drafts", "strength"), [(4000, "excluded"), (40, "possible")])
def test_a_few_sampled_steps_do_not_exclude_a_strict_rejection(drafts: int, strength: str) -> None:
    found = made.sampled(2.3, 2.3, 2.25, 0.3)
    assert found.sampling
    seen = made.length([1.3 / 3] * 3, drafts)
    found = made.times(found, sampling=made.times(found.sampling, observed=seen))
    assert ranked(found, "strict_rejection").strength == strength


def fewer(found: Dossier, **changes: Any) -> Dossier:
    """Less looked at: `part__field=value`."""
    for key, value in changes.items():
        part, field = key.split("__")
        found = made.times(found, **{part: made.times(getattr(found, part), **{field: value})})
    return found


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("verification", {"replay__verified": made.some(1.0, 21)}),
        ("target_computed_wrong", {"target__argmax": made.some(1.0, 20)}),
        ("proposals_other_request", {"replay__batched": None}),
        ("proposals_other_request", {"replay__batched": made.some(1.0, 8)}),
        ("prefix_reuse", {"states__bad_by_step": {}}),
        ("states_other_request", {"states__bad_by_step": {"batched": made.some(0.0, 9)}}),
    ],
)
def test_what_was_hardly_looked_at_excludes_nothing(cause: str, changes: dict[str, Any]) -> None:
    whole = made.healthy()
    assert ranked(whole, cause).strength == "excluded"
    found = fewer(whole, **changes)
    assert ranked(found, cause).strength == "possible" and ranked(found, cause).undecided
    assert conclude(found).cause == "none"


def test_few_rows_and_few_proposals_exclude_nothing() -> None:
    whole = made.healthy()
    assert whole.states and whole.replay
    first = made.times(whole.states.slots[0], rows=9, bad_share=0.0)
    rows = fewer(whole, states__slots=(first,))
    assert ranked(rows, "states_stale").strength == "possible"
    own, *others = whole.replay.readings
    few = made.times(own, agreement=made.some(1.0, 10), by_draft=())
    assert not any(
        p.weight < 0
        for p in points(fewer(whole, replay__readings=(few, *others)))
        if p.experiment == "replay" and p.cause == "recurrence"
    )


def test_a_few_answers_do_not_exclude_loops() -> None:
    whole = made.healthy()
    assert ranked(whole, "degenerate_text").strength == "excluded"
    two = made.times(made.length(made.GOOD), prompts=2)
    assert ranked(fewer(whole, expected__acceptance=two), "degenerate_text").undecided


def test_a_drafter_that_is_seldom_right_draws_few_tokens_of_either_head() -> None:
    drawn = made.some(0.12, 300)
    bad = made.badly_trained((0.15, 0.03, 0.01), unnormed_head=drawn)
    assert ranked(bad, "trained_without_norm").undecided
    good = made.times(made.healthy().wanted, unnormed_head=drawn)
    well = made.times(made.healthy(), wanted=good)
    assert ranked(well, "trained_without_norm").strength == "excluded"


def wider(found: Length | Proportion | None, by: float) -> Any:
    if found is None or found.low is None or found.high is None or not found.low <= found.high:
        return found
    return made.times(found, low=found.low - by, high=found.high + by)


def wider_fit(fit: ReadingFit, by: float) -> ReadingFit:
    """Every interval of a reading's fit wider by so much at both ends."""

    def less(value: float | None) -> float | None:
        return None if value is None else value - by

    return made.times(
        fit,
        agreement=wider(fit.agreement, by),
        explains=wider(fit.explains, by),
        by_draft=tuple(wider(p, by) for p in fit.by_draft),
        acceptance=wider(fit.acceptance, by),
        gain_low=less(fit.gain_low),
        gain_high=None if fit.gain_high is None else fit.gain_high + by,
        loss_less_low=less(fit.loss_less_low),
    )


def against(found: list[Point]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for p in found:
        weights[p.cause] = weights.get(p.cause, 0.0) + min(p.weight, 0.0)
    return weights


def assert_no_more_against(dossier: Dossier, which: int, by: float) -> None:
    wide = dossier
    for name in ("wanted", "replay"):
        part = getattr(dossier, name)
        if part is None:
            continue
        fits = [
            wider_fit(fit, by) if which < 0 or at == which else fit
            for at, fit in enumerate(part.readings)
        ]
        wide = made.times(wide, **{name: made.times(part, readings=tuple(fits))})
    before, after = against(points(dossier)), against(points(wide))
    for cause, weight in after.items():
        assert weight >= before.get(cause, 0.0) - 1e-9, cause


@ANY
@given(DOSSIERS, st.integers(-1, 4), st.floats(0, 3))
def test_a_wider_interval_never_adds_evidence_against_a_cause(
    dossier: Dossier, which: int, by: float
) -> None:
    assert_no_more_against(dossier, which, by)


@pytest.mark.parametrize("cause", ["healthy", *sorted(made.CASES)])
def test_a_wider_interval_adds_nothing_against_a_cause_in_typical_dossiers(cause: str) -> None:
    dossier = made.healthy() if cause == "healthy" else made.CASES[cause]()
    for by in (0.02, 0.1, 0.5, 2.0):
        for which in (-1, 0, 1, 5):
            assert_no_more_against(dossier, which, by)


def test_no_power_is_a_point_without_weight() -> None:
    (able,) = power.against(["rope"], 4.0, "looked at", "wanted", able=True)
    (unable,) = power.against(["rope"], 4.0, "looked at", "wanted", able=False)
    assert (able.weight, able.says) == (-4.0, "looked at")
    assert (unable.weight, unable.says) == (0.0, "looked at: that cannot tell")


# -- tensors that are not finite -----------------------------------------------------------


def not_finite(found: Dossier, tensor: str = "fc.weight", cause: str = "tensors_damaged") -> Any:
    told = AuditFinding(
        severity="error",
        code="not_finite",
        what=f"tensor {tensor} holds 9 NaN and 0 infinite of 100",
        cause=cause,
    )
    assert found.audit
    return made.times(found, audit=made.times(found.audit, findings=(told,)))


NOTHING = (0.0, 0.0, 0.0)


def random_prompts(found: Dossier) -> Dossier:
    assert found.expected
    return made.times(found, expected=made.times(found.expected, prompt_surprise=1.8))


@pytest.mark.parametrize(
    ("tensor", "cause"),
    [("fc.weight", "tensors_damaged"), ("embed_tokens.weight", "embeddings_replaced")],
)
def test_numbers_that_are_none_lead_whatever_the_prompts_are(tensor: str, cause: str) -> None:
    broken = random_prompts(made.badly_trained((0.02, 0.0004, 0.00001)))
    assert conclude(broken).cause == "degenerate_text"
    found = conclude(not_finite(broken, tensor, cause))
    assert found.cause == "tensors_damaged" and found.ranked[0].strength == "certain"
    assert "NaN" in found.ranked[0].evidence_for[0]


def test_numbers_that_are_none_lead_where_another_reading_does_without_them() -> None:
    found = not_finite(made.trained_for("target's lm_head", 0.02), "lm_head.weight")
    assert conclude(found).cause == "tensors_damaged"


def test_numbers_that_are_none_and_cost_nothing_are_a_hint() -> None:
    assert conclude(not_finite(made.healthy())).cause == "none"


# -- what the verdict says -----------------------------------------------------------------


def asked_of(found: Dossier, dataset: str | None) -> Diagnosis:
    return conclude(made.times(found, subject=made.times(found.subject, dataset=dataset)))


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        ("builtin", "the built-in mix of prompts"),
        ("mine.jsonl", "the prompts of mine.jsonl"),
        (None, "the prompts that were asked"),
    ],
)
def test_a_bad_drafter_is_bad_on_the_prompts_that_are_named(
    dataset: str | None, named: str
) -> None:
    found = asked_of(made.badly_trained(), dataset)
    assert f"that holds for {named} alone" in found.verdict
    own = "ask the prompts that the drafter is for (--set workload.dataset=FILE)"
    assert found.ranked[0].remedy.startswith(own) == (dataset == "builtin")
    assert (own in found.next_experiments) == (dataset == "builtin")
    other = asked_of(made.CASES["rope"](), "builtin")
    assert own not in other.verdict and "alone" not in other.verdict


def test_a_cost_carries_its_interval() -> None:
    verdict = conclude(made.CASES["residual_missing"]()).verdict
    assert "1.59 (1.51 to 1.67) tokens a step instead of 2.48 (2.40 to 2.56)" in verdict


def test_an_advice_is_told_once() -> None:
    found = made.engine_runs("target's embeddings")
    told = [
        AuditFinding(
            severity="warning",
            code=code,
            what=code,
            remedy=f"{first}, or leave it out",
            cause="embeddings_replaced",
        )
        for code, first in (("a", "export the one of the training"), ("b", "store it again"))
    ]
    found = made.times(found, audit=made.times(found.audit, findings=tuple(told)))
    remedy = conclude(found).ranked[0].remedy
    assert remedy.count("leave") == 1
    assert remedy.endswith("; export the one of the training; store it again")


def test_nothing_lies_between_what_was_not_expected_and_what_was_observed() -> None:
    """`--only observed` of a server that drafts nothing, or hardly answers."""
    whole = made.healthy()
    assert whole.observed
    few = made.times(whole.observed, acceptance=made.length(made.GOOD, 5))
    alone = Dossier(subject=whole.subject, observed=few)
    found = conclude(alone)
    assert (found.cause, found.stage) == ("unknown", None)
    assert "too few verify steps" in found.verdict and "expected" not in found.verdict[:60]
    lost = made.times(whole.observed, in_run=made.length((0.2, 0.1, 0.05)))
    told = conclude(Dossier(subject=whole.subject, observed=lost))
    assert told.stage is not None and "between the expected" not in told.stage
    sure = made.toggled(Dossier(subject=whole.subject, observed=few), "a", "rope", 0.5, 1.0, "b")
    two = conclude(made.toggled(sure, "b", "template", 0.5, 1.0, "b"))
    assert two.stage is not None and "nothing was expected" in two.stage


def test_a_hint_of_the_files_is_not_named_by_prompts_that_cannot_tell() -> None:
    """Layer ids off by one on prompts that the drafter was never trained for."""
    low = off_by_one(made.badly_trained((0.25, 0.08, 0.02)), 0.02, 0.1)
    hinted = made.audited(low, "layers_shifted", "warning")
    found = conclude(hinted)
    assert found.cause in ("undertrained", "trained_on_mixed_states")
    assert ranked(hinted, "layers_shifted").strength == "possible"
    assert "layers_shifted as well" in found.verdict
