"""Remembered digests: a file that was touched is read again, whatever else is the same."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from training import remembered
from training.files import file_digest
from training.remembered import remembered_digest


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read whole; the clock is two minutes ahead, so that all have settled."""
    read: list[Path] = []

    def counted(path: Path) -> str:
        read.append(path)
        return file_digest(path)

    ahead = time.time_ns
    monkeypatch.setattr(remembered, "file_digest", counted)
    monkeypatch.setattr(remembered.time, "time_ns", lambda: ahead() + 120 * 10**9)
    return read


def shard_in(folder: Path) -> Path:
    path = folder / "states-00000.safetensors"
    path.write_bytes(bytes(range(256)) * 100)
    return path


def test_an_untouched_file_is_read_once(tmp_path: Path, reads: list[Path]) -> None:
    path = shard_in(tmp_path)
    assert [remembered_digest(path) for _ in range(3)] == [file_digest(path)] * 3
    assert reads == [path]
    assert [p.name for p in tmp_path.iterdir() if p != path] == ["states-00000.seen.json"]


def test_a_changed_byte_at_the_same_size_is_found(tmp_path: Path, reads: list[Path]) -> None:
    path = shard_in(tmp_path)
    first, before = remembered_digest(path), path.stat()
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert path.stat().st_size == before.st_size
    assert remembered_digest(path) == file_digest(path) != first
    assert len(reads) == 2


def test_an_old_time_that_was_put_back_hides_no_change(tmp_path: Path, reads: list[Path]) -> None:
    path = shard_in(tmp_path)
    first, before = remembered_digest(path), path.stat()
    time.sleep(0.05)  # kernels stamp a change with their last tick
    with open(path, "r+b") as file:
        file.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert remembered_digest(path) == file_digest(path) != first


def test_another_file_in_its_place_is_read(tmp_path: Path, reads: list[Path]) -> None:
    path = shard_in(tmp_path)
    first = remembered_digest(path)
    other = tmp_path / "other"
    other.write_bytes(b"\0" * path.stat().st_size)
    shutil.copystat(path, other)
    os.replace(other, path)
    assert remembered_digest(path) == file_digest(path) != first


def test_a_file_changed_a_moment_ago_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shard_in(tmp_path)
    now = path.stat().st_mtime_ns
    monkeypatch.setattr(remembered.time, "time_ns", lambda: now + 10**9)
    assert remembered_digest(path) == file_digest(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("data", [b"", b"{}", b'{"size": 1', b"\xff\xfe", b"[]"])
def test_a_damaged_memory_is_none(tmp_path: Path, reads: list[Path], data: bytes) -> None:
    path = shard_in(tmp_path)
    (tmp_path / "states-00000.seen.json").write_bytes(data)
    assert remembered_digest(path) == file_digest(path)
    assert reads == [path]
    remembered_digest(path)
    assert reads == [path]  # and it was mended


def test_a_folder_that_cannot_be_written_is_read_each_time(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, value: object) -> None:
        raise OSError(30, "read-only", str(path))

    path = shard_in(tmp_path)
    monkeypatch.setattr(remembered, "write_record", refused)
    assert remembered_digest(path) == remembered_digest(path) == file_digest(path)
    assert len(reads) == 2
