"""Where runs lie below a results' root: its folders, those of sweeps, baselines and imports.

Nothing is opened here: whether a folder is a run's is told by the names in it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from re import compile as pattern

from harness.history.reading import IMPORT, SWEEP, WATCHED, Kind, Stamps, stamps_of
from harness.measure.store import MANIFEST, SUMMARY
from harness.records import Record

DEEPEST = 4
"""Folders within folders that hold runs; a sweep's runs lie two below it."""
NO_RUNS = ("nightly", "diagnose", "self-test")
"""Folders of the root that hold what was made of runs, or of what was served."""
HOLDERS = (b"baselines", b"imported")
"""Those that hold runs, and may hold none yet."""
LINKS = {
    errno.ENOENT: "a link that leads nowhere",
    errno.ELOOP: "a link that leads to itself",
}
RUN_NAME = pattern(r"(sweep-)?\d{8}-\d{6}-")


class Found(Record, frozen=True, kw_only=True):
    """A folder that holds a run, or that cannot be one (`reason`).

    `place`: its path below the root, as the file system spells it. `stamps`: of the files that its
    points are made of, in the order of their kind's names.
    """

    place: bytes
    kind: Kind
    stamps: Stamps = ()
    reason: str | None = None

    def path(self, root: Path) -> Path:
        """Where it lies."""
        return root / os.fsdecode(self.place)

    @property
    def shown(self) -> str:
        """Its place as text."""
        return shown(self.place)


def shown(place: bytes | str) -> str:
    """A place as text; bytes that are none are spelled out."""
    return os.fsencode(place).decode("utf-8", "backslashreplace")


def find(root: Path) -> list[Found]:
    """Every run below `root`, and every folder that is none, by name."""
    seen = {_identity(root)}
    found = [f for f in _below(root, b"", seen, DEEPEST) if f is not None]
    return sorted(found, key=lambda f: f.place)


def _identity(path: Path | bytes) -> tuple[int, int]:
    told = os.stat(path)
    return told.st_dev, told.st_ino


def _below(root: Path, place: bytes, seen: set[tuple[int, int]], depth: int) -> Iterator[Found]:
    """What a folder's entries are, one after the other."""
    with os.scandir(os.path.join(os.fsencode(root), place)) as entries:
        for entry in entries:
            if entry.name.startswith(b".") or (not place and os.fsdecode(entry.name) in NO_RUNS):
                continue
            yield from _entry(root, os.path.join(place, entry.name), entry, seen, depth)


def _entry(
    root: Path,
    place: bytes,
    entry: os.DirEntry[bytes],
    seen: set[tuple[int, int]],
    depth: int,
) -> Iterator[Found]:
    try:
        if entry.is_symlink():
            os.stat(entry.path)  # says why where the link leads nowhere
            # A link to a run of this root is the same run once more, under another name.
            target = Path(os.fsdecode(entry.path)).resolve()
            if target.is_relative_to(root.resolve()) or root.resolve().is_relative_to(target):
                return
        if not entry.is_dir():
            if RUN_NAME.match(os.fsdecode(entry.name)):
                yield Found(place=place, kind="run", reason="a file, not a folder")
            return
        yield from _folder(root, place, seen, depth)
    except OSError as error:
        if error.errno == errno.ENOENT and not entry.is_symlink():
            return  # gone since the folder was listed
        reason = LINKS.get(error.errno or 0) or (error.strerror or "unreadable").lower()
        yield Found(place=place, kind="run", reason=reason)


def _folder(root: Path, place: bytes, seen: set[tuple[int, int]], depth: int) -> Iterator[Found]:
    """A folder is a run's, an import's, or holds such; one that is nothing of these is told."""
    path = os.path.join(os.fsencode(root), place)
    stamps = stamps_of(path, WATCHED)
    if any(stamps[: WATCHED.index(MANIFEST) + 1]):
        yield Found(place=place, kind="run", stamps=stamps)
        return
    imported = stamps_of(path, (IMPORT,))
    if imported[0] is not None:
        yield Found(place=place, kind="import", stamps=imported)
        return
    sweep, ours = os.path.exists(os.path.join(path, SWEEP.encode())), place in HOLDERS
    inside = os.path.join(place, b"runs") if sweep else place
    below: list[Found] = []
    identity = _identity(path)
    if depth and identity not in seen and (not sweep or os.path.isdir(os.path.join(path, b"runs"))):
        seen.add(identity)
        below = list(_below(root, inside, seen, depth - 1 if ours else min(depth - 1, 1)))
    if sweep or ours or any(f.reason is None for f in below):
        yield from below
    elif not (_only_links(path) and os.path.dirname(place) in HOLDERS):
        # A suite's folder of baselines is passed over. Of one that may not be read it says why.
        yield Found(place=place, kind="run", reason=f"no run's: neither {MANIFEST} nor {SUMMARY}")


def _only_links(path: bytes) -> bool:
    """Whether a folder holds links and nothing else, as the one of a suite's baselines does."""
    with os.scandir(path) as entries:
        kinds = [entry.is_symlink() for entry in entries]
    return bool(kinds) and all(kinds)
