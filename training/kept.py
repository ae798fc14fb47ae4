"""What a stage was made from, kept beside its output: unchanged it is not made again.

`stage.json` is written before the stage begins, `gate.json` when it has ended. A stage that is
asked for anew with another plan or other inputs is refused: half of one and half of another would
pass for a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import UsageError, one_line
from training.files import read_record, write_record
from training.folders import STAGES
from training.gate import Gate, read_gate, require

RECORD = "stage.json"


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the plan that the stage reads, by key, and the digests of its inputs."""

    stage: str
    sections: dict[str, Any]
    inputs: dict[str, str]


def begin_stage(
    folder: Path, stage: str, sections: Mapping[str, Any], inputs: Mapping[str, str]
) -> Gate | None:
    """Open a stage's folder: its gate where it has ended as it is asked for, None: go on.

    Raises `UsageError` where the folder was made from another plan or other inputs, `GateFailed`
    where it has ended and its gate did not pass.
    """
    plain = msgspec.json.decode(msgspec.json.encode(dict(sections)))
    wanted = StageRecord(stage=stage, sections=plain, inputs=dict(inputs))
    found = read_record(folder / RECORD, StageRecord, "remove the folder")
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder / RECORD, wanted)
        return None
    changed = list(differences(found.sections, wanted.sections))
    refuse_changed(folder, [*changed, *_changed_inputs(found.inputs, wanted.inputs)])
    gate = read_gate(folder)
    return None if gate is None else require(gate, folder, "remove the folder to try it again")


def begun_sections(folder: Path) -> dict[str, Any] | None:
    """The parts of the plan that the stage in `folder` was begun with, None: it was not begun.

    Raises `UsageError` where that cannot be read.
    """
    found = read_record(folder / RECORD, StageRecord, "remove the folder")
    return None if found is None else found.sections


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """The keys whose values differ, in words: `train.lr 0.0001 -> 0.001`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            name = f"{where}.{key}" if where else str(key)
            yield from differences(before.get(key), now.get(key), name)
    elif before != now:
        yield f"{where} {_word(before)} -> {_word(now)}"


def _word(value: Any) -> str:
    return "none" if value is None else one_line(str(value), 60)


def _changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            yield f"the {'output of ' if name in STAGES else ''}{name} changed"


def refuse_changed(folder: Path, changed: Sequence[str]) -> None:
    """Raise `UsageError` where anything of what the folder was made from has changed."""
    if changed:
        raise UsageError(
            f"{folder} was made from something else: {'; '.join(changed)}; give another --out, or "
            "remove that folder to make it anew"
        )
