"""Findings of the doctor, as its tests read them."""

from __future__ import annotations

from typing import Any

from harness.doctoring.finding import Finding

QUIET = lambda line: None  # noqa: E731


def codes(findings: Any, severity: str) -> list[str]:
    return [f.code for f in findings if f.severity == severity]


def only(findings: Any) -> Finding:
    (one,) = findings
    return one
