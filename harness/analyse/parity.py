"""Whether every server computes the model it should: log-probabilities of a few fixed prompts.

Each server continued the prompts greedily. Two of them are compared position by position while
their continuations are the same, and at the first position where they part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from harness.analyse.data import RunData
from harness.findings import Caution, ParityFinding
from harness.records import ParityAnswer, ParityRecord

BOUNDS = {"float32": 0.01, "float16": 0.05}
BOUND_ELSE = 0.1
"""Nats, of the mean difference; bfloat16, and where the precision is not known."""
LEAST_LOGPROB = math.log(0.01)
"""Tokens less likely than this to both servers say more of rounding than of the model."""
GOLDEN = "golden file"


def bound(*dtypes: str | None) -> float:
    """The largest mean difference between servers of these precisions."""
    return max(BOUNDS.get(dtype or "", BOUND_ELSE) for dtype in dtypes)


def difference(
    one: Sequence[ParityAnswer], other: Sequence[ParityAnswer]
) -> tuple[float | None, float | None, int]:
    """Mean and largest difference of log-probabilities in nats, and of how many; None of none."""
    theirs = {a.prompt: a for a in other}
    found: list[float] = []
    for answer in one:
        if answer.prompt in theirs:
            found += _differences(answer, theirs[answer.prompt])
    if not found:
        return None, None, 0
    return math.fsum(found) / len(found), max(found), len(found)


def _differences(one: ParityAnswer, other: ParityAnswer) -> Iterable[float]:
    for at in range(min(len(one.tokens), len(other.tokens))):
        same = _plain(one.tokens[at]) == _plain(other.tokens[at])
        yield from _at(one, other, at, same=same)
        if not same:
            return


def _at(one: ParityAnswer, other: ParityAnswer, at: int, *, same: bool) -> Iterable[float]:
    """Differences of the tokens that one of the two finds likely."""
    mine, theirs = _best(one, at), _best(other, at)
    shared = mine.keys() & theirs.keys()
    if not shared:
        # Engines may name a token differently; how likely the best one is has no name.
        yield abs(one.logprobs[at] - other.logprobs[at])
        return
    likely = {t for top in (mine, theirs) for t, p in top.items() if p >= LEAST_LOGPROB}
    for token in likely & shared:
        yield abs(mine[token] - theirs[token])
    if not same:
        # Where the best tokens differ, one that the other does not list is below all it lists.
        for token in likely - shared:
            here, there = (mine, theirs) if token in mine else (theirs, mine)
            yield max(0.0, here[token] - min(there.values()))


def _best(answer: ParityAnswer, at: int) -> dict[str, float]:
    found: dict[str, float] = {_plain(answer.tokens[at]): answer.logprobs[at]}
    for token, logprob in answer.top[at].items() if at < len(answer.top) else ():
        name = _plain(token)
        found[name] = max(logprob, found.get(name, -math.inf))
    return found


def _plain(token: str) -> str:
    """A token's name as every engine may write it."""
    return token.replace("\u0120", " ").replace("\u2581", " ").replace("\u010a", "\n")


def parity_findings(run: RunData) -> tuple[ParityFinding, ...]:
    """Every server held to the golden file of its engine, else to one anchor of the run."""
    answered = [r for r in run.parity if r.answers]
    found: list[ParityFinding] = []
    for record in answered:
        golden = run.golden.get(record.engine)
        anchor = golden if golden is not None else _anchor(answered, record)
        if anchor is None:
            continue
        mean, largest, tokens = difference(record.answers, anchor.answers)
        most = bound(record.dtype, anchor.dtype)
        found.append(
            ParityFinding(
                engine=record.engine,
                variant=record.variant,
                repeat=record.repeat,
                against=GOLDEN if golden is not None else f"{anchor.engine} {anchor.variant}",
                difference=mean,
                largest=largest,
                tokens=tokens,
                bound=most,
                differs=mean is not None and mean > most,
            )
        )
    return tuple(found)


def _anchor(records: Sequence[ParityRecord], of: ParityRecord) -> ParityRecord | None:
    """The reference engine's first server of the same model, else the first server of it."""
    fits = [r for r in records if _same_target(r, of)]
    first = min(
        fits, key=lambda r: (r.engine != "reference", r.variant != "baseline", r.repeat), default=of
    )
    return None if first is of else first


def _same_target(one: ParityRecord, other: ParityRecord) -> bool:
    """Whether both servers are meant to serve the same model: an engine's variants always are."""
    if one.engine == other.engine:
        return True
    if one.weights is not None and other.weights is not None:
        return one.weights == other.weights
    return _name(one.target) == _name(other.target)


def _name(target: str | None) -> str | None:
    return PurePath(target).name if target else None


def parity_caution(run: RunData, findings: Sequence[ParityFinding], engine: str) -> Caution | None:
    """A server computes another model than it should, or none could be asked."""
    odd = [f for f in findings if f.engine == engine and f.differs]
    if odd:
        worst = max(odd, key=lambda f: f.difference or 0.0)
        return Caution(
            code="target_differs",
            text=_words(worst),
            advice=(
                "The engine computes another model than it should: compare the checkpoint, its "
                "config (rope parameters above all), the precision and the engine's version."
            ),
        )
    mine = [r for r in run.parity if r.engine == engine]
    told = {r.variant for r in mine if r.answers}
    mute = [r for r in mine if r.variant not in told]
    if not mute:
        return None
    which = " and ".join(sorted({r.variant for r in mute}))
    return Caution(
        code="target_unchecked",
        text=f"{engine}: {which} told no log-probabilities ({mute[0].note or 'no answer'})",
        advice="Whether it computes the model it should is not known.",
    )


def parity_void(findings: Sequence[ParityFinding]) -> str | None:
    """Why the run proves nothing: a server computes another model."""
    odd = [f for f in findings if f.differs]
    return f"target differs: {_words(odd[0])}" if odd else None


def _words(f: ParityFinding) -> str:
    return (
        f"{f.engine} {f.variant}: log-probabilities of fixed prompts differ from the "
        f"{f.against}'s by {f.difference or 0.0:.3g} nats on average, {f.largest or 0.0:.3g} at "
        f"most (allowed: {f.bound:g} on average)"
    )
