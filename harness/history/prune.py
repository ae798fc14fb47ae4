"""Runs that may go, by age and by the size of all, and their removal.

Baselines stay, and what they name; so do pinned runs, the newest ones, runs that are being
measured, and every folder that is not recognised as a run's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec

from harness.errors import UsageError, one_line, printable
from harness.history.folders import shown
from harness.history.reading import read_bytes
from harness.history.sizes import Disk, Held
from harness.history.units import Unit, unit_of, units_of
from harness.measure.store import RunFolder
from harness.records import Record

REMOVED = ".pruned-"
"""Before a folder's name while it is removed: no half of a run is ever taken for one."""
NOT_ASKED = "not asked for"
NEWEST = "one of the newest"
BASELINE = "a baseline"
BUSY = "being measured"
CHANGED = "has changed since"
NAMING = ("run", "run_id", "runs", "folder")
"""Keys under which a baseline's file names what it stands for."""


class Wish(Record, frozen=True, kw_only=True):
    """What to prune: older than a moment (ISO text), down to so many bytes; `keep` the newest."""

    older_than: str | None = None
    max_bytes: int | None = None
    keep: int = 10


class Going(Record, frozen=True, kw_only=True):
    """A folder that goes, why, and how much the disk gets back for it, those before it gone."""

    place: str
    created: str
    what: str
    why: str
    bytes: int


class Staying(Record, frozen=True, kw_only=True):
    """A folder that stays, and why."""

    place: str
    why: str


G = TypeVar("G", Going, Staying)


class Plan(Record, frozen=True, kw_only=True):
    """What would be done. `bytes_before`, `bytes_after`: of all that lies below the root."""

    going: tuple[Going, ...]
    staying: tuple[Staying, ...]
    bytes_before: int
    bytes_after: int

    def told(self) -> Plan:
        """The same for readers: places as text, and each on one line."""
        return msgspec.structs.replace(
            self,
            going=tuple(_told(one) for one in self.going),
            staying=tuple(_told(one) for one in self.staying),
        )


def _told(one: G) -> G:
    place, why = printable(shown(one.place)), one_line(one.why)
    return msgspec.structs.replace(one, place=place, why=why)


def plan_of(root: Path, wish: Wish) -> Plan:
    """What the wish comes to. Raises `UsageError` where a baseline's file cannot be read."""
    if wish.older_than is None and wish.max_bytes is None:
        raise UsageError("prune: say what may go, with --older-than 30d or --max-size 20GB")
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder of results; give another with --results")
    named = _named_by_baselines(root)
    units, others = units_of(root)
    disk = Disk()
    held = {unit.place: disk.add(root / unit.place) for unit in units}
    mine = {unit.place for unit in units}
    for path in sorted(root.iterdir()):
        if path.name not in mine:
            disk.add(path)
    staying = [Staying(place=place, why=f"not recognised: {why}") for place, why in others]
    free: list[Unit] = []
    newest = {unit.place for unit in units[max(0, len(units) - wish.keep) :]}
    for unit in units:
        why = _why_it_stays(root, unit, named, newest)
        if why is None:
            free.append(unit)
        else:
            staying.append(Staying(place=unit.place, why=why))
    before = disk.total
    going, after = _chosen(free, held, disk, wish)
    gone = {g.place for g in going}
    staying += [Staying(place=u.place, why=NOT_ASKED) for u in free if u.place not in gone]
    return Plan(going=tuple(going), staying=tuple(staying), bytes_before=before, bytes_after=after)


def _chosen(
    free: Sequence[Unit], held: dict[str, Held], disk: Disk, wish: Wish
) -> tuple[list[Going], int]:
    """The oldest first: by age, and then as many as the size asks for."""
    going, total = [], disk.total
    for unit in free:
        if wish.older_than is not None and unit.created < wish.older_than:
            why = "its age"
        elif wish.max_bytes is not None and total > wish.max_bytes:
            why = "the size of all"
        else:
            continue
        falls, back = disk.remove(held[unit.place])
        total -= falls
        going.append(
            Going(place=unit.place, created=unit.created, what=unit.what, why=why, bytes=back)
        )
    return going, total


