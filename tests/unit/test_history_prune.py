"""Pruning: what may go by age and by size, what stays whatever is asked, and how it is removed."""

from __future__ import annotations

import fcntl
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from history_runs import BEGUN, write_one
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.history import prune
from harness.history.prune import NEWEST, NOT_ASKED, Plan, Wish, carry_out, plan_of
from harness.history.records import Labels
from harness.history.sizes import Disk, parse_size, size_words
from harness.measure.store import RunFolder

OLD = "2026-06-01T00:00:00+00:00"
EVERYTHING = Wish(older_than="2030-01-01", keep=0)
MB = 10**6


def run(root: Path, name: str, day: int = 0, *, size: int = 0, **changes: Any) -> Path:
    """A run's folder of that many bytes of requests, begun on that day of the year."""
    folder = write_one(root, name, created=BEGUN + timedelta(days=day), **changes)
    cell = folder / "cells" / "c"
    cell.mkdir(parents=True)
    (cell / "requests.parquet").write_bytes(os.urandom(size))
    return folder


def goes(plan: Plan) -> list[str]:
    return [one.place for one in plan.going]


def stays(plan: Plan) -> dict[str, str]:
    return {one.place: one.why for one in plan.staying}


def test_by_age_the_older_ones_go(tmp_path: Path) -> None:
    for day in (0, 100, 200):
        run(tmp_path, f"day-{day}", day)
    plan = plan_of(tmp_path, Wish(older_than=OLD, keep=0))
    assert goes(plan) == ["day-0", "day-100"]
    assert stays(plan) == {"day-200": NOT_ASKED}
    assert {one.why for one in plan.going} == {"its age"}


def test_by_size_the_oldest_go_until_it_is_kept(tmp_path: Path) -> None:
    for day in (3, 1, 2, 0):
        run(tmp_path, f"day-{day}", day, size=MB)
    plan = plan_of(tmp_path, Wish(max_bytes=int(2.5 * MB), keep=0))
    assert goes(plan) == ["day-0", "day-1"]
    assert plan.bytes_before > 4 * MB and 2 * MB < plan.bytes_after <= 2.5 * MB
    assert all(MB < one.bytes < 1.1 * MB for one in plan.going)
    none = plan_of(tmp_path, Wish(max_bytes=100 * MB, keep=0))
    assert not none.going and none.bytes_after == none.bytes_before == plan.bytes_before


def test_the_newest_stay_whatever_their_size(tmp_path: Path) -> None:
    for day in range(4):
        run(tmp_path, f"day-{day}", day, size=MB)
    plan = plan_of(tmp_path, Wish(max_bytes=0, keep=3))
    assert goes(plan) == ["day-0"]
    assert stays(plan) == {f"day-{day}": NEWEST for day in (1, 2, 3)}
    assert plan.bytes_after > 3 * MB


@pytest.mark.parametrize(("runs", "keep"), [(3, 3), (3, 4), (3, 5), (3, 6), (3, 10), (0, 10)])
def test_where_no_more_runs_are_than_are_kept_none_goes(
    tmp_path: Path, runs: int, keep: int
) -> None:
    for day in range(runs):
        run(tmp_path, f"day-{day}", day)
    plan = plan_of(tmp_path, Wish(older_than="2030-01-01", max_bytes=0, keep=keep))
    assert not plan.going
    assert stays(plan) == {f"day-{day}": NEWEST for day in range(runs)}


def test_baselines_and_what_they_name_stay(tmp_path: Path) -> None:
    for name in ("by-id", "by-place", "by-night", "free"):
        run(tmp_path, name)
    baselines = tmp_path / "baselines" / "suite"
    run(tmp_path / "baselines", "a-copy")
    baselines.mkdir()
    (baselines / "a.json").write_text('{"points": [{"run_id": "by-id"}]}')
    (baselines / "b.json").write_text('{"run": "results/by-place/"}')
    night = tmp_path / "nightly" / "suite"
    night.mkdir(parents=True)
    (night / "baseline.json").write_text('{"entries": {"x": {"run": "by-night"}}}')
    plan = plan_of(tmp_path, EVERYTHING)
    assert goes(plan) == ["free"]
    assert stays(plan) == dict.fromkeys(("by-id", "by-place", "by-night"), "a baseline")
    (baselines / "b.json").write_text("{")
    with pytest.raises(UsageError, match=r"b\.json: cannot be read, so that it is not known"):
        plan_of(tmp_path, EVERYTHING)


