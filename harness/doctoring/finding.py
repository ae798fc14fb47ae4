"""What the doctor says: one finding a check, worst first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Severity = Literal["fail", "warn", "unknown", "ok"]
ORDER: tuple[Severity, ...] = ("fail", "warn", "unknown", "ok")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check's answer. `unknown`: it could not be looked at, which is no failure.

    `area` groups findings (gpu, memory, disk …); `where`: the file, device or key.
    """

    severity: Severity
    area: str
    code: str
    where: str
    what: str
    remedy: str = ""


def _plain(text: str) -> str:
    """Names come from files: what steers a terminal, or no JSON can hold, is left out."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def _finding(
    severity: Severity, area: str, code: str, where: str, what: str, remedy: str = ""
) -> Finding:
    where, what, remedy = _plain(where), _plain(what), _plain(remedy)
    return Finding(severity=severity, area=area, code=code, where=where, what=what, remedy=remedy)


def fail(area: str, code: str, where: str, what: str, remedy: str = "") -> Finding:
    """Something that would fail."""
    return _finding("fail", area, code, where, what, remedy)


def warn(area: str, code: str, where: str, what: str, remedy: str = "") -> Finding:
    """Something that may fail, or costs speed."""
    return _finding("warn", area, code, where, what, remedy)


def unknown(area: str, code: str, where: str, what: str, remedy: str = "") -> Finding:
    """Something that could not be looked at."""
    return _finding("unknown", area, code, where, what, remedy)


def ok(area: str, code: str, where: str, what: str) -> Finding:
    """Something that is as it should be."""
    return _finding("ok", area, code, where, what)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first, each severity by area, in the order of their making otherwise."""
    found = list(findings)
    areas = list(dict.fromkeys(f.area for f in found))
    return sorted(found, key=lambda f: (ORDER.index(f.severity), areas.index(f.area)))


def gib(size: float) -> str:
    """Bytes in GiB, in MiB where that is less than one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
