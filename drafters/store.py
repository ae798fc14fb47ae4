"""A drafter's weights under other names: linked where nothing changes, else copied by the piece.

Bytes of tensors are never touched: a renamed tensor has another entry in the header and the same
bytes behind it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from drafters.headers import BYTES, TensorHeader
from drafters.reading import Checkpoint
from drafters.spec import DrafterError

_PIECE = 1 << 24  # bytes copied at once
_INDEX = "model.safetensors.index.json"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor to be written: from where it lies, or from `made`."""

    name: str
    header: TensorHeader
    made: bytes | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """For each file of weights the tensors it is to hold, and whether that is another file.

    `renamed`, `dropped`, `added`: names, for the report.
    """

    files: dict[Path, tuple[Entry, ...]]
    changed: frozenset[Path]
    renamed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


def plan_weights(checkpoint: Checkpoint, *, tables: bool = False) -> Plan:
    """What has to happen to the weights so that every reader knows their names.

    Engines know `midlayer.*` and `layers.0.*` alike, but neither `model.*` nor the older names of
    fc_norm. `tables`: for the speculators library, which wants `layers.0.*`, and t2d beside d2t.
    The target's own tensors (`verifier_*`) are left out.
    """
    files: dict[Path, list[Entry]] = {}
    changed: set[Path] = set()
    renamed, dropped, added = [], [], []
    for neutral, header in checkpoint.tensors.items():
        entries = files.setdefault(header.file, [])
        stored = checkpoint.stored[neutral]
        name = neutral if tables or not stored.startswith("midlayer.") else stored
        if neutral.startswith("verifier_"):
            dropped.append(stored)
            changed.add(header.file)
            continue
        if name != stored:
            renamed.append(stored)
            changed.add(header.file)
        entries.append(Entry(name=name, header=header))
        if tables and neutral == "d2t" and not checkpoint.has("t2d"):
            entries.append(_t2d(checkpoint, header))
            added.append("t2d")
            changed.add(header.file)
    return Plan(
        files={file: tuple(entries) for file, entries in files.items()},
        changed=frozenset(changed),
        renamed=tuple(renamed),
        dropped=tuple(dropped),
        added=tuple(added),
    )


def _t2d(checkpoint: Checkpoint, d2t: TensorHeader) -> Entry:
    """The table of target ids that are in the draft vocabulary, from d2t."""
    import numpy as np

    from drafters.weights import integers

    vocab = checkpoint.spec.vocab_size
    kept = integers(d2t) + np.arange(d2t.elements)
    if kept.size and not 0 <= int(kept.min()) <= int(kept.max()) < vocab:
        raise DrafterError(
            f"{d2t.file}: d2t names target ids from {kept.min()} to {kept.max()} of a vocabulary "
            f"of {vocab}: validate the folder first"
        )
    table = np.zeros(vocab, np.bool_)
    table[kept] = True
    return Entry(
        name="t2d", header=TensorHeader("BOOL", (vocab,), d2t.file, 0, vocab), made=table.tobytes()
    )


def write_weights(
    checkpoint: Checkpoint, plan: Plan, out: Path, *, link: Literal["soft", "hard"]
) -> None:
    """Put the planned files, and an index where there are several, into the folder `out`."""
    for file, entries in plan.files.items():
        place = out / file.name
        if file not in plan.changed:
            _link(file, place, link)
            continue
        partial = place.with_name(place.name + ".partial")
        _write(entries, partial)
        os.replace(partial, place)
    index = out / _INDEX
    if (checkpoint.path / _INDEX).is_file() or len(plan.files) > 1:
        _write_index(plan, index)
    else:
        index.unlink(missing_ok=True)


def _link(source: Path, place: Path, how: Literal["soft", "hard"]) -> None:
    place.unlink(missing_ok=True)
    source = source.resolve()
    try:
        place.symlink_to(source) if how == "soft" else os.link(source, place)
    except OSError:
        if how == "soft":
            os.link(source, place)
        else:
            shutil.copyfile(source, place)


def _write_index(plan: Plan, index: Path) -> None:
    total = sum(e.header.end - e.header.begin for es in plan.files.values() for e in es)
    names = {entry.name: file.name for file, es in plan.files.items() for entry in es}
    text = json.dumps(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    )
    partial = index.with_name(index.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, index)


def _write(entries: tuple[Entry, ...], place: Path) -> None:
    """One safetensors file. The widest types come first, so that all lie at multiples of theirs."""
    ordered = sorted(entries, key=lambda e: (-BYTES.get(e.header.dtype, 1), e.header.begin))
    tensors = {entry.name: entry.header for entry in ordered}
    with place.open("wb") as out:
        out.write(
            header_bytes(
                {n: (h.dtype, h.shape, h.end - h.begin) for n, h in tensors.items()},
                metadata={"format": "pt"},
            )[0]
        )
        for entry in ordered:
            for piece in _bytes(entry):
                out.write(piece)
        out.flush()
        os.fsync(out.fileno())


def header_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]],
    *,
    metadata: dict[str, str] | None = None,
) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and where in the file each tensor begins.

    `tensors`: type name, shape and bytes, in the order of the file.
    """
    told: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    begins, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        told[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        begins[name], at = at, at + size
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


def _bytes(entry: Entry) -> Iterator[bytes]:
    if entry.made is not None:
        yield entry.made
        return
    left = entry.header.end - entry.header.begin
    with entry.header.file.open("rb") as source:
        source.seek(entry.header.begin)
        while left:
            piece = source.read(min(left, _PIECE))
            if not piece:
                raise DrafterError(f"{entry.header.file} became shorter while it was read")
            left -= len(piece)
            yield piece