def test_a_baseline_may_be_a_link_to_its_run(tmp_path: Path) -> None:
    for name in ("linked", "free"):
        run(tmp_path, name)
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines" / "prod").symlink_to("../linked")
    (tmp_path / "baselines" / "all").symlink_to(".")
    plan = plan_of(tmp_path, EVERYTHING)
    assert goes(plan) == ["free"]
    assert stays(plan) == {"linked": "a baseline"}


@pytest.mark.parametrize("depth", [900, 990, 100_000])
def test_a_baseline_of_any_depth_is_read_or_told(tmp_path: Path, depth: int) -> None:
    run(tmp_path, "kept")
    (tmp_path / "baselines").mkdir()
    deep = "[" * depth + '{"run": "kept"}' + "]" * depth
    (tmp_path / "baselines" / "deep.json").write_text(deep)
    try:
        assert stays(plan_of(tmp_path, EVERYTHING)) == {"kept": "a baseline"}
    except UsageError as error:
        assert "deep.json: cannot be read, so that it is not known" in str(error)


def test_a_folder_of_baselines_that_cannot_be_listed_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "perhaps-kept")
    (tmp_path / "baselines" / "closed").mkdir(parents=True)
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UsageError, match="closed: cannot be read, so that it is not known"):
        plan_of(tmp_path, EVERYTHING)


def test_a_pinned_run_and_one_being_measured_stay(tmp_path: Path) -> None:
    pinned, measured, broken = (run(tmp_path, name) for name in ("pinned", "measured", "broken"))
    (pinned / "labels.json").write_bytes(msgspec.json.encode(Labels(pinned="before the upgrade")))
    (broken / "labels.json").write_text("pinned, I believe")
    with RunFolder(measured).claimed():
        plan = plan_of(tmp_path, EVERYTHING)
    assert not plan.going
    assert stays(plan)["pinned"] == "pinned: before the upgrade"
    assert stays(plan)["measured"] == "being measured"
    assert stays(plan)["broken"].startswith("not recognised: labels.json: cannot be read")


def foreign(root: Path) -> dict[str, str]:
    """Folders that are no run's, or not only; and why each must stay."""
    (root / "photos").mkdir()
    (root / "photos" / "manifest.txt").touch()
    (root / "cut").mkdir()
    (root / "cut" / "manifest.json").write_text("{")
    (root / "theirs").mkdir()
    (root / "theirs" / "manifest.json").write_text('{"name": "an app", "version": 1}')
    later = run(root, "later") / "manifest.json"
    later.write_text('{"schema_version": "2.0"}')
    (run(root, "notes") / "notes.txt").write_text("what I thought of it")
    sweep = root / "sweep-bad"
    run(sweep / "runs", "k1")
    (sweep / "runs" / "mine").mkdir()
    (sweep / "sweep.json").write_text('{"schema_version": "1.2", "sweep_id": "s", "settings": []}')
    run(root / "holder", "inside")
    return {
        "photos": "no run's: no manifest.json",
        "cut": "manifest.json: no JSON",
        "theirs": "manifest.json: not this harness's",
        "later": "manifest.json: written with schema 2.0",
        "notes": "holds notes.txt, which is not of a run",
        "sweep-bad": "no run's: no manifest.json",
        "holder": "no run's: no manifest.json",
    }


