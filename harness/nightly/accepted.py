"""Changes that were looked at and accepted, with the reason: a file beside the suite's.

One table for each, sorted, one key a line, so that two branches merge by themselves and a diff
says what was accepted. Who did it, and when, is what the version control tells.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Literal

import msgspec

from harness.errors import UsageError, one_line, printable
from harness.measure.store import write_atomic
from harness.nightly.edited import with_table
from harness.nightly.folders import NAMED, night_order
from harness.nightly.suite import check_keys
from harness.plan.load import read_toml
from harness.plan.schema import Section
from harness.plan.strict import decode

Kind = Literal["accepted", "known-bad"]
HEAD = (
    "# Changes that were looked at. Written by `python -m harness nightly accept`; may be edited.\n"
    "# accepted: the series begins anew at that night. known-bad: it is told, and fails nothing.\n"
)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


class Accepted(Section, frozen=True, kw_only=True):
    """One accepted change. `series` may hold `*`; `since` is a night; `until` a date, its end."""

    series: str
    since: str
    kind: Kind = "accepted"
    reason: str
    until: str | None = None


def read_accepted(path: Path) -> tuple[Accepted, ...]:
    """Every record of the file; none where there is no file. Raises `UsageError`."""
    if path.is_symlink():
        path = _behind(path)
    if not path.exists():
        return ()
    table = read_toml(path, str(path))
    wrong = [key for key in table if key != "change"]
    if wrong:
        raise UsageError(f"{path}: unknown key '{one_line(wrong[0], 80)}'; did you mean 'change'?")
    items = table.get("change", [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UsageError(f"{path}: 'change': write each as a table of its own, [[change]]")
    found = []
    for number, item in enumerate(items, 1):
        where = f"{path}, change {number}"
        check_keys(item, Accepted, where)
        for key in ("series", "since", "reason"):
            if key not in item:
                raise UsageError(f"{where}: '{key}' is missing")
        found.append(check(decode(item, where, Accepted), where))
    return tuple(found)


def check(change: Accepted, where: str) -> Accepted:
    """Raise `UsageError` where a record says nothing, or names no night."""
    if not printable(change.reason):
        raise UsageError(f"{where}: give a reason: it is what the next reader needs")
    if not change.series.strip():
        raise UsageError(f"{where}: name a series")
    if not NAMED.fullmatch(change.since):
        raise UsageError(f"{where}: since: '{one_line(change.since, 40)}' is no night")
    if change.until is not None and not is_date(change.until):
        raise UsageError(
            f"{where}: until: '{one_line(change.until, 40)}' is no date; write it as 2026-12-31"
        )
    return change


def is_date(text: str) -> bool:
    """Whether it is a day of the calendar, as 2026-12-31."""
    try:
        return bool(DATE.fullmatch(text)) and date.fromisoformat(text) is not None
    except ValueError:
        return False


def add(path: Path, change: Accepted) -> None:
    """Record it; one of the same series, night and kind is replaced, all else stays as it is.

    Raises `UsageError` where the file is so written that its comments would be lost.
    """
    check(change, str(path))
    if path.is_symlink():
        path = _behind(path)
    read_accepted(path)
    text = path.read_bytes().decode() if path.exists() else HEAD
    made = with_table(text, "change", _table(change), _key)
    if made is None:
        raise UsageError(
            f"{path}: cannot be added to and kept as it is; write each change as a table of its "
            "own, [[change]], a line for each key, or add this one by hand"
        )
    write_atomic(path, made.encode())


def _behind(link: Path) -> Path:
    """The file that a link names, so that the link stays one."""
    try:
        return link.resolve(strict=True)
    except (OSError, RuntimeError):  # nothing there, or a loop
        raise UsageError(f"{link}: is a link to nothing; remove it, or make its file") from None


def _table(change: Accepted) -> dict[str, str]:
    return {name: v for name, v in msgspec.structs.asdict(change).items() if v is not None}


def _key(table: Mapping[str, str]) -> tuple[str, tuple[str, int], str]:
    return table["series"], night_order(table["since"]), table.get("kind", "accepted")


def restart_of(changes: Sequence[Accepted], series: str) -> Accepted | None:
    """The latest accepted change of the series: it begins anew with that night."""
    fits = [c for c in changes if c.kind == "accepted" and matches(c, series)]
    return max(fits, key=lambda c: night_order(c.since), default=None)


def known_bad(changes: Sequence[Accepted], series: str, night: str) -> Accepted | None:
    """The record that says that the series is known to be bad tonight, if any."""
    for change in changes:
        over = change.until is not None and change.until < night[:10]
        begun = night_order(change.since) <= night_order(night)
        if change.kind == "known-bad" and not over and begun and matches(change, series):
            return change
    return None


def matches(change: Accepted, series: str) -> bool:
    """Whether the record is of this series."""
    return fnmatch.fnmatchcase(series, change.series)
