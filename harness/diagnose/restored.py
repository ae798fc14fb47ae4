"""What is accepted of a planted case once it is mended, beside the same case without its fault.

What is expected then is not what the corrected checkpoint itself promises: one that was corrected
wrongly would keep that promise too. It is what the drafter promises that was there before it was
harmed, read as its checkpoint says, on the prompts in the form of its training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness.diagnose.experiments.asking import Asked
from harness.diagnose.experiments.work import ROUNDS
from harness.diagnose.folders import DiagnosisFolder
from harness.diagnose.records import Length, Proportion, Subject
from harness.records import DraftCounts

if TYPE_CHECKING:
    from harness.diagnose.experiments.known import Knowledge

ByPrompt = Mapping[str, Sequence[DraftCounts]]
WITHIN = 0.02
"""The accepted share of drafts may be so far from what is expected."""
SERVED = ("alone", "batched")
"""The rounds that tell what is accepted."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted of the drafts, and tokens a step; both with their intervals over the prompts."""

    share: Proportion
    length: Length


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """The mended case beside the unharmed one, on the same prompts.

    `difference`: of the shares, after less expected; `error`: its standard error, paired by prompt.
    """

    after: Accepted
    expected: Accepted
    difference: float
    error: float | None


class Fixed(msgspec.Struct, frozen=True, kw_only=True):
    """What `--fix` did of a planted case.

    `of`: the named cause's details, by which it was mended. `why_not`: why nothing was changed, or
    what was left. `left`: the cause that is called of what was mended. `before`: accepted of the
    drafts. `held` None: nothing was changed, or a second fault is there, so that nothing is
    promised. `code`: the digest of what mends.
    """

    code: str
    took_s: float
    of: dict[str, str] = {}
    changes: tuple[str, ...] = ()
    why_not: str | None = None
    left: str | None = None
    before: float | None = None
    held: Restored | None = None


def restored(after: ByPrompt, expected: ByPrompt, k: int) -> Restored | None:
    """None where nothing was drafted on one side."""
    from harness.diagnose.experiments.figures import paired

    both = [_accepted(each, k) for each in (after, expected)]
    if any(not each.share.of for each in both):
        return None
    names = sorted({*after, *expected})
    sums = [[_sums(side.get(name, ()), k) for name in names] for side in (after, expected)]
    told = paired(sums[0], sums[1])
    return Restored(after=both[0], expected=both[1], difference=told.gain, error=told.error)


def served(folder: Path) -> ByPrompt:
    """What the engine accepted in the diagnosis that lies there, by prompt."""
    found = DiagnosisFolder(folder).found(ROUNDS, dict[str, Asked])
    rounds = {} if found is None else found[0]
    told: dict[str, list[DraftCounts]] = {}
    for name in SERVED:
        for answer in rounds[name].ok if name in rounds else ():
            if answer.counts is not None:
                told.setdefault(answer.question, []).append(answer.counts)
    return told


def promised(
    subject: Subject, prompts: Sequence[Sequence[int]], max_tokens: int, engine: Any
) -> ByPrompt:
    """What the subject's drafter promises on the target's own answers, by prompt.

    `engine`: the reference's, with the subject's target.
    """
    from harness.diagnose.experiments.known import know

    known = know(subject, prompts, max_tokens=max_tokens, engine=engine)
    return {f"{i:03d}": [counts] for i, counts in enumerate(_walked(known))}


def _walked(known: Knowledge) -> list[DraftCounts]:
    from harness.diagnose.experiments.expected import answer_slots, as_declared, walked
    from harness.diagnose.experiments.running import chain

    captured = known.captured()
    drafts = chain(as_declared(known), captured, known.k, answer_slots(known, captured))
    return walked(known.texts, captured, drafts)


def _accepted(by_prompt: ByPrompt, k: int) -> Accepted:
    from harness.diagnose.experiments.figures import proportion
    from harness.diagnose.experiments.lengths import length_of

    sums = [_sums(parts, k) for parts in by_prompt.values()]
    share = proportion([accepted for accepted, _ in sums], [drafted for _, drafted in sums])
    return Accepted(share=share, length=length_of(by_prompt, k=k))


def _sums(parts: Sequence[DraftCounts], k: int) -> tuple[float, float]:
    """Accepted and drafted tokens; an engine that does not tell these drafts k a step."""
    drafted = sum(k * c.drafts if c.drafted is None else c.drafted for c in parts)
    return float(sum(c.accepted for c in parts)), float(drafted)
