"""The answer of a run in one sentence, with no claim that its intervals do not carry."""

from __future__ import annotations

from typing import Literal

from harness.findings import Integrity, Summary
from harness.report import view, words
from harness.report.pooled import PooledAcceptance
from harness.report.view import Group, MetricRow

Standing = Literal["better", "worse", "same", "undecided", "mixed", "void", "failed"]

SPEED = "output_tokens_per_s"
MOST_LOADS_SAID = 3
NO_VERDICT = "no verdict, "
UNSHOWN = "not shown to be faster or slower than no speculation"
FORCED = "forced_acceptance"


def verdict_sentence(summary: Summary) -> str:
    """The run's answer: speed against no speculation, acceptance, identity of the output.

    A void run says why and claims nothing. An engine without a paired comparison says what is
    known of it. Several engines are told one after the other.
    """
    return " ".join(verdict_sentences(summary))


def verdict_sentences(summary: Summary) -> list[str]:
    """The same, one sentence an engine; a run that is void or measured nothing has one."""
    if summary.void is not None:
        return [f"Void, verdicts withheld: {words.one_line(summary.void).rstrip('.')}."]
    groups = view.groups(summary)
    engines = dict.fromkeys(group.engine for group in groups)
    sentences = [
        _engine(engine, [g for g in groups if g.engine == engine], forced=_forced(summary, engine))
        for engine in engines
    ]
    if not sentences:
        why = words.one_line(summary.failures[0]).rstrip(".") if summary.failures else "no cell ran"
        return [f"Nothing was measured: {why}."]
    return [_with_failure(sentence, summary) for sentence in sentences]


def standing(summary: Summary) -> Standing:
    """The verdict as one word, over all groups, for a badge beside the sentence."""
    if summary.void is not None:
        return "void"
    rows = [group.row(SPEED) for group in view.groups(summary)]
    verdicts = {row.verdict for row in rows if row is not None and row.verdict is not None}
    if not verdicts:
        return "failed" if summary.failures or not summary.cells else "undecided"
    return verdicts.pop() if len(verdicts) == 1 else "mixed"


def _forced(summary: Summary, engine: str) -> bool:
    """Whether the engine was made to accept a given length, whatever its drafter drafts."""
    return any(c.code == FORCED and c.text.startswith(f"{engine}: ") for c in summary.cautions)


def _engine(engine: str, groups: list[Group], *, forced: bool) -> str:
    name = words.one_line(engine, 60)
    told = [(group, row) for group in groups if (row := _compared(group)) is not None]
    if forced and told:
        group, row = told[0]
        return (
            f"{name}: {NO_VERDICT}acceptance was forced and tells nothing of the drafter; "
            f"{words.ratio(row.ratio, row.ci_low, row.ci_high)} the speed of no speculation at "
            f"{words.load_words(group.load)}."
        )
    if not told:
        return f"{name}: {NO_VERDICT}{_without_comparison(groups)}."
    if len(told) > MOST_LOADS_SAID:
        shown = [told[0], told[-1]]
        rest = f" ({len(told)} loads, all in the table)"
    else:
        shown, rest = told, ""
    speeds = " and ".join(_speed(group, row) for group, row in shown)
    if speeds.startswith(UNSHOWN):  # of two loads alike it is said once
        speeds = speeds.replace(f" and {UNSHOWN} ", " or ")
    parts = [f"With this drafter, {name} is {speeds}{rest}"]
    pooled = view.pool_acceptance(
        [c.acceptance for g in groups for c in g.cells if c.acceptance is not None]
    )
    parts.extend(
        part for part in (_got_worse(groups), _accepted(pooled), _identical(groups)) if part
    )
    return "; ".join(parts) + "."


def _compared(group: Group) -> MetricRow | None:
    row = group.row(SPEED)
    return None if row is None or row.verdict is None or words.missing(row.ratio) else row


def _speed(group: Group, row: MetricRow) -> str:
    where = f"at {words.load_words(group.load)}"
    value = words.ratio(row.ratio, row.ci_low, row.ci_high)
    bracket = value.replace(" (", ", ").rstrip(")")
    if row.corrected_away and row.corrected is not None:
        bracket += f"; corrected for {row.family} comparisons {words.interval(*row.corrected)}"
    if row.verdict == "same":
        return f"as fast as no speculation {where} ({bracket})"
    if row.verdict == "undecided":
        return f"{UNSHOWN} {where} ({bracket})"
    only = "only " if row.verdict == "worse" else ""
    return f"{only}{value} the speed of no speculation {where}"


def _got_worse(groups: list[Group]) -> str | None:
    """The latencies that got worse where the speed did not: a drafter that is faster in all may
    still let a reader wait longer for the first token."""
    told = []
    for key, label in view.LATENCIES:
        rows = [(group, group.row(key)) for group in groups if not _slower(group)]
        worse = [(g, r) for g, r in rows if r is not None and r.verdict == "worse"]
        if worse:
            group, row = max(worse, key=lambda item: item[1].ratio or 0.0)
            value = words.ratio(row.ratio, row.ci_low, row.ci_high)
            told.append(f"{label} {value} at {words.load_words(group.load)}")
    return f"but worse {' and '.join(told)}" if told else None


def _slower(group: Group) -> bool:
    row = group.row(SPEED)
    return row is not None and row.verdict == "worse"


def _accepted(pooled: PooledAcceptance | None) -> str | None:
    if pooled is None:
        return None
    if pooled.rate is not None:
        return f"{words.percent(pooled.rate, 0)} of draft tokens accepted"
    return f"{words.fixed(pooled.length)} tokens a verify step"


def _identical(groups: list[Group]) -> str | None:
    parts = [group.integrity for group in groups if group.integrity is not None]
    compared = sum(part.compared for part in parts)
    if not compared:
        return None
    identical = sum(part.identical for part in parts)
    if identical == compared:
        return f"output identical ({words.share(identical, compared)})"
    return f"output differs in {words.share(compared - identical, compared)}{_ties(parts)}"


def _ties(parts: list[Integrity]) -> str:
    ties = [part.near_tie for part in parts if part.near_tie is not None]
    if len(ties) != len(parts) or not sum(ties):
        return ""
    return f", {words.plural(sum(ties), 'of them a near tie', 'of them near ties')}"


def _without_comparison(groups: list[Group]) -> str:
    known = []
    for variant in ("baseline", "speculative"):
        for group in groups:
            row = group.row(SPEED)
            value = None if row is None else getattr(row, variant)
            if not words.missing(value):
                known.append((variant, group, value))
    if not known:
        return "no cell was measured"
    variant, group, value = known[0]
    label, other = ("without", "with") if variant == "baseline" else ("with", "without")
    figure = f"{words.number(value)} output tokens/s {label} speculation"
    only = f", nothing measured {other} it" if {item[0] for item in known} == {variant} else ""
    return f"{figure} at {words.load_words(group.load)}{only}"


def _with_failure(sentence: str, summary: Summary) -> str:
    if f": {NO_VERDICT}" not in sentence or not summary.failures:
        return sentence
    return f"{sentence[:-1]}; {words.one_line(summary.failures[0]).rstrip('.')}."
