"""The disk: how fast the checkpoint can be read, how long that takes, and room for what is made."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from harness.doctoring.finding import Finding, fail, gib, ok, unknown, warn

MOST_BYTES = 256 * 2**20
MOST_S = 2.0
LEAST_BYTES = 16 * 2**20
"""Of a smaller file the first reading's delay is most of the time."""
SAMPLES, TRIES = 16, 3
_PIECE = 4 * 2**20
RUN_BYTES = 2**30
"""Room for a run's folder: records, logs and plots take far less, a long sweep may take it."""


class ReadSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What one reader read of one file. `cached`: it was in memory after all; None: not told."""

    file: str
    bytes: int
    seconds: float
    cached: bool | None = None

    @property
    def per_s(self) -> float:
        """Bytes a second."""
        return self.bytes / max(self.seconds, 1e-9)


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that is written to: what for, what is free, and what is wanted (bytes)."""

    folder: str
    purpose: str
    free: int | None
    wanted: int
    least: int
    writable: bool = True


def read_speed(file: Path, most: int = MOST_BYTES, seconds: float = MOST_S) -> ReadSpeed | None:
    """Read the file's beginning, at most `most` bytes or `seconds`; None where it cannot be.

    Pages of it that were in memory are dropped before, and those read are dropped again: a
    benchmark's memory is not to be filled with them. Where they stay, since another process has
    mapped them, it is read past the page cache (O_DIRECT), if the file system can.
    """
    try:
        with open(file, "rb", buffering=0) as stream:
            cached = _dropped(stream.fileno(), most)
            if cached and hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):
                    direct = os.open(file, os.O_RDONLY | os.O_DIRECT)
                    try:
                        return _timed(str(file), direct, most, seconds)
                    finally:
                        os.close(direct)
            speed = _timed(str(file), stream.fileno(), most, seconds)
            _drop(stream.fileno())
    except OSError:
        return None
    return msgspec.structs.replace(speed, cached=cached)


def _timed(file: str, descriptor: int, most: int, seconds: float) -> ReadSpeed:
    done, begun = 0, time.perf_counter()
    with mmap.mmap(-1, _PIECE) as buffer:  # at a page's beginning, as O_DIRECT wants it
        while done < most and time.perf_counter() - begun < seconds:
            got = os.readv(descriptor, [buffer])
            done += got
            if got < _PIECE:
                break
    return ReadSpeed(file=file, bytes=done, seconds=time.perf_counter() - begun, cached=False)


def in_memory(descriptor: int, most: int = MOST_BYTES) -> bool | None:
    """Whether most of the beginning can be had without waiting; None where nobody can tell.

    Pages that another process has mapped, and those of a file system in memory, stay.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    size = min(most, os.fstat(descriptor).st_size)
    held = 0
    for i in range(SAMPLES):
        try:
            held += os.preadv(descriptor, [bytearray(1)], i * size // SAMPLES, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError:  # not every file system knows the question
            return None
    return held > SAMPLES // 2


def _dropped(descriptor: int, most: int) -> bool | None:
    """Drop the file's pages and see whether they went; pages read a moment ago want a second try.

    Asking may fetch a page, so they are dropped once more at the end.
    """
    cached = None
    for _ in range(TRIES):
        _drop(descriptor)
        cached = in_memory(descriptor, most)
        if not cached:
            break
        time.sleep(0.05)
    _drop(descriptor)
    return cached


def _drop(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def check_read(
    speed: ReadSpeed | None, total: int, deadline_s: float, memory: int | None
) -> Iterator[Finding]:
    """How long the checkpoint's `total` bytes take to be read, against the plan's patience.

    `memory`: what the host has left; a checkpoint above it is read anew at each start.
    """
    if speed is None or not total:
        where = "checkpoint" if speed is None else speed.file
        yield unknown("disk", "read", where, "the reading speed was not measured")
        return
    if speed.bytes < LEAST_BYTES:
        yield unknown("disk", "read", speed.file, f"{gib(speed.bytes)} are too little to tell the "
                      "disk's speed by")  # fmt: skip
        return
    if speed.cached:
        yield unknown(
            "disk",
            "read",
            speed.file,
            "it stays in memory (another process uses it, or "
            "the file system is one in memory): the disk's speed was not measured",
        )
        return
    load_s = total / speed.per_s
    what = (
        f"{speed.per_s / 1e6:,.0f} MB/s ({gib(speed.bytes)} read by one reader): the checkpoint's "
        f"{gib(total)} take {told_time(load_s)}"
    )
    if load_s > deadline_s:
        yield fail("disk", "read", speed.file, f"{what}; the start is ended after "
                   f"{told_time(deadline_s)}", "set engine.startup_deadline_s higher, or copy the "
                   "checkpoint to a local disk")  # fmt: skip
    elif load_s > deadline_s / 2:
        yield warn(
            "disk",
            "read",
            speed.file,
            f"{what}: more than half of the start's {told_time(deadline_s)}",
            "set engine.startup_deadline_s higher",
        )
    else:
        yield ok("disk", "read", speed.file, what)
    if load_s > 60 and memory is not None and total > memory:
        yield warn("disk", "cache", speed.file, f"{gib(total)} do not fit into the {gib(memory)} "
                   "of memory: every start reads them from the disk again",
                   "expect each launch of the plan to take as long")  # fmt: skip


def told_time(seconds: float) -> str:
    """Seconds in words: 8 s, 25 min."""
    if seconds < 1:
        return "less than a second"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def room(folder: Path, purpose: str, wanted: int, least: int = 100 * 2**20) -> Room:
    """What is free where `folder` lies, or would lie once it is made."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free: int | None = shutil.disk_usage(place).free
    except OSError:
        free = None
    return Room(
        folder=str(folder),
        purpose=purpose,
        free=free,
        wanted=wanted,
        least=least,
        writable=place.is_dir() and takes_a_folder(place),
    )


def takes_a_folder(place: Path) -> bool:
    """Whether a folder can be made there; rights alone do not tell, as of /proc for root."""
    try:
        os.rmdir(tempfile.mkdtemp(dir=place, prefix=".writable-"))
    except OSError:
        return False
    return True


def check_room(rooms: Sequence[Room]) -> Iterator[Finding]:
    """Whether what is to be written has room: below `least` nothing goes, below `wanted` little."""
    for place in rooms:
        if not place.writable:
            yield fail("disk", "writable", place.folder, f"{place.purpose} cannot be written there",
                       "choose another folder, or change its permissions")  # fmt: skip
        elif place.free is None:
            yield unknown("disk", "room", place.folder, "the free space is not known")
        elif place.free < place.least:
            yield fail("disk", "room", place.folder, f"{gib(place.free)} are free, "
                       f"{gib(place.wanted)} are wanted for {place.purpose}",
                       "make room, or choose a folder on another disk")  # fmt: skip
        elif place.free < place.wanted:
            yield warn("disk", "room", place.folder, f"{gib(place.free)} are free, "
                       f"{gib(place.wanted)} may be taken by {place.purpose}",
                       "make room before a long run")  # fmt: skip
        else:
            yield ok(
                "disk", "room", place.folder, f"{gib(place.free)} are free for {place.purpose}"
            )
