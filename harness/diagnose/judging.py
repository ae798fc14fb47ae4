"""A planted case and what was called of it: whether that is right, and in words."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from harness.diagnose.matrix import CaseResult
from harness.diagnose.planted import Case
from harness.diagnose.records import Diagnosis, Dossier
from harness.diagnose.restored import Fixed
from harness.errors import one_line


def judged(
    case: Case,
    engine: str,
    dossier: Dossier,
    diagnosis: Diagnosis,
    code: str,
    took_s: float,
) -> CaseResult:
    """Whether the right cause was called, and where it was ranked."""
    ranked = tuple(each.cause for each in diagnosis.ranked if each.strength != "excluded")
    expected = dossier.expected.acceptance.length if dossier.expected is not None else None
    observed = dossier.observed.acceptance.length if dossier.observed is not None else None
    return CaseResult(
        name=case.name,
        kind=case.kind,
        what=case.what,
        engine=engine,
        seed=case.seed,
        severity=case.severity,
        cause=case.cause,
        right=case.right,
        called=diagnosis.cause,
        collapse=diagnosis.collapse,
        ranked=ranked[:5],
        first=diagnosis.cause in case.right,
        among_three=bool(set(ranked[:3]) & set(case.right)) or diagnosis.cause in case.right,
        expected=expected,
        observed=observed,
        experiments=tuple(sorted(dossier.took_s)),
        skipped=dossier.skipped,
        took_s=took_s,
        code=code,
        emulated=case.emulated,
        mends=case.mends,
        mendable=case.mendable,
    )


def with_fix(
    result: CaseResult, case: Case, fixed: Fixed | None, then: str | None = None
) -> CaseResult:
    """The result with what `--fix` did.

    `then`: of two faults at once, what was called once the first was mended; None: none was.
    """
    both = None if then is None else _both(case.parts, result.called, then)
    return msgspec.structs.replace(result, fixed=fixed, then=then, both=both)


def _both(parts: Sequence[Sequence[str]], first: str, then: str) -> bool:
    """Whether one name is of one fault, and the other of the other."""
    return any(first in one and then in other for one, other in itertools.permutations(parts, 2))


def details(diagnosis: Diagnosis) -> dict[str, str]:
    """Of the named cause: by these it is mended."""
    named = (r.details for r in diagnosis.ranked if r.cause == diagnosis.cause)
    return next(named, {})


def verdict_line(result: CaseResult) -> str:
    """One line of what was called, and whether that is right."""
    called = result.called if result.called != result.cause else "right"
    mark = "ok" if result.first else ("among three" if result.among_three else "WRONG")
    lengths = f"{_number(result.expected)} -> {_number(result.observed)}"
    return one_line(f"{mark}: {called} (acceptance length {lengths}, {result.took_s:.0f} s)")


def mending_line(result: CaseResult) -> str:
    """One line of what `--fix` did."""
    fixed = result.fixed
    if fixed is None or not fixed.changes:
        return f"not mended: {'not tried' if fixed is None else fixed.why_not}"
    held = fixed.held
    told = f"mended: {'; '.join(fixed.changes)}"
    if held is not None:
        told += f": {100 * held.difference:+.1f} points of what is expected"
    return one_line(told)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
