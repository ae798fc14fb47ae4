"""What a check found: how bad, what, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Severity = Literal["error", "warning", "note"]
_ORDER = {"error": 0, "warning": 1, "note": 2}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. `where`: the file or folder; `why` may be empty where `what` says it all."""

    severity: Severity
    code: str
    where: str
    what: str
    why: str = ""
    remedy: str = ""

    def line(self) -> str:
        """Where, what, why and the remedy as one sentence, for an error message."""
        text = f"{self.where}: {self.what}"
        if self.why:
            text += f": {self.why}"
        return f"{text}; {self.remedy}" if self.remedy else text


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes; within each as found."""
    return sorted(findings, key=lambda finding: _ORDER[finding.severity])


def plain(text: str) -> str:
    """On one line, without characters that would steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
