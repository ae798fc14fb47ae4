"""What each stage took: seconds over all starts, kept in `pipeline.json`, and its tokens.

Whatever command ran a stage adds to it, so that the table at a pipeline's end tells the whole
training however often, and by which commands, it was begun. A process that was killed outright
adds nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import HarnessError
from training.files import read_record, write_record
from training.folders import Stage, stage_folder
from training.gate import Gate, read_gate

RECORD = "pipeline.json"


class Took(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds spent on a stage over all starts, and whether it has ended."""

    seconds: float = 0.0
    ended: bool = False


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """`pipeline.json`."""

    stages: dict[str, Took] = {}


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's gate, and the seconds of this start; `kept`: it had ended before."""

    gate: Gate
    seconds: float
    kept: bool


def timed(out: Path, stage: Stage, run: Callable[[], Gate]) -> Done:
    """Run a stage and add what it took; a stage that had ended adds nothing. Raises as it does."""
    read_times(out)  # where it is damaged, that is said before the work and not after
    before = read_gate(stage_folder(out, stage))
    begun = time.perf_counter()
    try:
        gate = run()
    except BaseException:
        with contextlib.suppress(OSError):  # of a full disk too: what ended the stage is told
            _spent(out, stage, time.perf_counter() - begun, ended=False)
        raise
    seconds = time.perf_counter() - begun
    kept = before is not None and before == gate
    if not kept:
        _spent(out, stage, seconds, ended=True)
    return Done(gate=gate, seconds=seconds, kept=kept)


def _spent(out: Path, stage: Stage, seconds: float, *, ended: bool) -> None:
    """Add what was spent on a stage. Where nothing was written yet there is nothing to add to.

    Of several processes of one training the first alone adds.
    """
    if not stage_folder(out, stage).is_dir() or os.environ.get("RANK", "0") != "0":
        return
    times = read_times(out)
    took = times.stages.get(stage, Took())
    stages = {**times.stages, stage: Took(seconds=took.seconds + seconds, ended=ended)}
    write_record(out / RECORD, Times(stages=stages))


def read_times(out: Path) -> Times:
    """What each stage took; nothing where it was never said. Raises `UsageError`."""
    return read_record(out / RECORD, Times, "remove it") or Times()


def tokens_of(out: Path, stage: Stage) -> int | None:
    """The tokens that a stage worked through, by its own records; None where it tells none.

    Of `generate` those of the answers, of `capture` all of the stored ones, of `vocab` those that
    were counted, of `train` all of every epoch.
    """
    folder = stage_folder(out, stage)
    try:
        if stage == "generate":
            return _told(folder / "manifest.json", "tokens", "answer")
        if stage == "capture":
            from training.capture.store import read_index

            index = read_index(folder)
            return sum(s.tokens for s in index.shards) or None if index is not None else None
        if stage == "vocab":
            return _told(folder / "coverage.json", "tokens")
        if stage == "train":
            from training.train.metrics import read_metrics

            return sum(r["tokens"] for r in read_metrics(folder) if r["kind"] == "update") or None
    except (HarnessError, KeyError, TypeError):
        return None  # the records are checked where they are used
    return None


def _told(path: Path, *keys: str) -> int | None:
    found: Any = read_record(path, dict[str, Any], "")
    for key in keys:
        found = None if found is None else found[key]
    return None if found is None else int(found)
