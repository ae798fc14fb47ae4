"""Folders that are damaged, half written or somebody else's: named, skipped, and never a crash."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from history_runs import write_one
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.history import store
from harness.history.index import FILE, FOLDER, MAGIC, load
from harness.history.reading import MOST_BYTES, Kind, read_points
from harness.history.records import Point
from harness.history.store import open_history

KEPT = Path(__file__).resolve().parents[1] / "data" / "runs"
SUMMARY = (KEPT / "schema-1.1" / "summary.json").read_bytes()
MANIFEST = (KEPT / "schema-1.1" / "manifest.json").read_bytes()
ROOT = os.geteuid() == 0


def harmed(change: Callable[[Path], object], name: str = "summary.json") -> Callable[[Path], None]:
    """A way to harm a run: its file is replaced by what `change` makes there."""

    def harm(folder: Path) -> None:
        path = folder / name
        path.unlink()
        change(path)

    return harm


def edited(
    change: Callable[[dict[str, object]], object], name: str = "summary.json"
) -> Callable[[Path], None]:
    """A way to harm a run: its file with a change in it."""

    def harm(folder: Path) -> None:
        path = folder / name
        told = json.loads(path.read_bytes())
        change(told)
        path.write_text(json.dumps(told))

    return harm


def replaced_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def replaced_by_link(target: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.symlink_to(target)

    return harm


def replaced_by_foreign(folder: Path) -> None:
    shutil.rmtree(folder)
    (folder / "data" / "more").mkdir(parents=True)
    (folder / "results.json").write_text('{"tool": "other"}')


def looped(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "again").symlink_to(folder)
    (folder / "up").symlink_to("..")


def broken_labels(folder: Path) -> None:
    (folder / "labels.json").write_text("{")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # its path may be longer than a socket's name
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(MOST_BYTES + 1)


NAME = "20260101-000000-reference-bad0"
HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty file": (harmed(Path.touch), "summary.json: empty"),
    "truncated": (harmed(lambda p: p.write_bytes(SUMMARY[:999])), "summary.json: no JSON: "),
    "zeros": (harmed(lambda p: p.write_bytes(b"\0" * 99)), "summary.json: no JSON: "),
    "binary": (harmed(lambda p: p.write_bytes(bytes(range(256)))), "summary.json: no JSON: "),
    "another tool's": (
        harmed(lambda p: p.write_text('{"benchmarks": []}')),
        "summary.json: not this harness's: 'schema_version' is missing",
    ),
    "deep": (harmed(lambda p: p.write_text('{"a":' * 99_999)), "summary.json: no JSON: "),
    "a number": (harmed(lambda p: p.write_text("NaN")), "summary.json: no JSON: "),
    "NaN inside": (
        edited(lambda told: told.update(title=float("nan"))),
        "summary.json: no JSON: ",
    ),
    "wrong type": (
        edited(lambda told: told.update(cells={"a": 1})),
        "summary.json: 'cells': a list is wanted, not an object",
    ),
    "unknown field": (
        edited(lambda told: told.update(extra=1)),
        "summary.json: there is no key 'extra'",
    ),
    "files of two runs": (
        edited(lambda told: told.update(run_id="other")),
        f"files of two runs: summary.json is of other, manifest.json of {NAME}",
    ),
    "later major": (
        edited(lambda told: told.update(schema_version="2.0")),
        "summary.json: written with schema 2.0, of a later harness; this one reads 1.2",
    ),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
    "no summary": (lambda folder: (folder / "summary.json").unlink(), "no summary.json: not fini"),
    "manifest cut": (
        harmed(lambda p: p.write_bytes(MANIFEST[:99]), "manifest.json"),
        "manifest.json: no JSON: ",
    ),
    "no date": (
        edited(lambda told: told.update(created="someday"), "manifest.json"),
        "created: 'someday' is no date and time",
    ),
    "labels cut": (
        broken_labels,
        "labels.json: cannot be read",
    ),
    "a folder of that name": (harmed(Path.mkdir), "summary.json: a folder"),
    "a pipe": (harmed(fifo), "summary.json: no plain file"),
    "a socket": (harmed(unix_socket), "summary.json: no plain file"),
    "a link nowhere": (harmed(lambda p: p.symlink_to("nowhere")), "no summary.json"),
    "a link to itself": (harmed(lambda p: p.symlink_to("summary.json")), "no summary.json"),
    "huge": (harmed(huge), "bytes are too many"),
    "a file": (replaced_by_file, "a file, not a folder"),
    "a dead link": (replaced_by_link("nowhere"), "a link that leads nowhere"),
    "a looped link": (replaced_by_link(NAME), "a link that leads to itself"),
    "foreign": (replaced_by_foreign, "no run's: neither manifest.json nor summary.json"),
    "loops inside": (looped, "no run's: neither manifest.json nor summary.json"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_folder_is_named_with_the_reason_and_the_rest_is_read(
    tmp_path: Path, harm: str
) -> None:
    write_one(tmp_path, "good")
    change, reason = HARMS[harm]
    change(write_one(tmp_path, NAME))
    for _ in range(2):  # once from the folders, once from the index
        found = open_history(tmp_path)
        assert list(found.runs()) == ["good"]
        assert [path for path, _ in found.problems] == [tmp_path / NAME]
        assert reason in found.problems[0][1]
        assert len(found.problems[0][1]) < 400
        assert found.problems[0][1].isprintable()


def test_a_folder_that_is_mended_is_read(tmp_path: Path) -> None:
    path = write_one(tmp_path, "a") / "summary.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert open_history(tmp_path).problems
    path.write_bytes(whole)
    found = open_history(tmp_path)
    assert list(found.runs()) == ["a"] and not found.problems


@pytest.mark.skipif(ROOT, reason="root may read everything")
@pytest.mark.parametrize("name", ["", "summary.json"])
def test_what_may_not_be_read_is_named(tmp_path: Path, name: str) -> None:
    place = write_one(tmp_path, "a") / name
    mode = place.stat().st_mode
    place.chmod(0)
    try:
        assert "permission denied" in open_history(tmp_path).problems[0][1]
    finally:
        place.chmod(mode)
    assert list(open_history(tmp_path).runs()) == ["a"]


def test_a_reading_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says is told, root or not: a disk's error, a right that is missing."""
    folder = write_one(tmp_path, "a")
    real = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name == "summary.json":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert open_history(tmp_path).problems == [(folder, "summary.json: permission denied")]


