"""How much folders hold on the disk: by inode, so that what has several names counts once."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.errors import UsageError
from harness.records import Record

Inode = tuple[int, int]
UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
BLOCK = 512
"""What `st_blocks` counts in, whatever the file system's own blocks are (POSIX)."""


class Held(Record, frozen=True, kw_only=True):
    """What lies below one folder: how often each inode is named there."""

    names: dict[Inode, int]


class Disk:
    """The inodes of several folders: bytes of each, and how many names it has anywhere."""

    def __init__(self) -> None:
        self._bytes: dict[Inode, int] = {}
        self._links: dict[Inode, int] = {}
        self._here: Counter[Inode] = Counter()

    def add(self, path: Path) -> Held:
        """Look through a folder, without following links, and keep what it holds."""
        names: Counter[Inode] = Counter()
        for found in _walk(path):
            inode = found.st_dev, found.st_ino
            names[inode] += 1
            self._bytes[inode] = found.st_blocks * BLOCK
            # A folder's links are its sub-folders': they do not keep it.
            self._links[inode] = 1 if stat.S_ISDIR(found.st_mode) else found.st_nlink
        self._here.update(names)
        return Held(names=dict(names))

    @property
    def total(self) -> int:
        """Bytes of everything that was added, each inode once."""
        return sum(self._bytes[inode] for inode, names in self._here.items() if names > 0)

    def remove(self, held: Held) -> tuple[int, int]:
        """Take a folder out: by how much the total falls, and how much the disk gets back.

        They differ by what still has a name outside of the folders that were added.
        """
        falls = back = 0
        for inode, names in held.names.items():
            self._here[inode] -= names
            self._links[inode] -= names
            if self._here[inode] <= 0:
                falls += self._bytes[inode]
            if self._links[inode] <= 0:
                back += self._bytes[inode]
        return falls, back


def _walk(path: Path) -> Iterator[os.stat_result]:
    """The folder itself and everything below it; what cannot be looked at is left out."""
    folders: list[str | os.DirEntry[str]] = [os.fspath(path)]
    try:
        yield os.lstat(path)
    except OSError:
        return
    while folders:
        try:
            entries: Iterable[os.DirEntry[str]] = list(os.scandir(folders.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                yield entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry)
            except OSError:
                continue


def parse_size(option: str, text: str) -> int:
    """`20GB`, `1.5 TiB`, `500000`, in bytes. Raises `UsageError`."""
    stripped = text.strip().lower()
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = stripped[len(number) :].strip()
    try:
        size = float(number) * UNITS[unit]
        if not 0 <= size < 2**63:
            raise ValueError
    except (KeyError, ValueError):
        raise UsageError(f"{option} {text}: give a size such as 20GB or 500MiB") from None
    return int(size)


def size_words(size: int) -> str:
    """Bytes in decimal units: 1.23 GB."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}" if size < 10**15 else f"{size / 1e12:,.0f} TB"
    return f"{size} B"
