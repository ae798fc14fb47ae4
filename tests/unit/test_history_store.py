"""The history of a results folder: what is found, what is read again, and what is asked of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from history_runs import BEGUN, SPEED, plan, small, told, write_many, write_one
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.history import store
from harness.history.index import FILE, FOLDER, Builder, Known, load, save
from harness.history.prune import Wish, plan_of
from harness.history.query import Query, moment
from harness.history.reading import read_points
from harness.history.records import Labels, Point
from harness.history.store import History, open_history

REPO = Path(__file__).resolve().parents[2]
KEPT = REPO / "tests" / "data" / "runs"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were read, as it goes on."""
    seen: list[str] = []

    def read(folder: Path, kind: str) -> list[Point]:
        seen.append(folder.name)
        return read_points(folder, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "read_points", read)
    return seen


def index(root: Path) -> Path:
    return root / FOLDER / FILE


def everything(history: History) -> list[bytes]:
    """All points in an order of their own, and all problems."""
    points = sorted(msgspec.json.encode(p) for p in history.query())
    return [*points, *(f"{p.name}: {why}".encode() for p, why in history.problems)]


def test_only_new_and_changed_folders_are_read(tmp_path: Path, reads: list[str]) -> None:
    for name in ("a", "b", "c"):
        write_one(tmp_path, name)
    assert len(open_history(tmp_path).runs()) == 3
    assert sorted(reads) == ["a", "b", "c"]
    reads.clear()
    assert len(open_history(tmp_path).runs()) == 3
    assert not reads
    write_one(tmp_path, "d")
    shutil.rmtree(tmp_path / "b")
    changed = told("c", void="too few requests succeeded")
    (tmp_path / "c" / "summary.json").write_bytes(msgspec.json.encode(changed))
    found = open_history(tmp_path)
    assert sorted(reads) == ["c", "d"]
    assert sorted(found.runs()) == ["a", "c", "d"]
    assert {p.run_id for p in found.query() if p.void} == {"c"}
    reads.clear()
    open_history(tmp_path)
    assert not reads


def test_a_file_written_anew_with_the_same_time_and_size_is_seen(
    tmp_path: Path, reads: list[str]
) -> None:
    path = write_one(tmp_path, "a") / "summary.json"
    open_history(tmp_path)
    reads.clear()
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b'"value":2.64', b'"value":2.46'))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)
    assert path.stat().st_size == before.st_size
    found = open_history(tmp_path).query(metric="acceptance_length", variant="speculative")
    assert [p.value for p in found] == [2.46]
    assert reads == ["a"]


def test_labels_that_come_later_change_the_points(tmp_path: Path) -> None:
    folder = write_one(tmp_path, "a")
    assert {p.suite for p in open_history(tmp_path).query()} == {None}
    (folder / "labels.json").write_bytes(msgspec.json.encode(Labels(suite="nightly")))
    assert {p.suite for p in open_history(tmp_path).query()} == {"nightly"}
    assert len(open_history(tmp_path).query(suite="nightly")) > 10


def test_points_parquet_is_made_where_it_is_missing_or_old(tmp_path: Path) -> None:
    folder = write_one(tmp_path, "a")
    open_history(tmp_path)
    made = folder / "points.parquet"
    first = made.stat()
    os.utime(made, ns=(first.st_atime_ns, first.st_mtime_ns - 10**12))
    shutil.rmtree(tmp_path / FOLDER)
    open_history(tmp_path)
    assert made.stat().st_ino != first.st_ino
    again = made.stat()
    shutil.rmtree(tmp_path / FOLDER)
    open_history(tmp_path)
    assert made.stat().st_ino == again.st_ino


@pytest.mark.parametrize("harm", ["removed", "emptied", "cut", "flipped", "another", "folder"])
def test_an_index_that_is_lost_costs_time_alone(
    tmp_path: Path, harm: str, reads: list[str]
) -> None:
    write_many(tmp_path, 20)
    (tmp_path / "foreign").mkdir()
    right = everything(open_history(tmp_path))
    path = index(tmp_path)
    data = path.read_bytes()
    path.unlink()
    if harm == "emptied":
        path.write_bytes(b"")
    elif harm == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif harm == "flipped":
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    elif harm == "another":
        path.write_bytes(b"a file of somebody else")
    elif harm == "folder":
        path.mkdir()
    reads.clear()
    assert everything(open_history(tmp_path)) == right
    assert len(reads) == 20
    if harm != "folder":  # nothing may be removed there that is not an index
        assert load(tmp_path) is not None


