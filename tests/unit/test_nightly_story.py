"""A night from end to end with made figures: order, budget, resume, confirmation, what is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nightly_points import write_suite
from nightly_stand_in import calls, set_behaviour, stand_in

from harness.ending import exit_code_of
from harness.errors import UsageError
from harness.nightly import folders, measuring
from harness.nightly.accept import Wish, accept
from harness.nightly.measuring import Launch
from harness.nightly.records import Night
from harness.nightly.story import Told, nightly
from harness.nightly.suite import read_suite

SUITE = """
name = "s"
results = "{results}"
learn = 14
{more}
[[gates]]
metric = "acceptance_length"
min = 2.0
[[entries]]
name = "a"
set = ["seed=1"]
{entry}
[[entries]]
name = "b"
set = ["seed=2"]
"""


NEWER = {"versions": {"torch": "2.14.0"}, "git_commit": "f" * 40}


class Quiet:
    """A progress that keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def stage(self, text: str) -> None: ...
    def cell(self, title: str, total: int | None) -> None: ...
    def tally(self, tally: Any) -> None: ...
    def cell_done(self) -> None: ...
    def skip(self) -> None: ...
    def expect(self, cells: int) -> None: ...


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, called by every run of the night."""
    place = stand_in(tmp_path / "good")
    monkeypatch.setattr("harness.nightly.story.Launch", lambda: Launch(root=place))
    return place


@pytest.fixture
def go(tmp_path: Path, root: Path) -> Callable[..., tuple[Told, Night, list[str]]]:
    """Do a night of the suite; `more` at its top, `entry` for the first entry."""

    def night(more: str = "", entry: str = "", anew: bool = False) -> tuple[Told, Night, list[str]]:
        text = SUITE.format(results=tmp_path / "r", more=more, entry=entry)
        progress = Quiet()
        told = nightly(read_suite(write_suite(tmp_path, text)), progress, anew=anew)
        return told, folders.NightFolder(told.folder).read(), progress.lines

    return night


def statuses(night: Night) -> dict[str, str]:
    return {e.name: e.status for e in night.entries}


def test_a_first_night_pins_its_baselines_and_tells_it(tmp_path: Path, root: Path, go: Any) -> None:
    told, night, _ = go()
    assert told.exit_code == 0 and statuses(night) == {"a": "done", "b": "done"}
    assert calls(root) == ["run 1", "run 2"]
    for name in ("index.html", "night.md", "junit.xml", "findings.json", "night.json"):
        assert (told.folder / name).stat().st_size > 100
    pinned = folders.read_baseline((tmp_path / "r").resolve(), "s", "a")
    assert pinned is not None and pinned.night == night.night
    run = (tmp_path / "r" / pinned.run / "labels.json").read_text()
    assert json.loads(run) == {"suite": "s", "pinned": "baseline of s, a: the first good night"}
    page = (told.folder / "index.html").read_text()
    assert (
        'href="../../../' in page
        and "<svg" in page
        and "http://" not in page.replace("http://www.w3.org", "")
    )


def test_a_second_night_the_same_day_has_a_folder_of_its_own(go: Any) -> None:
    first, _, _ = go()
    second, night, _ = go()
    assert second.folder.name == f"{first.folder.name}.2" and second.exit_code == 0
    assert night.findings == ()


@pytest.mark.parametrize("refuse", [False, True])
def test_what_is_interrupted_is_gone_on_with(
    root: Path, go: Any, monkeypatch: pytest.MonkeyPatch, refuse: bool
) -> None:
    measure = measuring.measure

    def stopped(arguments: Any, attempt: Any, **named: Any) -> Any:
        done = measure(arguments, attempt, **named)
        if "seed=2" in attempt.arguments:
            (named["out"] / str(done.run) / "summary.json").unlink()
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr("harness.nightly.measuring.measure", stopped)
    told, night, _ = go()
    assert told.exit_code == 130 and told.view is None
    assert statuses(night) == {"a": "done", "b": "running"}
    monkeypatch.setattr("harness.nightly.measuring.measure", measure)
    set_behaviour(root, refuse=refuse)  # as where the machine or the code has changed
    again, whole, said = go()
    assert again.folder == told.folder and again.exit_code == 0
    assert statuses(whole) == {"a": "done", "b": "done"}
    assert calls(root) == ["run 1", "run 2", "run 2" if refuse else "resume 2"]
    assert any("1 of 2 entries are done" in line for line in said)


KILLED = """
from pathlib import Path
from harness.nightly import story
from harness.nightly.measuring import Launch
from harness.nightly.suite import read_suite
from test_nightly_story import Quiet
story.Launch = lambda: Launch(root=Path({root!r}))
story.nightly(read_suite(Path({suite!r})), Quiet())
"""


def test_a_night_killed_outright_is_gone_on_with(
    tmp_path: Path, root: Path, go: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, may_end = tmp_path / "r", tmp_path / "may end"
    suite = write_suite(tmp_path, SUITE.format(results=results, more="", entry=""))
    set_behaviour(root, entries={"2": {"sleep": 600, "ends_with": str(may_end)}})
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(root=str(root), suite=str(suite))],
        env={**os.environ, "PYTHONPATH": here},
        stdin=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while len(calls(root)) < 2 or len(list(results.glob("2*/manifest.json"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    (folder,) = (results / "nightly" / "s").glob("2*")
    before = folders.NightFolder(folder).read()
    assert statuses(before) == {"a": "done", "b": "running"}
    assert not list(
        results.glob("2*/ended")
    )  # it goes on for a while: nobody may measure beside it
    set_behaviour(root)
    say = Quiet.say

    def said_so(self: Quiet, text: str) -> None:
        say(self, text)
        may_end.touch()

    monkeypatch.setattr(Quiet, "say", said_so)
    told, night, said = go()
    assert said[0] == "a run of a nightly that was killed is still ending; waiting for it"
    assert len(list(results.glob("2*/ended"))) == 1
    assert told.folder.name == folder.name and statuses(night) == {"a": "done", "b": "done"}
    assert calls(root) == ["run 1", "run 2", "resume 2"]
    assert night.entries[0].attempt == before.entries[0].attempt


def test_a_changed_suite_begins_a_new_night(
    root: Path, go: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    measure = measuring.measure
    monkeypatch.setattr("harness.nightly.measuring.measure", stopped)
    first, _, _ = go()
    monkeypatch.setattr("harness.nightly.measuring.measure", measure)
    second, _, said = go(entry='profile = "demo"')
    assert second.folder != first.folder
    assert any("the suite has changed since" in line for line in said)


def test_failures_are_data(root: Path, go: Any) -> None:
    set_behaviour(root, entries={"1": {"exit": 3}, "2": {"exit": 4, "void": True}})
    told, night, _ = go()
    assert statuses(night) == {"a": "failed", "b": "void"}
    assert told.exit_code == 3
    assert "the engine fell over" in (told.folder / "junit.xml").read_text()
    set_behaviour(root, entries={"2": {"exit": 4, "void": True}})
    assert go()[0].exit_code == 4
    set_behaviour(root, entries={"2": {"exit": 2}})
    assert go()[0].exit_code == 2


def test_the_time_budget_is_kept_and_what_is_left_out_is_told(root: Path, go: Any) -> None:
    told, night, _ = go(more="time_budget_min = 10", entry="minutes = 60")
    assert statuses(night) == {"a": "left_out", "b": "done"}
    assert "No time was left for a." in (told.folder / "night.md").read_text()
    second = go(more="time_budget_min = 10")[1]
    assert [e.name for e in second.entries] == ["a", "b"]  # what was left out comes first
    assert statuses(second) == {"a": "done", "b": "done"}


def test_a_run_past_the_budget_is_ended(
    root: Path, go: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour passes as soon as the first run has begun."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * len(calls(root)))
    for module in ("measuring", "story"):
        monkeypatch.setattr(f"harness.nightly.{module}.time", clock)
    set_behaviour(root, entries={"1": {"sleep": 600}})
    told, night, _ = go(more="time_budget_min = 50")
    assert statuses(night) == {"a": "cut_short", "b": "left_out"}
    assert told.exit_code == 0


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of four nights without a change."""
    folder = tmp_path_factory.mktemp("quiet")
    place = stand_in(folder / "good")
    text = SUITE.format(results=folder / "r", more="", entry="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.nightly.story.Launch", lambda: Launch(root=place))
        for _ in range(4):
            assert nightly(read_suite(write_suite(folder, text)), Quiet()).exit_code == 0
    return folder / "r"


