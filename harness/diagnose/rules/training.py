"""What the training left: a drafter that predicts badly however it is read, and why."""

from __future__ import annotations

from harness.diagnose.records import Dossier, Point, Proportion, Wanted
from harness.diagnose.rules import power
from harness.diagnose.rules import wanted as readings
from harness.diagnose.rules.measures import (
    above,
    counted,
    finite,
    known,
    lost,
    number,
    percent,
    rate,
    shorter,
    span,
    surely_above,
    surely_below,
)
from harness.diagnose.rules.weights import DECISIVE, GOOD, STRONG, WEAK, of_stage, point

NAME = "wanted"
GOOD_FIRST = 0.55
UNREAD = 0.8
"""Of a drafter's right first drafts so many stay right on tokens, or states, that it does not look
at; one that does loses half of them, or near it."""
UNNORMED = 0.25
"""Of a drafter's first drafts where the head's likeliest token without the norm is another than the
target's: a drafter trained rightly draws so few of those."""
OVERFIT, OTHER_TARGET = 0.25, 0.1
"""Of the drafts accepted on its training samples, or on its own target, so many must be lost."""


def is_low(dossier: Dossier) -> bool | None:
    """Whether the drafter as declared predicts the target's own text badly; None: not known."""
    first = readings.first_of_text(dossier)
    if not known(first):
        return None
    return surely_below(first, readings.LOW)


def training_points(dossier: Dossier) -> list[Point]:
    """What the target's own text says of how the drafter was trained."""
    found = [
        *_unnormed(dossier),
        *_unread(dossier),
        *_one_step(dossier),
        *_overfit(dossier),
        *_other_target(dossier),
    ]
    return [*found, *_low(dossier)]


def _low(dossier: Dossier) -> list[Point]:
    """A first draft that is seldom right, where no reading of the drafter is better."""
    first = readings.first_of_text(dossier)
    low = is_low(dossier)
    if low is None or first is None:
        return []
    says = readings.told_first(dossier)
    if not low:
        if not surely_above(first, GOOD_FIRST, looks=2):
            return []
        own = {"trained_one_step", "trained_without_norm"}  # these may leave a first draft right
        if unread(dossier) is not None:
            own.add("trained_on_mixed_states")
        against = [c for c in of_stage("training") if c not in own]
        return [point(c, -STRONG, says, NAME) for c in (*against, "other_target")]
    if readings.mends(dossier):
        says += ", which another reading mends"
        return [point(c, -GOOD, says, NAME) for c in ("undertrained", "trained_on_mixed_states")]
    tried = readings.is_best(dossier) is not None
    if tried:
        says += ", and no other reading makes a good drafter of it"
    weight = STRONG - 0.5 if tried else GOOD
    if _loops(dossier):
        weight -= WEAK  # on such text no drafter shows what it has learnt
    found = {"undertrained": weight, "trained_on_mixed_states": weight - WEAK}
    found |= {"tensors_damaged": WEAK, "other_target": WEAK}
    # What the files point to explains it, unless its own readings leave the drafter bad.
    hinted = _audited(dossier) - readings.tried_causes(dossier)
    found |= {cause: max(GOOD, found.get(cause, 0.0)) for cause in hinted}
    return [point(cause, weight, says, NAME) for cause, weight in sorted(found.items())]


def _audited(dossier: Dossier, *severities: str) -> set[str]:
    """Causes in the checkpoint that the audit points to: it would be read badly so."""
    findings = () if dossier.audit is None else dossier.audit.findings
    asked = severities or ("error", "warning")
    of = {f.cause for f in findings if f.cause is not None and f.severity in asked}
    if not_finite(dossier):
        of.add("tensors_damaged")
    return of & set(of_stage("checkpoint", "target", "prompts"))


def not_finite(dossier: Dossier) -> list[str]:
    """What the audit says of tensors whose numbers are not all finite."""
    findings = () if dossier.audit is None else dossier.audit.findings
    return sorted({f.what for f in findings if f.code == "not_finite"})


def _loops(dossier: Dossier) -> bool:
    share = None if dossier.expected is None else finite(dossier.expected.degenerate_share)
    return share is not None and share >= 0.5


def _unnormed(dossier: Dossier) -> list[Point]:
    """Two witnesses: tokens that differ without the norm, and the divergence over all of them."""
    found: Wanted | None = dossier.wanted
    drawn = None if found is None else found.unnormed_head
    if found is None or drawn is None:
        return []
    says = f"{counted(drawn)} first drafts are what the target's head says without its final norm, "
    says += "where that is another token than the target's"
    first = readings.first_of_text(dossier)
    low = finite(drawn.low)  # over prompts, which few tokens hold to
    sure = surely_above(drawn, UNNORMED, fewest=1) and (low is None or low > UNNORMED)
    nearer = _nearer(found)
    if nearer is not None:
        far = finite(found.unnormed_less) or 0.0
        says += f"; over all tokens they are {number(abs(far))} nats "
        says += (
            f"{'nearer to' if far >= 0 else 'farther from'} what the head says without that norm"
        )
    if nearer is False or surely_below(drawn, UNNORMED):
        # Where it is seldom right at all, it draws few of those either way.
        able = nearer is False or surely_below(drawn, min(UNNORMED, (rate(first) or 0.0) / 2))
        return power.against(["trained_without_norm"], STRONG, says, NAME, able=able)
    if sure or (nearer and (rate(drawn) or 0.0) > 0.5):  # a norm that is even leaves few tokens
        # Such a drafter is right where both agree, and draws the other token where they do not.
        weight = DECISIVE if is_low(dossier) or above(drawn, _wrong(first)) else STRONG
        return [point("trained_without_norm", weight, says, NAME)]
    return []


