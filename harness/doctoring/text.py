"""The doctor's findings as text: worst first, the memory table, and one closing line."""

from __future__ import annotations

from collections.abc import Sequence

from harness.doctoring.finding import ORDER, Finding, gib
from harness.doctoring.memory import Need

TITLES = {
    "fail": "would fail",
    "warn": "may go wrong, or costs speed",
    "unknown": "not known",
    "ok": "in order",
}


def text_of(subject: str, findings: Sequence[Finding], needs: Sequence[Need]) -> str:
    """All findings grouped by severity, then what a device must hold, then what follows."""
    lines = [subject]
    for severity in ORDER:
        group = [f for f in findings if f.severity == severity]
        if group:
            lines += ["", f"{TITLES[severity]}:"]
            lines += [line for f in group for line in _lines(f)]
    for need in needs:
        lines += ["", *table(need)]
    return "\n".join([*lines, "", closing(findings)]) + "\n"


def _lines(finding: Finding) -> list[str]:
    lines = [f"  {finding.area:<10} {finding.where}: {finding.what}"]
    return [*lines, f"  {'':<10} -> {finding.remedy}"] if finding.remedy else lines


def table(need: Need) -> list[str]:
    """The terms of one device's memory."""
    rows: list[tuple[str, str, str, str]] = []
    rows += [(t.name, gib(t.bytes), t.kind, t.how) for t in need.terms]
    rows.append(("in all", gib(need.total), "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"memory of {need.device}, computed beforehand:"]
    for name, size, kind, how in rows:
        cells = f"  {name:<{widths[0]}}  {size:>{widths[1]}}  {kind:<{widths[2]}}  {how}"
        lines.append(cells.rstrip())
    return [*lines, *(f"  {note}" for note in need.notes)]


def closing(findings: Sequence[Finding]) -> str:
    """What follows of all findings, in one line."""
    count = {severity: sum(f.severity == severity for f in findings) for severity in ORDER}
    rest = (
        f"{_count(count['warn'], 'warning')}, {count['unknown']} not known, {count['ok']} in order"
    )
    if count["fail"]:
        return f"{_count(count['fail'], 'thing')} would fail; {rest}"
    return f"nothing would fail; {rest}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