@pytest.fixture
def four(quiet: Path, tmp_path: Path) -> None:
    """Four nights without a change lie behind the night of the test."""
    shutil.copytree(quiet, tmp_path / "r", symlinks=True)


def test_a_loss_beside_a_good_version_is_cried_with_its_cause_until_it_is_accepted(
    tmp_path: Path, root: Path, four: None, go: Any
) -> None:
    good = stand_in(tmp_path / "before")
    set_behaviour(root, entries={"1": {"speed": 90.0, "manifest": NEWER}})
    control = f'[control]\nroot = "{good}"\n'
    told, night, _ = go(more=control)
    assert told.exit_code == 1
    cried = [f for f in night.findings if f.status == "confirmed"]
    assert {f.entry for f in cried} == {"a"}
    assert all("torch: 2.13.0 -> 2.14.0" in f.changed for f in cried)
    hint = "--commits 0123456789ab..ffffffffffff"
    assert all(any(hint in line for line in f.changed) for f in cried)
    text = (told.folder / "night.md").read_text()
    assert "Regressions and gates" in text and "torch: 2.13.0" in text
    assert "<failure" in (told.folder / "junit.xml").read_text()
    state = next(e for e in night.entries if e.name == "a")
    assert len(state.fresh) == len(state.control) >= 1
    assert calls(good) == ["run 1"] * len(state.control)
    labels = [(tmp_path / "r" / str(a.run) / "labels.json").exists() for a in state.control]
    assert not any(labels)  # the good version's figures are not the suite's

    accept(read_suite(tmp_path / "suite.toml"), Wish(series="a", reason="a safer kernel", pin=True))
    told, night, _ = go(more=control)
    assert told.exit_code == 0
    assert [f for f in night.findings if f.status == "confirmed" and f.direction == "worse"] == []