def test_what_is_not_recognised_is_never_removed(tmp_path: Path) -> None:
    reasons = foreign(tmp_path)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    run(outside, "elsewhere")
    (tmp_path / "link").symlink_to(outside / "elsewhere")
    (tmp_path / "README.md").write_text("results")
    run(tmp_path, "mine")
    plan = plan_of(tmp_path, EVERYTHING)
    assert goes(plan) == ["mine"]
    told = stays(plan)
    assert set(told) == set(reasons)
    for place, reason in reasons.items():
        assert told[place].startswith(f"not recognised: {reason}")
    before = sorted(
        str(p) for p in tmp_path.rglob("*") if "mine" not in str(p.relative_to(tmp_path))
    )
    assert not carry_out(tmp_path, plan.going, lambda one: None)
    after = sorted(str(p) for p in tmp_path.rglob("*"))
    assert [p for p in before if "sweep-bad/runs/mine" not in p] == [
        p for p in after if "sweep-bad/runs/mine" not in p
    ]
    assert (tmp_path / "sweep-bad" / "runs" / "mine").is_dir()
    assert (outside / "elsewhere" / "summary.json").is_file()


def sweep(root: Path, name: str, *, size: int) -> Path:
    """A sweep of two settings; the second shares the first one's baseline cells by hard links."""
    folder = root / name
    for k in (1, 2):
        run(folder / "runs", f"{name}-k{k}", place=f"k{k}", size=10)
    shared = folder / "runs" / "k1" / "cells" / "baseline"
    shared.mkdir()
    (shared / "requests.parquet").write_bytes(os.urandom(size))
    linked = folder / "runs" / "k2" / "cells" / "baseline"
    linked.mkdir()
    os.link(shared / "requests.parquet", linked / "requests.parquet")
    told = {"schema_version": "1.2", "sweep_id": name, "settings": [{}, {}]}
    (folder / "sweep.json").write_bytes(msgspec.json.encode(told))
    (folder / "plots").mkdir()
    return folder


def test_a_sweep_goes_as_one_and_its_shared_cells_count_once(tmp_path: Path) -> None:
    sweep(tmp_path, "sweep-a", size=MB)
    plan = plan_of(tmp_path, EVERYTHING)
    assert goes(plan) == ["sweep-a"]
    assert plan.going[0].what == "sweep of 2 settings"
    assert MB < plan.going[0].bytes < 1.2 * MB
    assert not carry_out(tmp_path, plan.going, lambda one: None)
    assert not list(tmp_path.iterdir())


def test_a_sweep_that_was_hardly_begun_stays(tmp_path: Path) -> None:
    folder = tmp_path / "sweep-a"
    (folder / "runs").mkdir(parents=True)
    (folder / "sweep.json").write_text('{"schema_version": "1.2", "sweep_id": "s", "settings": []}')
    assert stays(plan_of(tmp_path, EVERYTHING)) == {"sweep-a": "not recognised: a sweep of no runs"}


def test_a_sweep_with_a_pinned_or_a_named_run_stays_whole(tmp_path: Path) -> None:
    pinned, named = (sweep(tmp_path, name, size=10) for name in ("sweep-a", "sweep-b"))
    (pinned / "runs" / "k2" / "labels.json").write_text('{"pinned": "k = 2 it is"}')
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines" / "b.json").write_text(f'{{"run": "{named.name}/runs/k1"}}')
    plan = plan_of(tmp_path, EVERYTHING)
    assert not plan.going
    assert stays(plan) == {"sweep-a": "pinned: k = 2 it is", "sweep-b": "a baseline"}