def _nearer(found: Wanted) -> bool | None:
    """Whether the first drafts are nearer to the target's distributions without its norm.

    None: neither is sure. Nearer alone says little, as a drafter that is surer of itself than the
    target is nearer to sharper distributions as well; farther, it was not trained towards them.
    """
    less, low = finite(found.unnormed_less), finite(found.unnormed_less_low)
    if less is None or low is None:
        return None
    return True if low > 0 else False if 2 * less - low < 0 else None  # the interval's other end


def _wrong(first: Proportion | None) -> Proportion | None:
    return None if first is None else Proportion(hits=first.of - first.hits, of=first.of)


def unread(dossier: Dossier) -> str | None:
    """What the drafter does not look at: "tokens" or "states"; None: it does, or at neither.

    One that learnt little looks at nothing.
    """
    found = dossier.wanted
    if found is None:
        return None
    kept = {"tokens": found.without_tokens, "states": found.without_states}
    for idle, read in (("tokens", "states"), ("states", "tokens")):
        if surely_above(kept[idle], UNREAD) and surely_below(kept[read], 0.5):
            return idle
    return None


def _unread(dossier: Dossier) -> list[Point]:
    """A drafter that does not look at its tokens, or not at its states: neither fitted the other.

    Alone that is no mark: from some targets' states the token can be told. Its later drafts rest on
    its own tokens and states, and fall.
    """
    found, what = dossier.wanted, unread(dossier)
    if found is None or what is None or len(found.by_step) < 2 or readings.mends(dossier):
        return []
    first, second = (rate(p) or 0.0 for p in found.by_step[:2])
    if second >= readings.FALLS * first or "tensors_damaged" in _audited(dossier, "error"):
        return []
    kept = found.without_tokens if what == "tokens" else found.without_states
    says = (
        f"{counted(kept)} right first drafts stay right where the drafter is given other {what}, "
    )
    says += f"and at position 1 {counted(found.by_step[1])} are right: it does not look at them"
    return [point("trained_on_mixed_states", STRONG + WEAK, says, NAME)]


def _one_step(dossier: Dossier) -> list[Point]:
    """Whether later drafts fall as of a drafter that never saw states of its own making."""
    found = dossier.wanted
    if found is None or len(found.by_step) < 2:
        return []
    first, second = found.by_step[0], found.by_step[1]
    if not (known(first) and known(second)) or not rate(first):
        return []
    kept = (rate(second) or 0.0) / (rate(first) or 1.0)
    says = f"of drafts whose forerunner was right, {counted(second)} are right at position 1 and "
    says += f"{counted(first)} at position 0"
    limit = readings.FALLS * (rate(first) or 0.0)
    if kept < readings.FALLS and surely_below(second, limit) and not surely_below(first, 0.2):
        if readings.mends(dossier):
            return [point("trained_one_step", WEAK, f"{says}; another reading mends it", NAME)]
        if "tensors_damaged" in _audited(dossier, "error"):
            says += "; and tensors of the layer that makes its states are lost"
            weights = {"tensors_damaged": STRONG, "trained_one_step": WEAK}
            return [point(cause, weight, says, NAME) for cause, weight in weights.items()]
        if unread(dossier) is not None:  # later drafts rest on their tokens still more
            return [point("trained_one_step", WEAK, says, NAME)]
        weight = STRONG + (WEAK if kept < 0.55 else 0.0)
        return [point("trained_one_step", weight, says, NAME), *_own_tokens(found, limit)]
    if surely_above(second, limit, looks=2):
        return [point("trained_one_step", -STRONG, says, NAME)]
    return []


def _own_tokens(found: Wanted, limit: float) -> list[Point]:
    """Whether the drafter keeps to its own tokens: what it was trained on, if it was on those."""
    if len(found.own_tokens_by_step) < 2:
        return []
    own = found.own_tokens_by_step[1]
    if not above(own, found.by_step[1], margin=0.05):
        return []
    says = f"on its own tokens {counted(own)} are right at position 1"
    return [point("trained_one_step", WEAK, says, NAME)]


def _overfit(dossier: Dossier) -> list[Point]:
    found, base = dossier.wanted, readings.base(dossier)
    if found is None or found.trained is None or base is None:
        return []
    says = f"{span(found.trained)} tokens a step on its training samples, {span(base)} on this text"
    if shorter(base, found.trained, least=OVERFIT):
        share = percent(lost(base, found.trained))
        return [point("overfit", STRONG + GOOD, f"{says}: {share} of its drafts lost", NAME)]
    able = power.not_shorter(base, found.trained, OVERFIT)
    return power.against(["overfit"], STRONG, says, NAME, able=able)


def _other_target(dossier: Dossier) -> list[Point]:
    found, base = dossier.wanted, readings.base(dossier)
    if found is None or found.other_target is None or base is None:
        return []
    says = f"{span(found.other_target)} tokens a step on the target it is said to be trained for, "
    says += f"{span(base)} on the one served"
    if shorter(base, found.other_target, least=OTHER_TARGET):
        return [point("other_target", DECISIVE + WEAK, says, NAME)]
    able = power.not_shorter(base, found.other_target, OTHER_TARGET)
    return power.against(["other_target"], STRONG, says, NAME, able=able)