def test_a_name_that_is_no_text_is_shown_as_it_can_be(tmp_path: Path) -> None:
    write_one(tmp_path, "good")
    raw = os.path.join(os.fsencode(tmp_path), b"run-\xff\x1b[31m")
    try:
        os.mkdir(raw)
    except OSError:
        pytest.skip("this file system takes no such name")
    assert [p.name for p, _ in open_history(tmp_path).problems] == ["run-\\xff\x1b[31m"]
    other = write_one(tmp_path, "other")
    os.rmdir(raw)
    os.rename(other, raw)
    points = open_history(tmp_path).query(run="other")
    assert {p.folder for p in points} == {"run-\\xff\x1b[31m"}
    assert msgspec.json.encode(points)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("mutated") / "run"
    path.mkdir()
    yield path


CHANGES = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "cut", "insert", "number", "swap"]),
              st.binary(min_size=1, max_size=6)),
    min_size=1,
    max_size=4,
)  # fmt: skip


def mutated(data: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    """Bytes with changes in them, at places given as shares of the length."""
    for where, kind, material in changes:
        at = int(where * max(len(data) - 1, 0))
        if kind == "flip":
            data = data[:at] + bytes([data[at] ^ (material[0] or 1)]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + len(material) * 37 :]
        elif kind == "insert":
            data = data[:at] + material + data[at:]
        elif kind == "swap":
            data = data[at:] + data[:at]
        else:  # another number in place of the next digit: still JSON, and nothing that fits
            digit = next((i for i in range(at, len(data)) if data[i : i + 1].isdigit()), at)
            numbers = (b"-1e308", b"null", b"1e400", b"-0", b"99999999999999999999", b"0")
            data = data[:digit] + numbers[material[0] % 6] + data[digit + 1 :]
        if not data:
            return data
    return data


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=CHANGES, of_manifest=st.booleans())
def test_mutated_bytes_are_points_or_a_reason(
    folder: Path, changes: list[tuple[float, str, bytes]], of_manifest: bool
) -> None:
    summary = SUMMARY if of_manifest else mutated(SUMMARY, changes)
    manifest = mutated(MANIFEST, changes) if of_manifest else MANIFEST
    (folder / "summary.json").write_bytes(summary)
    (folder / "manifest.json").write_bytes(manifest)
    try:
        points = read_points(folder, "run")
    except UsageError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 400
    else:
        written = msgspec.json.encode(points)
        assert b"NaN" not in written
        assert len({(p.engine, p.variant, p.workload, p.load, p.metric) for p in points}) == len(
            points
        )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=CHANGES)