TEXT = st.text(max_size=5)
NUMBER = st.none() | st.floats(allow_nan=False)
POINTS = st.lists(
    st.builds(
        Point,
        run_id=TEXT, created=TEXT, engine=TEXT, workload=TEXT, load=TEXT, metric=TEXT, unit=TEXT,
        value=NUMBER, ci_low=NUMBER, ci_high=NUMBER, n=st.none() | st.integers(0, 2**62),
        profile=st.none() | TEXT, void=st.booleans(), suite=st.none() | TEXT,
    ),
    max_size=5,
)  # fmt: skip


@given(folders=st.lists(POINTS, max_size=4), kept=st.lists(st.booleans(), min_size=4, max_size=4))
def test_what_an_index_was_given_it_gives_back(
    tmp_path_factory: pytest.TempPathFactory, folders: list[list[Point]], kept: list[bool]
) -> None:
    root = tmp_path_factory.getbasetemp()
    builder = Builder()
    known = [
        Known(f"{i}".encode(), "run", (None, (1, 2, 3, 4)), None, builder.add(points))
        for i, points in enumerate(folders)
    ]
    table = builder.table(known)
    left = kept[: len(folders)]
    save(root, table.keep(left))
    again = load(root)
    assert again is not None
    assert again.folders == [k for k, good in zip(known, left, strict=True) if good]
    wanted = [p for points, good in zip(folders, left, strict=True) if good for p in points]
    assert [again.point(row) for row in range(len(again))] == wanted
    assert len(again.who) <= len(wanted) and len(again.what) <= len(wanted)
    # More is put behind it, as a run that was measured since.
    more = Builder(again)
    added = Known(b"new", "run", (), None, more.add(wanted))
    both = more.table([added])
    assert [both.point(row) for row in range(len(both))] == wanted * 2


def test_an_index_of_another_version_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    write_one(tmp_path, "a")
    open_history(tmp_path)
    reads.clear()
    monkeypatch.setattr("harness.history.index.FORMAT", "2")
    assert open_history(tmp_path).runs()
    assert reads == ["a"]


def test_a_root_that_cannot_be_written_is_read_all_the_same(tmp_path: Path) -> None:
    write_one(tmp_path, "a")
    (tmp_path / FOLDER).write_text("in the way")
    assert list(open_history(tmp_path).runs()) == ["a"]
    assert list(open_history(tmp_path).runs()) == ["a"]


def test_a_large_index_is_not_written_for_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SMALL", 0)
    monkeypatch.setattr(store, "FEW", 3)
    for name in ("a", "b", "c"):
        write_one(tmp_path, name)
    assert len(open_history(tmp_path).runs()) == 3
    assert not index(tmp_path).exists()
    write_one(tmp_path, "d")
    assert len(open_history(tmp_path).runs()) == 4
    assert index(tmp_path).exists()


def test_a_reading_that_is_interrupted_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    write_many(tmp_path, 30)
    right = [p.value for p in open_history(tmp_path).query()]
    shutil.rmtree(tmp_path / FOLDER)
    reads.clear()

    def told(done: int, of: int) -> None:
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_history(tmp_path, told)
    assert len(reads) == 12
    assert [p.value for p in open_history(tmp_path).query()] == right
    assert len(reads) == len(set(reads)) == 30


