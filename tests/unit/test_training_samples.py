"""Samples on disk: any crash point, any shards, what is left out, what is broken."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_samples import sample

from harness.errors import UsageError
from training.files import locked
from training.generate.shards import ShardWriter
from training.samples import DROPPED, Sample, read_samples, shard_paths

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8)


def write(folder: Path, samples: list[Sample], shard_samples: int = 3) -> None:
    with ShardWriter(folder, shard_samples) as writer:
        for one in samples:
            writer.append(one)


@settings(max_examples=60)
@given(names=NAMES, shard=st.integers(1, 4), data=st.data())
def test_a_crash_loses_the_line_it_cut_and_no_other(
    names: list[str], shard: int, data: st.DataObject
) -> None:
    samples = [sample(f"{i}{name}", i) for i, name in enumerate(names)]
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        write(folder, samples, shard)
        last = shard_paths(folder)[-1]
        whole = last.read_bytes()
        cut = data.draw(st.integers(0, len(whole)), label="cut at")
        last.write_bytes(whole[:cut])
        there = samples[: len(samples) - whole.count(b"\n") + whole[:cut].count(b"\n")]
        assert list(read_samples(folder)) == there
        # Going on cuts the broken line off, and the rest of it is as if nothing had happened.
        write(folder, samples[len(there) :], shard)
        assert list(read_samples(folder)) == samples
        lines = [path.read_bytes().count(b"\n") for path in shard_paths(folder)]
        assert all(n == shard for n in lines[:-1]) and sum(lines) == len(samples)


@given(order=st.permutations(range(7)), doubled=st.lists(st.integers(0, 6), max_size=4))
def test_samples_come_in_the_plans_order_and_the_last_line_of_an_id_counts(
    order: list[int], doubled: list[int]
) -> None:
    first = [sample(str(i), i, text="old" if i in doubled else "new") for i in order]
    again = [sample(str(i), i, text="new") for i in dict.fromkeys(doubled)]
    with tempfile.TemporaryDirectory() as held:
        write(Path(held), [*first, *again])
        found = list(read_samples(Path(held)))
    assert [one.index for one in found] == list(range(7))
    assert {one.text for one in found} == {"new"}


def test_what_the_gate_left_out_is_joined_from_its_file(tmp_path: Path) -> None:
    write(tmp_path, [sample("a", 0), sample("b", 1), sample("c", 2, dropped="by hand")])
    (tmp_path / DROPPED).write_text(json.dumps({"b#0": "truncated"}))
    assert [one.id for one in read_samples(tmp_path)] == ["a#0"]
    everyone = list(read_samples(tmp_path, dropped=True))
    assert [one.dropped for one in everyone] == [None, "truncated", "by hand"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"id": "x"}\n', "'prompt_id' is missing"),
        (b"\0\0\0\n", "not a sample"),
        (b'{"id": 3}\n', "a text is wanted"),
        (msgspec.json.encode(sample("x", loss_from=6)) + b"\n", "loss_from 6 lies outside its 5"),
    ],
)
def test_a_broken_line_is_an_error_that_names_it(tmp_path: Path, line: bytes, said: str) -> None:
    write(tmp_path, [sample("a"), sample("b")])
    path = shard_paths(tmp_path)[0]
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(UsageError, match=r"samples-00000.jsonl, line 3: ") as error:
        list(read_samples(tmp_path))
    assert said in str(error.value)


def test_a_cut_line_in_an_earlier_shard_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, [sample("a"), sample("b"), sample("c")], 2)
    path = shard_paths(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match=r"samples-00000.jsonl, line 2: cut off"):
        list(read_samples(tmp_path))


def test_a_folder_without_shards_has_no_samples(tmp_path: Path) -> None:
    assert list(read_samples(tmp_path)) == []


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write

    def full(fd: int, data: memoryview) -> int:
        if written(fd, data[:10]) and len(data) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return 10

    with ShardWriter(tmp_path, 10) as writer:
        writer.append(sample("a"))
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, "write", full)
            writer.append(sample("b"))
        writer.append(sample("c"))
    assert [one.prompt_id for one in read_samples(tmp_path)] == ["a", "c"]


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written(fd, data[:7]))
    write(tmp_path, [sample("a", 0), sample("b", 1)])
    assert list(read_samples(tmp_path)) == [sample("a", 0), sample("b", 1)]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(UsageError, match="another process is at work there"),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):
        pass
