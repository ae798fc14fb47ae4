"""What the drafter was trained for: the reading that the target's own text is best drafted with."""

from __future__ import annotations

import math
from collections.abc import Callable

from harness.diagnose.records import Dossier, Length, Point, Proportion, ReadingFit, Wanted
from harness.diagnose.rules import execution, naming, power, states
from harness.diagnose.rules.measures import (
    FEWEST,
    USUAL,
    counted,
    critical,
    finite,
    first_rate,
    length,
    lost,
    percent,
    rate,
    second_rate,
    shorter,
    span,
    surely_below,
)
from harness.diagnose.rules.weights import DECISIVE, GOOD, STRONG, WEAK, point

NAME = "wanted"
LAST_NORM = "norm norm.weight "
"""As the audit calls it."""
LOW = 0.5
"""Published drafters have more than half of their first drafts accepted (facts of K2.5: from 0.6);
one that has surely fewer than this learnt something else, or little."""
FALLS = 0.7
"""A drafter trained over several steps keeps this much of its first conditional rate at the next
one; one that was trained for a single step loses half."""


def declared(wanted: Wanted | None) -> ReadingFit | None:
    """The checkpoint's own reading among those that were tried."""
    if wanted is None:
        return None
    return next((r for r in wanted.readings if naming.is_declared(r.reading)), None)


def base(dossier: Dossier) -> Length | None:
    """The acceptance as declared: of the readings' walk, else of the paper check."""
    own = declared(dossier.wanted)
    if own is not None and length(own.acceptance) is not None:
        return own.acceptance
    return None if dossier.expected is None else dossier.expected.acceptance


def _gains(fit: ReadingFit, own: Length | None, looks: int) -> bool:
    """Whether a reading is accepted more than the declared one, by enough and not by chance.

    That it is no chance among so many readings the loss may say too, which counts every token's
    probability and not only those that change places. Not alone, and not of a drafter that is
    mostly wrong: there whatever makes it less sure of itself lessens the loss.
    """
    if not _enough(fit):
        return False
    gain, low = finite(fit.gain), finite(fit.gain_low)
    if gain is None or low is None:
        return shorter(own, fit.acceptance, least=power.LEAST, looks=looks)
    if gain < power.LEAST * max(_accepted(fit) - 1, 1e-9):
        return False
    if _surely(gain, low, looks):
        return True
    by_loss = _surely(fit.loss_less, fit.loss_less_low, looks) and _surely(gain, low, 1)
    return by_loss and (rate(first_rate(own)) or 0.0) >= 0.5


def _enough(fit: ReadingFit) -> bool:
    """Whether a reading was walked over enough text to be judged."""
    return fit.acceptance is not None and fit.acceptance.counts.drafts >= FEWEST


def _surely(value: float | None, low: float | None, looks: int) -> bool:
    """Whether a difference with this lower end of its 95% interval is above 0, of `looks` taken."""
    value, low = finite(value), finite(low)
    if value is None or low is None:
        return False
    return value - (value - low) * critical(looks) / USUAL > 0


def better(dossier: Dossier) -> list[ReadingFit]:
    """Readings that are accepted more than the checkpoint's own, the most accepted first.

    Of those that are accepted alike, the one by which the text is the likeliest.
    """
    wanted = dossier.wanted
    if wanted is None:
        return []
    own, looks = base(dossier), _looks(dossier)
    fits = [
        r for r in wanted.readings if not naming.is_declared(r.reading) and _gains(r, own, looks(r))
    ]
    fits.sort(key=lambda r: (-_gain(r, own), r.reading))
    if not fits:
        return []
    equals = [r for r in fits if _equal(r, fits[0], own)]
    if _loss(fits[0]) is not None:
        first = min(equals, key=lambda r: _loss(r) or math.inf)
    else:
        first = next((r for r in equals if not _is_searched(r)), fits[0])
    return [first, *(r for r in fits if r is not first)]


def _loss(fit: ReadingFit) -> float | None:
    """The loss on the text, by which equals are told apart; None for readings of the vocabulary.

    Which of two readings is right shows in every token's probability, where their drafts are
    mostly the same. A token that a reading has no draft id for is in no loss.
    """
    vocabulary = naming.cause_of_reading(fit.reading) == "vocabulary_map"
    return None if vocabulary else finite(fit.loss)


def _looks(dossier: Dossier) -> Callable[[ReadingFit], int]:
    """How many readings a reading was looked for among.

    What the files point to is a question of its own, asked before any text was seen: it is one of
    the readings that answer it, not one of all.
    """
    assert dossier.wanted is not None
    findings = () if dossier.audit is None else dossier.audit.findings
    hinted = {f.cause for f in findings if f.severity != "note"} - {None}
    causes = [naming.cause_of_reading(r.reading) for r in dossier.wanted.readings]
    asked, every = sum(c in hinted for c in causes), max(12, len(causes))
    return lambda fit: asked if naming.cause_of_reading(fit.reading) in hinted else every


