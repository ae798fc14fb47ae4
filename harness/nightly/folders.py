"""Where nights, their points and the pinned baselines lie below the results root."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from harness.errors import UsageError
from harness.measure.store import held, locked, read_json, write_atomic
from harness.nightly.records import NIGHT_SCHEMA, Baseline, EntryPoints, Night

NIGHT = "night.json"
STALE = timedelta(hours=20)
"""An interrupted night that began longer ago is over: its successor is due."""
RUNNING = ".running"
"""Beside the nights: locked while a run is at work."""
ENDING_S = 120.0
"""How long the end of a run is waited for that nobody listens to any more."""
NAMED = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\.(\d+))?")


class NightFolder:
    """One night of one suite: `results/nightly/<suite>/<date>`, `<date>.2` for the second."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The night, as it is called everywhere."""
        return self.path.name

    @property
    def index(self) -> Path:
        """Its page."""
        return self.path / "index.html"

    def log(self, name: str) -> Path:
        """What a run of an entry said."""
        folder = self.path / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"

    def read(self) -> Night:
        """Raises `UsageError` where there is none, or one of another schema."""
        path = self.path / NIGHT
        night = read_json(path, Night)
        if night.schema_version.partition(".")[0] != NIGHT_SCHEMA.partition(".")[0]:
            raise UsageError(f"{path}: schema {night.schema_version[:20]}, not {NIGHT_SCHEMA}")
        if not _is_moment(night.begun):
            raise UsageError(f"{path}: begun is no time with a zone: {night.begun[:40]}")
        return night

    def write(self, night: Night) -> None:
        """Whole or not at all."""
        write_atomic(self.path / NIGHT, msgspec.json.format(msgspec.json.encode(night), indent=2))

    def write_points(self, points: EntryPoints) -> None:
        """An entry's figures, for the series of later nights."""
        write_atomic(self.path / "points" / f"{points.entry}.json", msgspec.json.encode(points))

    def points(self, entry: str) -> EntryPoints | None:
        """An entry's figures; None where it was not measured. Raises `UsageError` if broken."""
        path = self.path / "points" / f"{entry}.json"
        return read_json(path, EntryPoints) if path.exists() else None


def night_order(name: str) -> tuple[str, int]:
    """Sorts nights by time: the second one of a day behind the first."""
    found = NAMED.fullmatch(name)
    return (found[1], int(found[2] or 1)) if found else (name, 1)


def suite_folder(results: Path, suite: str) -> Path:
    """The folder of a suite's nights."""
    return results / "nightly" / suite


def _is_moment(text: str) -> bool:
    """Whether it is an ISO time whose zone is told, as every night's beginning is."""
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def nights_of(results: Path, suite: str) -> list[NightFolder]:
    """Every night of the suite, the oldest first."""
    folder = suite_folder(results, suite)
    places = folder.iterdir() if folder.is_dir() else iter(())
    found = [p for p in places if NAMED.fullmatch(p.name) and (p / NIGHT).is_file()]
    return [NightFolder(p) for p in sorted(found, key=lambda p: night_order(p.name))]


def read_nights(nights: Sequence[NightFolder]) -> tuple[list[Night], list[str]]:
    """Those that can be read, and in words which cannot: a broken one costs itself alone."""
    found, skipped = [], []
    for night in nights:
        try:
            found.append(night.read())
        except UsageError as error:
            skipped.append(f"skipped: {error}")
    return found, skipped


def unfinished(nights: list[NightFolder], now: datetime) -> NightFolder | None:
    """The last night, where it was interrupted and is still tonight's."""
    if not nights:
        return None
    try:
        night = nights[-1].read()
    except UsageError:
        return None
    fresh = now - datetime.fromisoformat(night.begun) < STALE
    return nights[-1] if night.ended is None and fresh else None


def new_night(results: Path, suite: str, now: datetime) -> NightFolder:
    """A folder for a night that begins now; the date is UTC's. Raises `UsageError`."""
    root = suite_folder(results, suite)
    for number in range(1, 1000):
        path = root / (f"{now:%Y-%m-%d}" if number == 1 else f"{now:%Y-%m-%d}.{number}")
        try:
            path.mkdir(parents=True)
            return NightFolder(path)
        except FileExistsError:
            if number == 1 and not path.is_dir():
                raise UsageError(f"{path}: is in the way, and no folder") from None
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    raise UsageError(f"{root}: too many nights on one day")


@contextmanager
def claimed(results: Path, suite: str) -> Iterator[None]:
    """Hold the suite for one process. Raises `UsageError` where another is at work on it."""
    folder = suite_folder(results, suite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be used: {error.strerror}") from None
    with held(folder, "another nightly is at work on it; wait for it"):
        yield


@contextmanager
def running(
    results: Path, suite: str, say: Callable[[str], None], *, wait_s: float = ENDING_S
) -> Iterator[int]:
    """Hold what the suite's runs hold too: a file that their supervisors inherit.

    A run outlives a nightly that was killed, for as long as it may take to sum up what it has: so
    long its end is waited for. Raises `UsageError` where it does not come.
    """
    path = suite_folder(results, suite) / RUNNING
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline, told = time.monotonic() + wait_s, False
    try:
        while not locked(handle):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{path.parent}: a run of a nightly that was killed has not ended after "
                    f"{wait_s:g} s; end its processes, then start again"
                )
            if not told:
                say("a run of a nightly that was killed is still ending; waiting for it")
                told = True
            time.sleep(0.2)
        yield handle
    finally:
        os.close(handle)


def baseline_path(results: Path, suite: str, entry: str) -> Path:
    """Where an entry's baseline is recorded."""
    return suite_folder(results, suite) / f"baseline-{entry}.json"


def read_baseline(results: Path, suite: str, entry: str) -> Baseline | None:
    """What the entry is held to; None before it was pinned. Raises `UsageError` if broken."""
    path = baseline_path(results, suite, entry)
    return read_json(path, Baseline) if path.exists() else None


def write_baseline(results: Path, baseline: Baseline) -> None:
    """Pin it: an earlier one is replaced.

    `results/baselines/<suite>/<entry>` becomes a link to its run, for whoever compares with it.
    """
    path = baseline_path(results, baseline.suite, baseline.entry)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(baseline), indent=2))
    link = results / "baselines" / baseline.suite / baseline.entry
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}-{os.getpid()}")
    try:
        new.symlink_to(os.path.relpath(results / baseline.run, link.parent))
        os.replace(new, link)
    except OSError:  # a file system without links: the record says it all
        new.unlink(missing_ok=True)
