"""What a stage was made from, kept beside its output: unchanged it is not made again.

`stage.json` is written before the stage begins, `gate.json` when it has ended. A stage that is
asked for anew with another plan or other inputs is refused: half of one and half of another would
pass for a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import UsageError
from training.files import read_record, write_record
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
    _check_same(folder, found, wanted)
    gate = read_gate(folder)
    return None if gate is None else require(gate, folder, "remove the folder to try it again")


def _check_same(folder: Path, found: StageRecord, wanted: StageRecord) -> None:
    way_out = f"give another --out, or remove {folder} to make {wanted.stage} anew"
    for name in sorted({*found.sections, *wanted.sections}):
        was, now = found.sections.get(name), wanted.sections.get(name)
        if was != now:
            key, old, new = _first_difference(name, was, now)
            raise UsageError(
                f"{folder} was made with {key} = {_short(old)}, now it is {_short(new)}; {way_out}"
            )
    for name in sorted({*found.inputs, *wanted.inputs}):
        if found.inputs.get(name) != wanted.inputs.get(name):
            raise UsageError(f"{folder} was made from another {name}; {way_out}")


def _first_difference(name: str, was: Any, now: Any) -> tuple[str, Any, Any]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            if was.get(key) != now.get(key):
                return _first_difference(f"{name}.{key}", was.get(key), now.get(key))
    return name, was, now


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:59]}…"
