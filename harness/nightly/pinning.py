"""Pins the run that an entry is held to: the first good one by itself, another one when told."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import UsageError
from harness.nightly import folders, measuring
from harness.nightly.folders import NightFolder
from harness.nightly.records import Baseline, EntryState, Night
from harness.nightly.suite import Loaded

FIRST = "the first good night"


def pin_first(loaded: Loaded, results: Path, folder: NightFolder, night: Night) -> list[str]:
    """Pin every entry that has no baseline of what it measures now, and kept all its gates.

    Returns what was done, in words.
    """
    told = []
    for state in night.entries:
        if state.status != "done":
            continue
        old = folders.read_baseline(results, loaded.suite.name, state.name)
        if old is not None and old.digest == state.digest:
            continue
        broken = [g for g in night.gates if g.entry == state.name and g.status == "fail"]
        if broken:
            told.append(f"{state.name}: not pinned as the baseline, {broken[0].text}")
            continue
        reason = FIRST if old is None else "the entry measures something else than before"
        told.append(pin(loaded, results, folder, state, reason))
    return told


def pin(loaded: Loaded, results: Path, folder: NightFolder, state: EntryState, reason: str) -> str:
    """Hold the entry to its run of that night. Raises `UsageError` where it has none."""
    points = folder.points(state.name)
    if points is None:
        raise UsageError(
            f"{folder.path}: {state.name} was not measured on that night ({state.status})"
        )
    suite = loaded.suite.name
    old = folders.read_baseline(results, suite, state.name)
    measuring.label(
        results / points.run, suite, pinned=f"baseline of {suite}, {state.name}: {reason}"
    )
    folders.write_baseline(
        results,
        Baseline(
            suite=suite,
            entry=state.name,
            digest=points.digest,
            night=folder.name,
            run=points.run,
            pinned=datetime.now(UTC).isoformat(timespec="seconds"),
            reason=reason,
            points=points.points,
        ),
    )
    if old is not None and old.run != points.run:
        with contextlib.suppress(UsageError, OSError):
            measuring.unpin(results / old.run)
    return f"{state.name}: the night of {folder.name} is its baseline ({reason})"