def test_readers_and_writers_at_once_see_whole_answers(tmp_path: Path) -> None:
    """Processes that index while runs come and go: none fails, and none reads half an index."""
    write_many(tmp_path, 30)
    code = (
        "import sys, pathlib\n"
        "from harness.history.store import open_history\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "for _ in range(15):\n"
        "    found = open_history(root)\n"
        "    runs = found.runs(metric='acceptance_length')\n"
        "    assert all(len(points) == 1 for points in runs.values()), runs\n"
        "    assert len(runs) >= 30, len(runs)\n"
        "    bad = [p for p in found.problems if 'extra' not in p[0].name]\n"
        "    assert not bad, bad\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    readers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment, cwd=REPO)
        for _ in range(2)
    ]
    stop = threading.Event()

    def come_and_go() -> None:
        number = 0
        while not stop.is_set():
            name = f"extra-{number}"
            write_one(tmp_path, name, of=small(name))
            time.sleep(0.01)
            while (tmp_path / name).exists():  # a reader may be writing the run's points into it
                shutil.rmtree(tmp_path / name, ignore_errors=True)
            number += 1

    coming = threading.Thread(target=come_and_go)
    coming.start()
    try:
        assert [reader.wait(timeout=600) for reader in readers] == [0, 0]
    finally:
        stop.set()
        coming.join()
    assert len(open_history(tmp_path).runs()) == 30
    assert load(tmp_path) is not None


def test_every_filter_is_heard(tmp_path: Path) -> None:
    write_one(tmp_path, "old", created=BEGUN, git_commit="aaa111")
    write_one(tmp_path, "new", created=BEGUN + timedelta(days=9), git_commit="bbb222")
    vllm = told(
        "other",
        cells=tuple(msgspec.structs.replace(c, engine="vllm") for c in small().cells),
        comparisons=(),
        void="void",
    )
    write_one(
        tmp_path,
        "other",
        of=vllm,
        created=BEGUN + timedelta(days=20),
        plan=plan("vllm", profile="kimi"),
        digests={"vllm": {"target": "t9", "drafter": "d9"}},
    )
    found = open_history(tmp_path)

    def runs(**filters: Any) -> set[str]:
        return {p.run_id for p in found.query(**filters)}

    assert runs() == {"old", "new", "other"}
    assert runs(engine="vllm") == runs(profile="kimi") == runs(drafter="d9") == {"other"}
    assert runs(target=("t9", "nothing")) == {"other"}
    assert runs(target="small-target") == {"old", "new", "other"}
    assert runs(drafter="bbbb") == {"old", "new"}
    assert runs(commit="bbb") == {"new"}
    assert runs(since="2026-01-02", until="2026-01-15") == {"new"}
    assert runs(run="old") == {"old"}
    assert runs(void=False) == runs(variant="ratio") == {"old", "new"}
    assert runs(workload="demo", load="c1") == {"old", "new", "other"}
    assert runs(load="c2") == runs(suite="nightly") == runs(source="import:x") == set()
    assert {p.metric for p in found.query(metric="ttft_s")} == {
        "ttft_s.mean", "ttft_s.p50", "ttft_s.p90", "ttft_s.p99",
    }  # fmt: skip
    assert {p.metric for p in found.query(metric="ttft_s.p50")} == {"ttft_s.p50"}
    newest = found.query(metric="acceptance_length", most=2)
    assert [p.run_id for p in newest] == ["new", "other"]
    assert found.count(Query(metric=("acceptance_length",))) == 3
    assert all(not p.void for points in found.series().values() for p in points)


def test_a_series_is_in_the_order_of_time_and_of_one_thing_alone(tmp_path: Path) -> None:
    write_many(tmp_path, 12)
    write_one(tmp_path, "k5", plan=plan(sets=("speculative.k=5",)), created=BEGUN)
    series = open_history(tmp_path).series(metric="output_tokens_per_s", variant="baseline")
    assert {key.profile: len(points) for key, points in series.items()} == {
        "demo": 12,
        "demo [speculative.k=5]": 1,
    }
    points = next(points for key, points in series.items() if key.profile == "demo")
    assert [p.created for p in points] == sorted(p.created for p in points)
    assert len({p.value for p in points}) == 12
    assert all(abs((p.value or 0) / SPEED - 1) < 0.011 for p in points)