def _why_it_stays(root: Path, unit: Unit, named: set[str], newest: set[str]) -> str | None:
    if unit.pinned is not None:
        return f"pinned: {unit.pinned}"
    if named.intersection(unit.runs):
        return BASELINE
    if unit.place in newest:
        return NEWEST
    try:
        with _claimed(root / unit.place):
            return None
    except UsageError:
        return BUSY


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Hold a unit; of a sweep each run too, which `resume` may go on with alone."""
    with contextlib.ExitStack() as held:
        for one in (folder, *sorted((folder / "runs").glob("*"))):
            held.enter_context(RunFolder(one).claimed())
        yield


def _named_by_baselines(root: Path) -> set[str]:
    """Every run that a pinned baseline names, by id or by place. Raises `UsageError`."""
    found: set[str] = set()
    for folder, pattern in ((root / "baselines", "*.json"), (root / "nightly", "baseline*.json")):
        for path in _files_below(folder, pattern):
            try:
                found.update(_names(msgspec.json.decode(read_bytes(path))))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UsageError):
                raise _unknown(path) from None
    return found


def _unknown(path: Path) -> UsageError:
    return UsageError(
        f"{path}: cannot be read, so that it is not known which run it keeps; mend it or remove "
        "it first"
    )


def _files_below(top: Path, pattern: str) -> Iterator[Path]:
    """The files of that name, through links too: a link to a run names it as a copy would."""

    def refuse(error: OSError) -> None:
        raise _unknown(Path(os.fsdecode(error.filename)))

    seen: set[tuple[int, int]] = set()
    if not os.path.lexists(top):
        return
    for place, folders, files in os.walk(top, onerror=refuse, followlinks=True):
        told = os.stat(place)
        if (told.st_dev, told.st_ino) in seen:
            folders.clear()  # a link back
            continue
        seen.add((told.st_dev, told.st_ino))
        yield from (Path(place) / name for name in sorted(files) if fnmatch(name, pattern))


def _names(told: Any) -> Iterator[str]:
    """The texts under the naming keys, however deep."""
    waiting = [told]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
            for value in (one[key] for key in NAMING if key in one):
                for text in value if isinstance(value, list) else [value]:
                    if isinstance(text, str):
                        yield from (text.rstrip("/"), PurePath(text).name)


def carry_out(root: Path, going: Iterable[Going], told: Callable[[Going], None]) -> list[Staying]:
    """Remove the folders, each looked at once more first. Those that had to stay, and why.

    Raises `UsageError` where a baseline's file cannot be read.
    """
    named = _named_by_baselines(root)
    left = [Staying(place=path.name, why=why) for path, why in _finish_earlier(root)]
    for one in going:
        why = _changed(root, one, named) or _removed(root, one.place)
        if why is None:
            told(one)
        else:
            left.append(Staying(place=one.place, why=why))
    return left


def _changed(root: Path, one: Going, named: set[str]) -> str | None:
    """Why a folder stays after all. A long list takes its time: what was seen then is old."""
    try:
        unit = unit_of(root, one.place)
    except (UsageError, OSError):
        return CHANGED
    if named.intersection(unit.runs):
        return BASELINE
    return CHANGED if unit.created != one.created or unit.pinned is not None else None


def _removed(root: Path, place: str) -> str | None:
    """Remove a folder; why it could not be, None where it is gone."""
    away = root / f"{REMOVED}{place}"
    try:
        with _claimed(root / place):
            os.rename(root / place, away)
    except UsageError:
        return BUSY
    except OSError as error:
        return (error.strerror or "cannot be renamed").lower()
    return _gone(away)


def _gone(away: Path) -> str | None:
    """Remove it; why that could not be. Another `prune` may be removing the same."""
    while os.path.lexists(away):
        try:
            shutil.rmtree(away)
        except FileNotFoundError:
            continue  # the other one was quicker
        except OSError as error:
            return f"{(error.strerror or 'failed').lower()}; what is left of it is {away.name}"
    return None


def _finish_earlier(root: Path) -> Iterator[tuple[Path, str]]:
    """Remove what an interrupted removal left; what cannot be, and why."""
    for path in sorted(root.glob(f"{REMOVED}*")):
        if not path.is_symlink() and path.is_dir():
            why = _gone(path)
            if why is not None:
                yield path, why
