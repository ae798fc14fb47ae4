"""What was not the same in the last good and the first bad run: the usual cause, in words."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.errors import UsageError
from harness.measure.store import RunFolder
from harness.resume import Made, differences


def between(good: Path, bad: Path, metric: str) -> list[str]:
    """Everything that differs in code, versions, models and machine, what may move `metric` first.

    Says so where nothing does, or where a run's folder is gone.
    """
    try:
        then, now = RunFolder(good).manifest(), RunFolder(bad).manifest()
    except UsageError:
        gone = good if not good.is_dir() else bad
        return [f"what changed is not known: the run {gone.name} is gone or cannot be read"]
    made = {f.name: getattr(now, f.name) for f in msgspec.structs.fields(Made)}
    found = differences(then, Made(**made))
    return found or ["nothing that is recorded changed: suspect the machine"]