def _is_searched(fit: ReadingFit) -> bool:
    """Whether it is one of many sets of layers: neighbours are alike, some do well by chance."""
    return naming.cause_of_reading(fit.reading) == "layers_other"


def _gain(fit: ReadingFit, own: Length | None) -> float:
    """The gain over every slot of the text where that is told, else over a walk's steps."""
    told = finite(fit.gain)
    return told if told is not None else _accepted(fit) - (length(own) or 1.0)


def _accepted(fit: ReadingFit) -> float:
    found = length(fit.acceptance)
    return found if found is not None else 1 + (finite(fit.gain) or 0.0)


def mends(dossier: Dossier) -> bool:
    """Whether another reading is better, and makes a drafter of it.

    One that is bad by either is not read wrongly: of tensors that are spoiled one reading or the
    other always spoils less; so it is with later drafts that were never trained.
    """
    fits = better(dossier)
    if not fits:
        return False
    first, second = first_rate(fits[0].acceptance), second_rate(fits[0].acceptance)
    return not surely_below(first, LOW) and not surely_below(second, FALLS * (rate(first) or 0.0))


def is_best(dossier: Dossier) -> bool | None:
    """Whether the checkpoint's reading is the best of those tried; None where none was tried."""
    if dossier.wanted is None or len(dossier.wanted.readings) < 2:
        return None
    return not better(dossier)


def wanted_points(dossier: Dossier) -> list[Point]:
    """What the readings held against the target's text say of the checkpoint."""
    if dossier.wanted is None:
        return []
    fits = better(dossier)
    return [*_named(dossier, fits), *_norm_of_ones(dossier, fits), *_tried(dossier, fits)]


def _norm_of_ones(dossier: Dossier, fits: list[ReadingFit]) -> list[Point]:
    """A head that another one beats, behind a last norm of ones: it is the norm that was lost.

    Nothing tells the two apart by acceptance: a head is as far off as the norm before it.
    """
    ones = _has_norm_of_ones(dossier)
    if not ones or not fits or cause_in(dossier, fits[0]) != "lm_head_replaced":
        return []
    says = f"norm.weight is 1 everywhere; {_says(fits[0], base(dossier))}"
    return [point("final_norm", DECISIVE + 2 * WEAK, says, NAME)]


def _has_norm_of_ones(dossier: Dossier) -> bool:
    findings = () if dossier.audit is None else dossier.audit.findings
    return any(f.code == "norm_untrained" and LAST_NORM in f.what for f in findings)


def _named(dossier: Dossier, fits: list[ReadingFit]) -> list[Point]:
    """The causes of readings that are accepted more: the best, its equals, and the rest."""
    if not fits:
        return []
    replay = dossier.replay
    engine_does = {r.reading for r in execution.better(replay)} if replay is not None else set()
    best = fits[0]
    own = base(dossier)
    equals = [r for r in fits if _equal(r, best, own)]
    mended = mends(dossier)
    rivals = {cause_in(dossier, r) for r in equals}
    if rivals <= set(naming.LAYERS):
        rivals = {cause_in(dossier, best)}  # neighbouring layers are alike; the best list counts
    found: dict[str, Point] = {}
    for fit in fits:
        cause = cause_in(dossier, fit)
        if cause is None or cause in found:
            continue
        weight = WEAK
        if fit in equals:
            weight = DECISIVE if len(rivals) == 1 else STRONG
            if cause not in rivals:
                weight = GOOD
            weight += WEAK / 2 if fit is best else 0.0
        says = _says(fit, own)
        if not mended:
            weight = min(weight, GOOD)
            says += ": a bad drafter by either"
        if fit.reading in engine_does:
            weight, says = WEAK, f"{says}; and that is how the engine runs it"
        found[cause] = point(cause, weight, says, NAME)
    return list(found.values())


def _equal(fit: ReadingFit, best: ReadingFit, own: Length | None) -> bool:
    """Whether a reading gains nearly as much as the best: within a tenth of it."""
    return fit is best or _gain(fit, own) > 0.9 * _gain(best, own)


def cause_in(dossier: Dossier, fit: ReadingFit) -> str | None:
    """The cause of a reading; of other layers, what their list is beside the checkpoint's."""
    reading = naming.reading_of(fit.reading)
    cause = naming.cause_of_reading(fit.reading)
    own = declared_layers(dossier)
    if reading is None or reading.layers is None:
        return cause
    if not states.names_layers(dossier, own):
        return "layers_default"
    if own is None:
        return cause
    return naming.layers_cause(own, reading.layers, default=None, named=True)