def test_the_runs_of_a_sweep_and_imports_are_found(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep-20260101-000000-reference-0000"
    for k in (1, 2):
        write_one(
            sweep / "runs", f"sweep-k{k}", place=f"k{k}", plan=plan(sets=(f"speculative.k={k}",))
        )
    (sweep / "sweep.json").write_text("{}")
    (sweep / "plots").mkdir()
    imported = tmp_path / "imported" / "x"
    imported.mkdir(parents=True)
    point = Point(
        run_id="their", created="2026-01-01T02:00:00+02:00", engine="vllm", variant="baseline",
        workload="w", load="c1", metric="ttft_s.p50", value=None, unit="s", source="import:them",
    )  # fmt: skip
    (imported / "import.json").write_bytes(
        msgspec.json.encode({"schema_version": "1.0", "points": [point], "more": 1})
    )
    found = open_history(tmp_path)
    assert not found.problems
    assert sorted(found.runs()) == ["imported/x", f"{sweep.name}/runs/k1", f"{sweep.name}/runs/k2"]
    assert found.query(source="import:them") == [
        msgspec.structs.replace(point, created="2026-01-01T00:00:00+00:00", folder="imported/x")
    ]


def test_a_baselines_copy_counts_once(tmp_path: Path) -> None:
    folder = write_one(tmp_path, "a")
    shutil.copytree(folder, tmp_path / "baselines" / "mine")
    assert list(open_history(tmp_path).runs()) == ["a"]
    assert not open_history(tmp_path).problems
    shutil.copytree(folder, tmp_path / "moved")
    assert list(open_history(tmp_path).runs()) == ["a"]
    assert open_history(tmp_path).problems == [(tmp_path / "moved", "the run of a once more")]
    shutil.rmtree(folder)
    assert list(open_history(tmp_path).runs()) == ["moved"]


def test_a_root_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder of results"):
        open_history(tmp_path / "none")
    assert open_history(tmp_path).query() == []
    assert open_history(tmp_path).series() == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2026-11-30", "2026-11-30T00:00:00+00:00"),
        ("2026-11-30T12:00:00+02:00", "2026-11-30T10:00:00+00:00"),
        ("7d", "2026-11-23T12:00:00+00:00"),
        ("1.5h", "2026-11-30T10:30:00+00:00"),
        ("2 w", "2026-11-16T12:00:00+00:00"),
    ],
)
def test_a_moment_is_a_date_or_how_long_ago(text: str, said: str) -> None:
    assert moment("--since", text, datetime(2026, 11, 30, 12, tzinfo=UTC)) == said


@pytest.mark.parametrize("text", ["", "soon", "7", "99999999999w", "2026-13-01", "-1d"])
def test_a_moment_that_is_none_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=r"--until .*: give a date such as"):
        moment("--until", text, datetime(2026, 11, 30, tzinfo=UTC))


def test_five_hundred_runs_are_read_once(tmp_path: Path, reads: list[str]) -> None:
    check_many(tmp_path, 500, reads)


@pytest.mark.full
def test_ten_thousand_runs_are_read_once(tmp_path: Path, reads: list[str]) -> None:
    check_many(tmp_path, 10_000, reads)


def check_many(root: Path, runs: int, reads: list[str]) -> None:
    """Everything is there once, and the index has it; nothing is read a second time."""
    write_many(root, runs)
    first = open_history(root)
    assert len(reads) == runs
    reads.clear()
    again = open_history(root)
    assert not reads and not again.problems
    speeds = again.query(metric="output_tokens_per_s", variant="baseline")
    assert [p.created for p in speeds] == sorted(p.created for p in speeds)
    assert speeds == first.query(metric="output_tokens_per_s", variant="baseline")
    assert len(speeds) == runs == len(again.runs(metric="acceptance_length"))
    assert again.count() == runs


def test_the_example_of_this_repository_is_a_run_and_stays(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "results" / "example"
    for name in ("summary.json", "manifest.json", "labels.json"):
        (tmp_path / "example").mkdir(exist_ok=True)
        shutil.copy(example / name, tmp_path / "example" / name)
    found = open_history(tmp_path)
    assert not found.problems and found.query(metric="output_tokens_per_s", variant="ratio")
    plan = plan_of(tmp_path, Wish(older_than="2100-01-01", keep=0))
    assert [one.why for one in plan.staying] == [
        "pinned: the run that the page of the project shows"
    ]
