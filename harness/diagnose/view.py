"""A diagnosis as plain strings, neither escaped nor marked up, the same for Markdown and page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import get_args

from harness.diagnose.catalogue import EXPERIMENTS
from harness.diagnose.causes import CAUSES, NONE, UNKNOWN, Stage, kin
from harness.diagnose.records import Diagnosis, Dossier, Ranked
from harness.diagnose.rules import execution, states, wanted
from harness.diagnose.rules.measures import counted, length, number, percent, span
from harness.errors import one_line

WATERFALL = ("acceptance", "tokens a step", "drafts accepted", "lost", "verify steps")
CAUSES_TABLE = ("cause", "how sure", "score", "for it", "against it", "what to do")
FINDINGS_TABLE = ("severity", "finding", "remedy", "cause")
OTHER = "other"
"""Where a cause is told under that this version does not know."""
EXPERIMENTS_TABLE = ("experiment", "made", "seconds", "what it found")


@dataclass(frozen=True, kw_only=True)
class CauseRow:
    """One cause of the ranking."""

    cause: str
    title: str
    kin: str
    strength: str
    score: str
    evidence_for: tuple[str, ...]
    evidence_against: tuple[str, ...]
    undecided: tuple[str, ...]
    settles: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Ruled:
    """The excluded causes of one stage: names, and what each says, the least likely last."""

    stage: str
    causes: tuple[str, ...]
    titles: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class View:
    """What is told of a diagnosis, in order."""

    title: str
    meta: str
    badge: str
    standing: str
    verdict: str
    remedy: str
    details: tuple[tuple[str, str], ...]
    upstream: tuple[str, ...]
    mending: tuple[str, ...]
    next_experiments: tuple[str, ...]
    waterfall: tuple[tuple[str, ...], ...]
    causes: tuple[CauseRow, ...]
    unseen: tuple[CauseRow, ...]
    """Neither excluded, nor anything for them."""
    excluded: tuple[Ruled, ...]
    experiments: tuple[tuple[str, ...], ...]
    findings: tuple[tuple[str, ...], ...]
    schema: str


def view_of(dossier: Dossier, diagnosis: Diagnosis) -> View:
    """Everything that a report says of a diagnosis."""
    subject = dossier.subject
    named = diagnosis.cause in CAUSES
    first = diagnosis.ranked[0] if named and diagnosis.ranked else None
    badge, standing = _standing(diagnosis, first)
    left = [r for r in diagnosis.ranked if r.strength != "excluded"]
    return View(
        title=one_line(f"Diagnosis: {_last(subject.drafter)} on {_last(subject.target)}", 120),
        meta=one_line(_meta(dossier), 400),
        badge=badge,
        standing=standing,
        verdict=one_line(diagnosis.verdict, 2000),
        remedy=one_line(first.remedy, 800) if first is not None else "",
        details=tuple(_details(first)) if first is not None else (),
        upstream=CAUSES[first.cause].seen if first is not None else (),
        mending=tuple(one_line(line, 600) for line in diagnosis.mending),
        next_experiments=tuple(one_line(n, 300) for n in diagnosis.next_experiments),
        waterfall=tuple(_waterfall(diagnosis, subject.k)),
        causes=tuple(_cause_row(r) for r in left if r.evidence_for),
        unseen=tuple(_cause_row(r) for r in left if not r.evidence_for),
        excluded=tuple(_excluded(diagnosis)),
        experiments=tuple(_experiment(dossier, name) for name in EXPERIMENTS),
        findings=tuple(_findings(dossier)),
        schema=diagnosis.schema,
    )


def _last(path: str) -> str:
    return PurePath(path).name or path


def _meta(dossier: Dossier) -> str:
    subject = dossier.subject
    parts = [subject.engine, f"k = {subject.k}", f"dtype {subject.dtype}", subject.device]
    if subject.temperature > 0:
        parts.append(f"temperature {subject.temperature:g}")
    if subject.tensor_parallel > 1:
        parts.append(f"tensor parallel {subject.tensor_parallel}")
    if subject.asked:
        parts.append(subject.asked)
    took = sum(dossier.took_s.values())
    if took:
        parts.append(f"{took:.0f} s of experiments")
    return " · ".join(parts)


def _standing(diagnosis: Diagnosis, first: Ranked | None) -> tuple[str, str]:
    """The badge's words, and the class that gives the verdict its colour."""
    if diagnosis.cause == NONE:
        return "no fault", "better"
    if diagnosis.cause == UNKNOWN or first is None:
        return "cause unknown", "undecided"
    return f"{first.strength}: {first.cause}", "worse"


def _details(first: Ranked) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), one_line(value, 300)) for name, value in first.details.items()]


