"""Digests of large files, remembered: a file that was not touched since is not read again.

Beside `states-00000.safetensors` lies `states-00000.seen.json`. What it says counts where size,
time of change and inode are those of the file today; in any doubt the file is read. What a disk
loses without a write is seen by the first reading alone: remove the small files to read all again.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from training.files import file_digest, write_record

SETTLED_NS = 2_000_000_000
"""A file changed less than this before it was read may change again in one tick of the clock."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was when it was read, and its digest then."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    sha256: str


def remembered_digest(path: Path) -> str:
    """The SHA-256 of a file's bytes, from memory where nothing says that they changed."""
    begun, before = time.time_ns(), os.stat(path)
    told = _read(_place(path))
    if told is not None and told == _seen(before, told.sha256):
        return told.sha256
    found = file_digest(path)
    seen = _seen(before, found)
    settled = begun - max(before.st_mtime_ns, before.st_ctime_ns) >= SETTLED_NS
    if settled and seen == _seen(os.stat(path), found):
        with contextlib.suppress(OSError):  # a folder that cannot be written is read again
            write_record(_place(path), seen)
    return found


def _place(path: Path) -> Path:
    return path.with_suffix(".seen.json")


def _seen(stat: os.stat_result, sha256: str) -> Seen:
    return Seen(
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        ctime_ns=stat.st_ctime_ns,
        inode=stat.st_ino,
        sha256=sha256,
    )


def _read(path: Path) -> Seen | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Seen)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