def test_what_has_a_name_elsewhere_frees_nothing(tmp_path: Path) -> None:
    root = tmp_path / "results"
    kept, gone = run(root, "kept", 9), run(root, "gone", 0, size=MB)
    requests = gone / "cells" / "c" / "requests.parquet"
    os.link(requests, kept / "cells" / "c" / "of-the-other.parquet")
    plan = plan_of(root, Wish(older_than="2026-01-05", keep=0))
    assert goes(plan) == ["gone"]
    assert plan.going[0].bytes < 0.1 * MB
    assert plan.bytes_before - plan.bytes_after < 0.1 * MB
    os.unlink(kept / "cells" / "c" / "of-the-other.parquet")
    os.link(requests, tmp_path / "outside.parquet")
    plan = plan_of(root, Wish(older_than="2026-01-05", keep=0))
    assert plan.going[0].bytes < 0.1 * MB  # the disk gets nothing back
    assert plan.bytes_before - plan.bytes_after > MB  # but the results hold so much less


def test_an_unfinished_run_is_a_run(tmp_path: Path) -> None:
    (run(tmp_path, "begun") / "summary.json").unlink()
    (tmp_path / "begun" / ".cells-x9").mkdir()
    plan = plan_of(tmp_path, EVERYTHING)
    assert [one.what for one in plan.going] == ["unfinished run"]


def test_what_changed_since_it_was_said_stays(tmp_path: Path) -> None:
    for name in ("pinned", "measured", "another", "free", "gone"):
        run(tmp_path, name)
    plan = plan_of(tmp_path, EVERYTHING)
    (tmp_path / "pinned" / "labels.json").write_text('{"pinned": "wait"}')
    shutil.rmtree(tmp_path / "another")
    run(tmp_path, "another", 3)
    shutil.rmtree(tmp_path / "gone")
    removed: list[str] = []
    with RunFolder(tmp_path / "measured").claimed():
        left = carry_out(tmp_path, plan.going, lambda one: removed.append(one.place))
    assert removed == ["free"]
    assert {one.place: one.why for one in left} == {
        "pinned": "has changed since", "another": "has changed since",
        "gone": "has changed since", "measured": "being measured",
    }  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["another", "measured", "pinned"]


def test_what_was_pinned_while_others_were_removed_stays(tmp_path: Path) -> None:
    for day, name in enumerate(("first", "pinned", "linked", "last")):
        run(tmp_path, name, day)
    plan = plan_of(tmp_path, EVERYTHING)

    def meanwhile(one: prune.Going) -> None:
        if one.place == "first":
            (tmp_path / "pinned" / "labels.json").write_text('{"pinned": "wait"}')
            (tmp_path / "linked").rename(tmp_path / "moved")
            (tmp_path / "linked").symlink_to("moved")

    left = carry_out(tmp_path, plan.going, meanwhile)
    assert {one.place: one.why for one in left} == {
        "pinned": prune.CHANGED, "linked": prune.CHANGED,
    }  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["linked", "moved", "pinned"]


def test_what_became_a_baseline_since_stays(tmp_path: Path) -> None:
    run(tmp_path, "chosen")
    plan = plan_of(tmp_path, EVERYTHING)
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines" / "b.json").write_text('{"run": "chosen"}')
    left = carry_out(tmp_path, plan.going, print)
    assert [(one.place, one.why) for one in left] == [("chosen", "a baseline")]


def test_two_removals_at_once_both_end_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "a")
    plan = plan_of(tmp_path, EVERYTHING)
    real = shutil.rmtree

    def overtaken(path: Path) -> None:
        real(path / "cells")  # another prune has come so far already
        monkeypatch.setattr(prune.shutil, "rmtree", real)
        raise FileNotFoundError(2, "No such file or directory", str(path / "cells"))

    monkeypatch.setattr(prune.shutil, "rmtree", overtaken)
    assert carry_out(tmp_path, plan.going, lambda one: None) == []
    assert not list(tmp_path.iterdir())