def test_a_passing_loss_is_refuted_and_not_cried(root: Path, four: None, go: Any) -> None:
    set_behaviour(root, entries={"1": {"speed": 90.0}})

    def recovered(line: str) -> None:
        set_behaviour(root)

    measure = measuring.measure

    def once(arguments: Any, attempt: Any, **named: Any) -> Any:
        done = measure(arguments, attempt, **named)
        if "seed=1" in attempt.arguments:
            recovered("")
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.nightly.measuring.measure", once)
        told, night, _ = go()
    assert told.exit_code == 0
    assert {f.status for f in night.findings} == {"refuted"}
    assert "Not shown again by fresh blocks" in (told.folder / "index.html").read_text()


def test_a_gate_that_is_not_kept_fails_the_night(root: Path, go: Any) -> None:
    gate = '[[gates]]\nmetric = "output_tokens_per_s"\nvariant = "baseline"\nmin = 200\n'
    told, night, _ = go(more=gate)
    assert told.exit_code == 1
    assert {g.status for g in night.gates if g.rule.startswith("output")} == {"fail"}
    assert all(e.fresh for e in night.entries)
    assert "not pinned as the baseline" in night.notes[0]


def test_the_step_summary_and_a_dead_webhook_cost_nothing(
    tmp_path: Path, root: Path, go: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("HOOK", "http://127.0.0.1:1/T0K3N")
    hook = '[webhook]\nurl_env = "HOOK"\nwhen = "always"\nretries = 0\n'
    told, _, said = go(more=hook)
    assert told.exit_code == 0
    assert summary.read_text().startswith("before\n# s, night of")
    assert any(line.startswith("webhook: not sent") for line in said)
    assert not any("T0K3N" in line for line in said)


def test_two_nightlies_at_once_are_one_too_many(tmp_path: Path, root: Path, go: Any) -> None:
    results = (tmp_path / "r").resolve()
    with folders.claimed(results, "s"), pytest.raises(UsageError, match="another nightly"):
        go()


def test_a_run_that_does_not_end_is_told(tmp_path: Path) -> None:
    with (
        folders.claimed(tmp_path, "s"),
        folders.running(tmp_path, "s", print),
        pytest.raises(UsageError, match="has not ended after 0 s; end its processes"),
        folders.running(tmp_path, "s", print, wait_s=0),
    ):
        pass
    with folders.running(tmp_path, "s", print, wait_s=0):
        pass


@pytest.mark.parametrize("moment", ["write_outputs", "send"])
def test_a_night_that_ends_before_it_is_told_is_told_by_the_next_call(
    tmp_path: Path, root: Path, go: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    hook = '[webhook]\nurl_env = "UNSET_HOOK"\nwhen = "always"'

    def killed(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(f"harness.nightly.story.{moment}", killed)
        with pytest.raises(OSError) as error:
            go(more=hook)
    assert exit_code_of(error.value) == 2
    told, night, said = go(more=hook)
    assert night.ended is not None and told.exit_code == 0
    assert len(list((tmp_path / "r" / "nightly" / "s").glob("2*"))) == 1
    assert calls(root) == ["run 1", "run 2"]  # nothing was measured twice
    assert "webhook: not sent, $UNSET_HOOK is not set" in said
    assert (told.folder / "index.html").exists()


@pytest.mark.parametrize("begun", [None, "yesterday", "2026-03-01T02:00:00"])
def test_a_broken_earlier_night_costs_itself_alone(root: Path, go: Any, begun: str | None) -> None:
    first, _, _ = go()
    file = first.folder / "night.json"
    told = {**json.loads(file.read_text()), "begun": begun, "ended": None}
    file.write_text("{" if begun is None else json.dumps(told))
    told, night, _ = go()
    assert told.exit_code == 0 and told.folder.name == f"{first.folder.name}.2"
    assert any(str(first.folder) in note for note in night.notes)
