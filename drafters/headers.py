"""Names, types and shapes of a checkpoint's tensors, read without torch and without the data."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any, NamedTuple

from drafters.spec import DrafterError

_LARGEST_HEADER = 100_000_000  # the format's own limit, in bytes
_LARGEST_JSON = 100_000_000
BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of one element by safetensors' type name; a type that is not here is not sized."""


class TensorHeader(NamedTuple):
    """One tensor: safetensors' type name (F32, BF16, I64 …), its shape, and where it lies.

    `begin` and `end` are offsets in bytes from the start of `file`.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int = 0
    end: int = 0

    @property
    def elements(self) -> int:
        """The number of elements (1 for a scalar)."""
        return math.prod(self.shape)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`. Raises DrafterError naming the file and what is wrong."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DrafterError(f"{path} is no regular file: put the checkpoint's own file there")
        if found.st_size > _LARGEST_JSON:
            raise DrafterError(f"{path} has {found.st_size} bytes: that is no file of a checkpoint")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DrafterError(f"{path} is missing: a checkpoint folder needs it") from None
    except json.JSONDecodeError as error:
        raise DrafterError(f"{path} is not JSON (line {error.lineno}: {error.msg})") from None
    except RecursionError:
        raise DrafterError(
            f"{path} is nested too deeply: that is no file of a checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise DrafterError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DrafterError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, the index's shards where there is an index.

    Raises DrafterError if there are none, or if the index names a file that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise DrafterError(f"{index} has no weight_map: the index is broken, copy it again")
        for name in names.values():
            if not isinstance(name, str) or not name or ".." in name or name.startswith("/"):
                raise DrafterError(f"{index} names {name!r}, which is no file of this folder")
        files = [folder / name for name in sorted(set(names.values()))]
        for file in files:
            if not file.is_file():
                raise DrafterError(f"{file} is missing: {index.name} names it, copy it again")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DrafterError(f"{folder} has no *.safetensors file: the weights are missing")
    return files


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file. Raises DrafterError if it is cut off or damaged."""
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DrafterError(f"{file} is no regular file: put the checkpoint's own file there")
        size = found.st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise DrafterError(f"{file} is cut off or is not a safetensors file ({size} bytes)")
            text = stream.read(length)
    except OSError as error:
        raise DrafterError(f"{file} cannot be read: {error}") from None
    try:
        header = json.loads(text)
        tensors = {
            name: _tensor(entry, file, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise DrafterError(f"{file} has a damaged header: it is no safetensors file") from None
    expected = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if size < expected:
        raise DrafterError(f"{file} is cut off: {size} of {expected} bytes, copy it again")
    return tensors


def _tensor(entry: dict[str, Any], file: Path, data: int) -> TensorHeader:
    """One entry of a header; ValueError where its numbers cannot be."""
    dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)) or end < begin:
        raise ValueError("a shape or an offset that is no natural number")
    width = BYTES.get(dtype)
    if width is not None and math.prod(shape) * width != end - begin:
        raise ValueError("a tensor's bytes are not its shape's")
    return TensorHeader(dtype, shape, file, data + begin, data + end)


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """All tensors of a checkpoint folder by name."""
    if not folder.is_dir():
        raise DrafterError(f"{folder} is no folder: give the checkpoint's folder")
    tensors: dict[str, TensorHeader] = {}
    for file in weight_files(folder):
        tensors.update(read_header(file))
    return tensors