def _waterfall(diagnosis: Diagnosis, k: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for share in diagnosis.waterfall:
        accepted = percent((share.length - 1) / max(k, 1))
        lost = "" if share.lost is None else f"{round(share.lost, 2) + 0.0:.2f}"  # no -0.00
        if lost not in ("", "0.00") and not share.sure:
            lost += ", within its error"
        steps = "" if share.steps is None else f"{share.steps:,d}"
        rows.append((share.name, number(share.length), accepted, lost, steps))
    return rows


def _cause_row(ranked: Ranked) -> CauseRow:
    others = ", ".join(kin(ranked.cause))
    return CauseRow(
        cause=ranked.cause,
        title=ranked.title,
        kin=f"not to be told from {others}" if others else "",
        strength=ranked.strength,
        score=f"{ranked.score:+.1f}",
        evidence_for=tuple(one_line(s, 400) for s in ranked.evidence_for),
        evidence_against=tuple(one_line(s, 400) for s in ranked.evidence_against),
        undecided=tuple(one_line(s, 400) for s in ranked.undecided),
        settles=ranked.settles or "",
        remedy=one_line(ranked.remedy, 800),
    )


def _excluded(diagnosis: Diagnosis) -> Iterator[Ruled]:
    """By stage, in the order in which a request goes through them."""
    out = [r for r in diagnosis.ranked if r.strength == "excluded"]
    for stage in (*get_args(Stage), OTHER):
        own = [r for r in out if (CAUSES[r.cause].stage if r.cause in CAUSES else OTHER) == stage]
        if own:
            yield Ruled(
                stage=stage,
                causes=tuple(r.cause for r in own),
                titles=tuple(r.title for r in own),
            )


def _experiment(dossier: Dossier, name: str) -> tuple[str, ...]:
    found = getattr(dossier, name)
    made = found is not None and found != ()
    took = dossier.took_s.get(name)
    if made:
        said, told = _FOUND[name](dossier), "yes"
    else:
        why = dossier.skipped.get(name)
        said, told = one_line(why or EXPERIMENTS[name].looks_at, 300), "left out" if why else "no"
    return name, told, "" if took is None or not made else f"{took:.1f}", said


def _audit(dossier: Dossier) -> str:
    assert dossier.audit is not None
    by = [f.severity for f in dossier.audit.findings]
    counts = [(by.count(s), s) for s in ("error", "warning", "note") if s in by]
    kinds = [f"{n} {severity}{'' if n == 1 else 's'}" for n, severity in counts]
    return ", ".join(kinds) or "nothing found"


def _expected(dossier: Dossier) -> str:
    assert dossier.expected is not None
    outside = dossier.expected.outside_vocabulary
    told = f"{span(dossier.expected.acceptance)} tokens a step"
    if outside is not None and outside.of:
        told += f"; {counted(outside)} tokens are outside the draft vocabulary"
    return told


def _observed(dossier: Dossier) -> str:
    assert dossier.observed is not None
    told = f"{span(dossier.observed.acceptance)} tokens a step"
    if dossier.observed.identical is not None:
        told += f"; {counted(dossier.observed.identical)} answers are the target's own"
    if dossier.observed.untraced:
        told += f"; the trace of {dossier.observed.untraced} answers is missing or ends early"
    return told


def _states(dossier: Dossier) -> str:
    assert dossier.states is not None
    clean = states.is_clean(dossier.states)
    if clean is None:
        return "too few rows"
    if clean:
        return "every slot holds what it should"
    return f"bad rows: {states.where_bad(dossier.states)}"


def _replay(dossier: Dossier) -> str:
    assert dossier.replay is not None
    own = execution.declared(dossier.replay)
    told = f"{counted(own.agreement if own else None)} proposals are the declared drafter's"
    better = execution.better(dossier.replay)
    if better:
        told += f'; {counted(better[0].agreement)} are those of "{better[0].reading}"'
    return told


def _wanted(dossier: Dossier) -> str:
    better = wanted.better(dossier)
    if not better:
        return "no reading is accepted more than the checkpoint's own"
    best = f'{number(length(better[0].acceptance))} tokens a step with "{better[0].reading}"'
    return f"{best}, {number(length(wanted.base(dossier)))} as declared"


def _target(dossier: Dossier) -> str:
    assert dossier.target is not None
    return f"{counted(dossier.target.argmax)} tokens are the reference's likeliest"


def _sampling(dossier: Dossier) -> str:
    found = dossier.sampling
    assert found is not None
    return (
        f"{span(found.observed)} tokens a step at {found.temperature:g}; implied "
        f"{number(found.implied_sampled)} drawn, {number(found.implied_greedy)} likeliest"
    )


def _toggles(dossier: Dossier) -> str:
    told = [
        f"{t.what}: {number(length(t.length_a))} with {t.a}, {number(length(t.length_b))} with "
        f"{t.b} ({t.verdict})"
        for t in dossier.toggles
    ]
    return one_line("; ".join(told), 400)


def _controls(dossier: Dossier) -> str:
    found = dossier.controls
    assert found is not None
    parts = {
        "repeated text": found.repeated_text,
        "shuffled drafter": found.shuffled_drafter,
        "foreign states": found.foreign_states,
    }
    return ", ".join(f"{n} {number(length(v))}" for n, v in parts.items() if v is not None)


_FOUND: dict[str, Callable[[Dossier], str]] = {
    "audit": _audit,
    "expected": _expected,
    "observed": _observed,
    "states": _states,
    "replay": _replay,
    "wanted": _wanted,
    "target": _target,
    "sampling": _sampling,
    "toggles": _toggles,
    "controls": _controls,
}


def _findings(dossier: Dossier) -> list[tuple[str, ...]]:
    """The audit's findings, the gravest first."""
    if dossier.audit is None:
        return []
    order = ("error", "warning", "note")
    rows = sorted(dossier.audit.findings, key=lambda f: (order.index(f.severity), f.code, f.what))
    return [
        (f.severity, one_line(f.what, 300), one_line(f.remedy, 300), f.cause or "") for f in rows
    ]