def declared_layers(dossier: Dossier) -> tuple[int, ...] | None:
    """The layers as the checkpoint states them, in transformers' index."""
    if dossier.audit is not None and dossier.audit.aux_layers is not None:
        return dossier.audit.aux_layers
    served = states.served_layers(dossier)
    return None if served is None else served[0]


def _says(fit: ReadingFit, own: Length | None) -> str:
    first, own_first = rate(first_rate(fit.acceptance)), rate(first_rate(own))
    says = f'read with "{fit.reading}" the drafter is accepted {span(fit.acceptance)} tokens a step'
    says += f" on the target's own text, and {span(own)} as its checkpoint says"
    if first is not None and own_first is not None:
        says += f" (first drafts {percent(first)} against {percent(own_first)})"
    return says


def _tried(dossier: Dossier, fits: list[ReadingFit]) -> list[Point]:
    """Against causes whose readings were tried: the text says that they were not trained so.

    Nothing against one that the engine was seen to do: it may be the engine's mistake alone.
    """
    seen = {cause for fit in fits for cause in _causes_of(dossier, fit)}
    seen |= execution.suspected(dossier.replay)
    tried = _tried_causes(dossier)
    if states.is_clean(dossier.states) is False:
        seen |= set(naming.LAYERS) | {c for c in tried if c.startswith("states_")}
    own, share = base(dossier), _least(dossier)
    found: list[Point] = []
    for cause, fits_of in tried.items():
        if cause in seen:
            continue
        best = fits_of[0]
        worse = (lost(best.acceptance, own) or 0.0) > power.LEAST
        able = all(power.no_gain(fit, own, share * (_accepted(fit) - 1)) for fit in fits_of)
        weight = STRONG if worse else GOOD
        found += power.against([cause], weight, _says_tried(best, own), NAME, able=able)
    return found


def tried_causes(dossier: Dossier) -> set[str]:
    """The causes whose readings were tried with enough text."""
    return set() if dossier.wanted is None else set(_tried_causes(dossier))


def _causes_of(dossier: Dossier, fit: ReadingFit) -> set[str]:
    """Every cause that a reading would speak for: its own, and what it is on this checkpoint."""
    causes = {naming.cause_of_reading(fit.reading), cause_in(dossier, fit)}
    if "lm_head_replaced" in causes and _has_norm_of_ones(dossier):
        causes.add("final_norm")
    return {cause for cause in causes if cause is not None}


def _least(dossier: Dossier) -> float:
    """What share of its drafts a reading would gain if it were what the drafter learnt.

    A text that the drafter predicts badly however it is read shows little of what it learnt: there
    the right reading need not be better by anything to speak of, and only a worse one is wrong.
    """
    return power.LEAST if (rate(first_of_text(dossier)) or 0.0) >= LOW else 0.0


def _says_tried(fit: ReadingFit, own: Length | None) -> str:
    says = f'"{fit.reading}" is accepted {span(fit.acceptance)} tokens a step on the target\'s own '
    says += f"text, the checkpoint's own reading {span(own)}"
    gain, low, high = finite(fit.gain), finite(fit.gain_low), finite(fit.gain_high)
    if gain is None or low is None or high is None:
        return says
    return f"{says}; token by token {gain:+.2f} ({low:+.2f} to {high:+.2f})"


def _tried_causes(dossier: Dossier) -> dict[str, list[ReadingFit]]:
    """The readings of each cause that were tried with enough text, the most accepted first."""
    assert dossier.wanted is not None
    found: dict[str, list[ReadingFit]] = {}
    for fit in sorted(filter(_enough, dossier.wanted.readings), key=_order):
        for cause in _causes_of(dossier, fit):
            found.setdefault(cause, []).append(fit)
    return found


def _order(fit: ReadingFit) -> tuple[float, str]:
    return -_accepted(fit), fit.reading


def first_of_text(dossier: Dossier) -> Proportion | None:
    """How often the declared drafter's first draft is right, over as much text as was looked at.

    Where its draft vocabulary lacks tokens, as if it had them: it could not learn those.
    """
    wanted, expected = dossier.wanted, dossier.expected
    if expected is not None:
        whole, own = first_rate(expected.without_vocabulary_loss), first_rate(expected.acceptance)
        if whole is not None and own is not None and (rate(whole) or 0.0) > (rate(own) or 0.0):
            return whole
    if wanted is not None and wanted.by_step and wanted.by_step[0].of > 0:
        return wanted.by_step[0]
    return first_rate(base(dossier))


def told_first(dossier: Dossier) -> str:
    return f"the first draft is right for {counted(first_of_text(dossier))} tokens of the text"