def test_an_interrupted_removal_leaves_no_half_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "a")
    run(tmp_path, "b", 1)
    plan = plan_of(tmp_path, EVERYTHING)

    def stop(path: Path) -> None:
        (path / "summary.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(prune.shutil, "rmtree", stop)
        carry_out(tmp_path, plan.going, lambda one: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".pruned-a", "b"]
    again = plan_of(tmp_path, EVERYTHING)
    assert goes(again) == ["b"]
    assert not carry_out(tmp_path, again.going, lambda one: None)
    assert not list(tmp_path.iterdir())


def test_a_removal_that_fails_is_told_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        run(tmp_path, name)
    plan = plan_of(tmp_path, EVERYTHING)
    real = shutil.rmtree

    def refused(path: Path) -> None:
        if path.name == ".pruned-a":
            raise PermissionError(13, "Permission denied")
        real(path)

    with monkeypatch.context() as patched:
        patched.setattr(prune.shutil, "rmtree", refused)
        for _ in range(2):
            left = carry_out(tmp_path, plan.going[1:], lambda one: None)
            told = {one.place: one.why for one in carry_out(tmp_path, plan.going, print)}
            assert "permission denied; what is left of it is .pruned-a" in told.values()
    assert [one.place for one in left] == [".pruned-a", "b"]
    assert [p.name for p in tmp_path.iterdir()] == [".pruned-a"]


def test_removing_takes_the_claim_that_measuring_takes(tmp_path: Path) -> None:
    folder = run(tmp_path, "a")
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert stays(plan_of(tmp_path, EVERYTHING)) == {"a": "being measured"}
    finally:
        os.close(handle)
    assert goes(plan_of(tmp_path, EVERYTHING)) == ["a"]


def test_a_sweep_stays_while_one_of_its_runs_is_measured(tmp_path: Path) -> None:
    folder = sweep(tmp_path, "sweep-a", size=10)
    plan = plan_of(tmp_path, EVERYTHING)
    with RunFolder(folder / "runs" / "k2").claimed():
        assert stays(plan_of(tmp_path, EVERYTHING)) == {"sweep-a": prune.BUSY}
        assert [one.why for one in carry_out(tmp_path, plan.going, print)] == [prune.BUSY]
    assert (folder / "runs" / "k2" / "summary.json").exists()


def test_nothing_asked_for_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="say what may go"):
        plan_of(tmp_path, Wish())
    with pytest.raises(UsageError, match="no such folder"):
        plan_of(tmp_path / "none", EVERYTHING)


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("1.5 TiB", 1.5 * 2**40), ("500", 500), ("0", 0), ("3kb", 3000)],
)
def test_a_size_is_read_in_its_unit(text: str, size: float) -> None:
    assert parse_size("--max-size", text) == int(size)


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 XB", "nan", "inf", "1e99", "20 G B"])
def test_a_size_that_is_none_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=r"--max-size .*: give a size such as 20GB"):
        parse_size("--max-size", text)


def test_sizes_in_words() -> None:
    shown = [size_words(n) for n in (0, 999, 1234, 10**6, 123_456_789_000, 5 * 10**15)]
    assert shown == ["0 B", "999 B", "1.23 kB", "1 MB", "123 GB", "5,000 TB"]


FILES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 40_000)), min_size=1, max_size=8
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(files=FILES, order=st.permutations(range(4)))
def test_sizes_add_up_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[tuple[int, int, int]],
    order: list[int],
) -> None:
    """Each file lies in one folder and is linked into another: at the end all is given back."""
    root = tmp_path_factory.mktemp("sizes")
    folders = [root / str(i) for i in range(4)]
    for folder in folders:
        folder.mkdir()
    for number, (first, second, size) in enumerate(files):
        path = folders[first] / f"{number}"
        path.write_bytes(os.urandom(size))
        if second != first:
            os.link(path, folders[second] / f"{number}")
    disk = Disk()
    held = [disk.add(folder) for folder in folders]
    begun = disk.total
    unique = {(p.stat().st_ino): p.stat().st_blocks * 512 for p in [*root.rglob("*")]}
    assert begun == sum(unique.values())
    falls = 0
    for i in order:
        before = disk.total
        fell, back = disk.remove(held[i])
        assert fell == back  # nothing has a name outside
        falls += fell
        assert disk.total == before - fell
    assert falls == begun and disk.total == 0
