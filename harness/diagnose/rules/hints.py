"""What the audit, the toggles, the prompts and the controls say: hints, and what they weigh."""

from __future__ import annotations

from harness.diagnose.causes import CAUSES
from harness.diagnose.records import Dossier, Point, Proportion, Toggle
from harness.diagnose.rules import gap, power, training
from harness.diagnose.rules.measures import (
    FEWEST,
    finite,
    length,
    lost,
    number,
    percent,
    span,
)
from harness.diagnose.rules.weights import DECISIVE, GOOD, STRONG, WEAK, of_stage, point

SEVERE = {"error": GOOD, "warning": WEAK + 0.5, "note": 0.5}
LOOPS, MOSTLY = 0.3, 0.5
"""Shares of the answers that loop: enough to mislead, and enough to say little else."""
RANDOM = 1.0
"""Tokens drawn at random surprise a model no less than this, text a third of it at most."""
AT_ONCE = "requests at once"
"""The toggle whose `a` is one request at a time, and `b` as many as are served."""


def hint_points(dossier: Dossier) -> list[Point]:
    """Every hint of the dossier."""
    found = [*_audit(dossier), *_toggles(dossier), *_prompts(dossier), *_controls(dossier)]
    return [*found, *_nothing_accepted(dossier), *_not_finite(dossier)]


def _audit(dossier: Dossier) -> list[Point]:
    """What was read: a reason to look, seldom a proof. Each cause's gravest finding counts."""
    if dossier.audit is None:
        return []
    gravest: dict[str, Point] = {}
    for finding in dossier.audit.findings:
        if finding.cause not in CAUSES:
            continue
        weight = SEVERE[finding.severity]
        found = point(finding.cause, weight, f"{finding.what} ({finding.code})", "audit")
        old = gravest.get(finding.cause)
        if old is None or (found.weight, found.says) > (old.weight, old.says):
            gravest[finding.cause] = found
    return [gravest[cause] for cause in sorted(gravest)]


def _toggles(dossier: Dossier) -> list[Point]:
    """A switch that changes the acceptance points to its cause; one that changes nothing, away."""
    return [p for toggle in dossier.toggles for p in _toggle(toggle)]


def _toggle(toggle: Toggle) -> list[Point]:
    """Of a toggle `a` is how it is served: there is a fault if `b` is better."""
    if _unanswered(toggle):
        served, other = toggle.length_a.counts.drafts, toggle.length_b.counts.drafts
        says = f"as {toggle.a} prompts the questions are answered in {served} steps, all of them, "
        says += f"as {toggle.b} prompts in {other}"
        return [point("template", STRONG, says, f"toggle {toggle.what}")]
    if toggle.cause not in CAUSES or toggle.verdict == "undecided":
        return []
    says = f"{toggle.what}: {span(toggle.length_a)} tokens a step with {toggle.a}, "
    says += f"{span(toggle.length_b)} with {toggle.b}"
    name = f"toggle {toggle.what}"
    crowd = toggle.what == AT_ONCE  # `a` is one request alone: there the crowd is what may harm
    if toggle.verdict != ("a" if crowd else "b"):
        return [point(toggle.cause, -GOOD, says, name)]
    worse, better = toggle.length_a, toggle.length_b
    if crowd:
        worse, better = better, worse
    share = lost(worse, better) or 0.0
    weight = STRONG + WEAK if share > 0.2 else STRONG if share > 0.05 else GOOD
    if crowd:  # the toggle does not tell whether states or proposals are another request's
        both = dict.fromkeys((toggle.cause, "proposals_other_request"))
        return [point(cause, GOOD, says, name) for cause in both]
    return [point(toggle.cause, weight, says, name)]


def _unanswered(toggle: Toggle) -> bool:
    """Whether the target ends its answers at once in the form of prompts that is served.

    Too few steps are left to compare acceptances; that there are so few is the finding.
    """
    served, other = toggle.length_a.counts.drafts, toggle.length_b.counts.drafts
    return toggle.cause == "template" and served < FEWEST and other >= 4 * FEWEST


def _prompts(dossier: Dossier) -> list[Point]:
    """Prompts that say nothing, answers that loop: every drafter's figures on them mislead."""
    expected = dossier.expected
    surprise = None if expected is None else finite(expected.prompt_surprise)
    if surprise is not None and surprise >= RANDOM:
        says = (
            f"the prompts' tokens surprise the target {number(surprise)} times as much as if all "
        )
        says += "were equally likely: they are no text of its language"
        return [point("degenerate_text", DECISIVE, says, "expected")]
    share = None if expected is None else finite(expected.degenerate_share)
    if expected is None or share is None:
        return []
    says = f"{percent(share)} of the answers loop or repeat themselves"
    if share < LOOPS:
        answers = expected.acceptance.prompts
        loops = Proportion(hits=round(min(1.0, max(0.0, share)) * answers), of=answers)
        able = power.rarely(loops, MOSTLY, fewest=1)
        return power.against(["degenerate_text"], GOOD, says, "expected", able=able)
    weight = WEAK if not training.is_low(dossier) else STRONG if share >= MOSTLY else GOOD
    return [point("degenerate_text", weight, says, "expected")]


def _controls(dossier: Dossier) -> list[Point]:
    """A text that repeats itself: who fails there is broken, who does well there alone is not."""
    found = dossier.controls
    own, plain = (None if found is None else found.repeated_text), gap.observed_of(dossier)
    repeated, usual = length(own), length(plain)
    if found is None or own is None or repeated is None or usual is None:
        return []
    k = max(dossier.subject.k, 1)
    says = f"{number(repeated)} tokens a step on a text that repeats itself, {number(usual)} here"
    if (repeated - 1) / k > 0.8 and (usual - 1) / k < 0.3:
        engine = of_stage("execution", "verification", "counting")
        return [
            *(point(cause, -WEAK, says, "controls") for cause in engine),
            *(point(c, WEAK / 2, says, "controls") for c in ("undertrained", "template")),
        ]
    return []


def _nothing_accepted(dossier: Dossier) -> list[Point]:
    """Not one draft accepted: what leaves nothing at all."""
    seen = gap.observed_of(dossier)
    if seen is None or not _accepts_nothing(dossier):
        return []
    says = f"not one of {seen.counts.drafts:,d} steps accepted a draft"
    audit = {f.cause for f in dossier.audit.findings} if dossier.audit is not None else set()
    named = ("wrong_method", "vocabulary_map", "states_zero")
    return [point(c, GOOD if c in audit else WEAK, says, "observed") for c in named]


def _accepts_nothing(dossier: Dossier) -> bool:
    seen = gap.observed_of(dossier)
    return seen is not None and seen.counts.drafts >= 50 and seen.counts.accepted <= 0


def _not_finite(dossier: Dossier) -> list[Point]:
    """Numbers that are none: no text, no layers and no engine make a drafter of them.

    Where nothing is lost they are in no row that was used, and a hint like others of the audit.
    """
    found = training.not_finite(dossier)
    costs = training.is_low(dossier) or gap.gap(dossier).there or _accepts_nothing(dossier)
    if not found or not costs:
        return []
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    says = f"{'; '.join(found[:3])}{more} (not_finite)"
    return [point("tensors_damaged", DECISIVE + STRONG, says, "tensors")]
