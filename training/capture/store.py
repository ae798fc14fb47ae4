"""Stored states: what lies in a shard, and how a shard is written.

A shard is a safetensors file of consecutive samples, its rows one behind the other. Its size is
known before the first row is, so rows are written in place as they come and memory holds no more
than a batch. Only a whole shard gets its name, and only then its line in `index.json`.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from drafters.headers import BYTES
from drafters.store import header_bytes
from training.errors import TrainingError
from training.files import file_digest, read_record, write_record

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "index.json"
StateDtype = Literal["float32", "bfloat16", "fp8"]
_STORED = {"float32": "F32", "bfloat16": "BF16", "fp8": "F8_E4M3"}


class Layout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a row of states looks like, in every shard of a folder.

    `choice`: the target's own choice lies beside each row. Older folders have none, and are told
    as they were: the digest of an index without it stays what it was.
    """

    aux_layers: tuple[int, ...]
    hidden_size: int
    dtype: StateDtype
    choice: bool = False

    def tensors(self, samples: int, tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> safetensors type and shape, in the order of the file: the widest types first,
        so that each tensor is aligned."""
        aux, kind = len(self.aux_layers), _STORED[self.dtype]
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "token_ids": ("I64", (tokens,)),
            "offsets": ("I64", (samples + 1,)),
            "loss_from": ("I64", (samples,)),
        }
        if self.choice:
            found["choice"] = ("I32", (tokens,))
        if self.dtype == "fp8":
            found["aux_scale"] = ("F32", (tokens, aux))
            found["last_scale"] = ("F32", (tokens, 1))
        found["aux"] = (kind, (tokens, aux * self.hidden_size))
        found["last_normed"] = (kind, (tokens, self.hidden_size))
        return found

    def size(self, samples: int, tokens: int) -> int:
        """Bytes of the tensors of so many samples and tokens, the header left out."""
        return sum(_bytes(kind, shape) for kind, shape in self.tensors(samples, tokens).values())


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One whole shard: its file, and the samples in it in order."""

    file: str
    bytes: int
    sha256: str
    tokens: int
    sample_ids: tuple[str, ...]
    categories: tuple[str | None, ...]


class StatesIndex(msgspec.Struct, frozen=True, kw_only=True):
    """`index.json`: rewritten whole after each shard, so a crash loses the shard in flight alone.

    `made_from`: everything that decides what the shards hold, as plain text by name.
    `shards_planned`: how many there are when the capture has ended.
    """

    version: int = 1
    layout: Layout
    made_from: dict[str, str]
    shards_planned: int
    shards: tuple[ShardEntry, ...] = ()


def read_index(folder: Path) -> StatesIndex | None:
    """The index of a states folder, None where there is none. Raises `UsageError`."""
    return read_record(folder / INDEX, StatesIndex, f"remove {folder} and capture again")


def write_index(folder: Path, index: StatesIndex) -> None:
    """Replace the index by `index`, whole."""
    write_record(folder / INDEX, index)


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[range]:
    """Consecutive samples by number, each shard closed before it would pass `shard_tokens`."""
    shards: list[range] = []
    begin, tokens = 0, 0
    for number, length in enumerate(lengths):
        if tokens and tokens + length > shard_tokens:
            shards.append(range(begin, number))
            begin, tokens = number, 0
        tokens += length
    if begin < len(lengths):
        shards.append(range(begin, len(lengths)))
    return shards


def encode(states: Tensor, blocks: int, dtype: StateDtype) -> tuple[Tensor, Tensor | None]:
    """States [T, blocks * H] as they are stored, and their scales [T, blocks] if any."""
    import torch

    from training.capture.fp8 import quantise

    if dtype == "fp8":
        return quantise(states, blocks)
    return states.to(torch.float32 if dtype == "float32" else torch.bfloat16), None


class ShardWriter:
    """One shard being written; `add` may come in any order, `finish` once all samples are in.

    `lengths` and `loss_from` of the shard's samples in order.
    """

    def __init__(
        self, path: Path, layout: Layout, *, lengths: Sequence[int], loss_from: Sequence[int]
    ) -> None:
        import torch

        self.path, self.layout, self.lengths = path, layout, list(lengths)
        self.partial = path.with_name(f".{path.name}.partial")
        offsets = torch.tensor([0, *self.lengths]).cumsum(0)
        self.offsets = [int(n) for n in offsets]
        tensors = layout.tensors(len(self.lengths), self.offsets[-1])
        header, self._begins = header_bytes(
            {name: (kind, shape, _bytes(kind, shape)) for name, (kind, shape) in tensors.items()}
        )
        self._widths = {
            name: _bytes(kind, shape[1:]) for name, (kind, shape) in tensors.items()
        }  # of a row
        self.bytes = len(header) + sum(_bytes(*told) for told in tensors.values())
        self._missing = set(range(len(self.lengths)))
        self._file = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _reserve(self._file, self.bytes)
            _write(self._file, header, 0)
            self._put("offsets", 0, offsets)
            self._put("loss_from", 0, torch.tensor(list(loss_from), dtype=torch.int64))
        except BaseException:
            self.abandon()
            raise

    def add(
        self,
        number: int,
        token_ids: Tensor,
        aux: Tensor,
        last_normed: Tensor,
        choice: Tensor | None = None,
    ) -> None:
        """The states of the shard's sample `number`: [T], [T, n * H], [T, H]; its choices [T].

        `choice` is written where the layout has it. Raises `TrainingError` where they are not of
        the sample's length or the layout's width.
        """
        import torch

        layout, length = self.layout, self.lengths[number]
        width = layout.hidden_size
        blocks = len(layout.aux_layers)
        wanted = ((length,), (length, blocks * width), (length, width))
        found = tuple(tuple(t.shape) for t in (token_ids, aux, last_normed))
        if found != wanted:
            raise TrainingError(
                f"{self.path.name}: the engine gave states of the shapes {list(found)} for sample "
                f"{number} of the shard, wanted {list(wanted)}"
            )
        row = self.offsets[number]
        self._put("token_ids", row, token_ids.to(torch.int64))
        if layout.choice:
            assert choice is not None and choice.shape == (length,), "a row without its choice"
            self._put("choice", row, choice.to(torch.int32))
        for name, states, parts in (("aux", aux, blocks), ("last", last_normed, 1)):
            stored, scale = encode(states, parts, layout.dtype)
            self._put("last_normed" if name == "last" else name, row, stored)
            if scale is not None:
                self._put(f"{name}_scale", row, scale)
        self._missing.discard(number)

    def finish(self, sample_ids: tuple[str, ...], categories: tuple[str | None, ...]) -> ShardEntry:
        """Give the shard its name; its line for the index."""
        assert not self._missing, f"samples {sorted(self._missing)[:3]} were never written"
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1
        digest = file_digest(self.partial)
        os.replace(self.partial, self.path)
        return ShardEntry(
            file=self.path.name,
            bytes=self.bytes,
            sha256=digest,
            tokens=self.offsets[-1],
            sample_ids=sample_ids,
            categories=categories,
        )

    def abandon(self) -> None:
        """Close and remove what was written so far."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self.partial.unlink(missing_ok=True)

    def _put(self, name: str, row: int, tensor: Tensor) -> None:
        import torch

        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        _write(self._file, data.data, self._begins[name] + row * self._widths[name])


def _bytes(kind: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * BYTES[kind]


def _reserve(file: int, size: int) -> None:
    """Have the disk promise the space now, where the file system can."""
    try:
        os.posix_fallocate(file, 0, size)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise
        os.ftruncate(file, size)


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    """All of `data`: one call writes at most 2 GiB."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written
