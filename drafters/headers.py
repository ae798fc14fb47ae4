"""Names, types and shapes of a checkpoint's tensors, read without torch and without the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from drafters.spec import DrafterError

_LARGEST_HEADER = 100_000_000  # the format's own limit, in bytes


class TensorHeader(NamedTuple):
    """One tensor: safetensors' type name (F32, BF16, I64 …), its shape, and its file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`. Raises DrafterError naming the file and what is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DrafterError(f"{path} is missing: a checkpoint folder needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DrafterError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise DrafterError(f"{path} is not JSON (line {error.lineno}: {error.msg})") from None
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
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise DrafterError(f"{file} is cut off or is not a safetensors file ({size} bytes)")
        try:
            header = json.loads(stream.read(length))
            tensors = {
                name: TensorHeader(str(entry["dtype"]), tuple(entry["shape"]), file)
                for name, entry in header.items()
                if name != "__metadata__"
            }
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name in tensors]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise DrafterError(f"{file} has a damaged header: it is no safetensors file") from None
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise DrafterError(f"{file} is cut off: {size} of {expected} bytes, copy it again")
    return tensors


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """All tensors of a checkpoint folder by name."""
    if not folder.is_dir():
        raise DrafterError(f"{folder} is no folder: give the checkpoint's folder")
    tensors: dict[str, TensorHeader] = {}
    for file in weight_files(folder):
        tensors.update(read_header(file))
    return tensors