def test_a_mutated_index_is_the_same_history(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, str, bytes]]
) -> None:
    root = tmp_path_factory.getbasetemp() / "indexed"
    if not root.exists():
        write_one(root, "a")
    right = open_history(root).query()
    path = root / FOLDER / FILE
    data = path.read_bytes()
    path.write_bytes(mutated(data, changes))
    if path.read_bytes() != data:
        assert load(root) is None
    assert open_history(root).query() == right


@pytest.mark.parametrize("what", ["pipe", "folder", "link"])
@pytest.mark.parametrize("place", ["run/points.parquet", ".history/index.bin"])
def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path, place: str, what: str) -> None:
    (write_one(tmp_path, "run") / "points.parquet").unlink(missing_ok=True)
    (tmp_path / ".history").mkdir()
    if what == "pipe":
        os.mkfifo(tmp_path / place)
    elif what == "folder":
        (tmp_path / place).mkdir()
    else:
        os.mkfifo(tmp_path / ".pipe")
        (tmp_path / place).symlink_to(tmp_path / ".pipe")
    found = open_history(tmp_path)
    assert not found.problems and found.query(metric="output_tokens_per_s")
    assert (tmp_path / place).is_file() is (what != "folder")


@pytest.mark.parametrize("count", [2**63, 10**30, -5])
def test_a_count_that_no_column_holds_ends_nothing(tmp_path: Path, count: int) -> None:
    folder = write_one(tmp_path, "run")
    path = folder / "summary.json"
    path.write_bytes(re.sub(rb'"requests_ok":\d+', b'"requests_ok":%d' % count, path.read_bytes()))
    found = open_history(tmp_path)
    assert found.problems or found.query()
    assert open_history(tmp_path).query() == found.query()


@pytest.mark.parametrize("change", ["rows", "who", "negative", "deep"])
def test_an_index_that_contradicts_itself_is_made_anew(tmp_path: Path, change: str) -> None:
    write_one(tmp_path, "run")
    right = open_history(tmp_path).query()
    path = tmp_path / FOLDER / FILE
    data, begin = path.read_bytes(), len(MAGIC) + 8
    size = int.from_bytes(data[len(MAGIC) : begin - 4], "little")
    told = msgspec.msgpack.decode(data[begin : begin + size])
    rest = bytearray(data[begin + size :])
    if change == "rows":
        told[1][0][4] = told[4] = told[4] + 1000
    elif change == "negative":
        told[1] += [[*told[1][0][:4], -1], [*told[1][0][:4], 1]]
    elif change == "who":
        rest[:4] = (9999).to_bytes(4, "little")
    head = msgspec.msgpack.encode(told)
    if change == "deep":
        head = b"\x96" + head[1:] + b"\x91" * 100_000 + b"\x01"
    body = head + bytes(rest)
    sizes = len(head).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
    path.write_bytes(MAGIC + sizes + body)
    assert open_history(tmp_path).query() == right


def test_a_run_that_goes_while_it_is_read_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("going", "staying"):
        write_one(tmp_path, name)
    real = store.read_points

    def overtaken(folder: Path, kind: Kind) -> list[Point]:
        if folder.name == "going":
            shutil.rmtree(folder)
        return real(folder, kind)

    monkeypatch.setattr(store, "read_points", overtaken)
    found = open_history(tmp_path)
    assert not found.problems
    assert {p.run_id for p in found.query()} == {"staying"}
    assert not (tmp_path / "going").exists()
