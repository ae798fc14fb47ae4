"""Files of a stage's folder: written whole, read back with one clear line, digested, locked."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.errors import UsageError, one_line

Record = TypeVar("Record")
LOCK = ".lock"
_CHUNK = 1 << 24


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is whole or not there: beside it, synced, then renamed."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def record_bytes(value: Any) -> bytes:
    """A record as JSON that a person can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def write_record(path: Path, value: Any) -> None:
    """Write a record as JSON, whole or not at all."""
    write_whole(path, record_bytes(value))


def read_record(path: Path, kind: type[Record], remedy: str) -> Record | None:
    """A record as `write_record` left it, None where there is none.

    Raises `UsageError` where it cannot be read, ending with the `remedy`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise UsageError(f"{path.parent}: not in a folder; is --out a file?") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        said = one_line(str(error), 120)
        raise UsageError(f"{path}: cannot be read ({said}); {remedy}") from None


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def folder_digest(folder: Path, patterns: tuple[str, ...] = ("*.json", "*.safetensors")) -> str:
    """One digest of a checkpoint's files, by name and content."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        digest.update(f"{path.name} {file_digest(path)}\n".encode())
    return digest.hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one process. Raises `UsageError` where another one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{folder}: another process is at work there; wait for it, or give another --out"
            ) from None
        yield
