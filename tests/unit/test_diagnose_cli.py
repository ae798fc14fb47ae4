"""The command line of a diagnosis: what it refuses before any work, and its help."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness import cli
from harness.cli_diagnose import lines_of, telling_how_to_go_on
from harness.diagnose.catalogue import EXPERIMENTS
from harness.diagnose.mend import Change, Mended
from harness.errors import UsageError

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.diagnose.subjects.case_of", work)
    monkeypatch.setattr("harness.diagnose.selftest.run", work)


def refused(*words: str) -> str:
    """The one line that a mistake ends with."""
    done = CliRunner().invoke(cli.app, ["diagnose", *words])
    assert isinstance(done.exception, UsageError), done
    said = str(done.exception)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("run",), "RUN"),
        (("--fix", "d"), "--fix"),
        (("--url", "http://127.0.0.1:1"), "--url"),
        (("--set", "speculative.k=3"), "--set"),
        (("--profile", "demo"), "--profile"),
        (("--prompts", "12"), "--prompts"),
        (("--trained-target", "d"), "--trained-target"),
        (("--trained-on", "d"), "--trained-on"),
        (("--skip", "audit"), "--skip"),
        (("--thorough",), "--thorough"),
        (("--json",), "--json"),
    ],
)
def test_what_the_self_test_would_not_hear_is_refused(words: tuple[str, ...], shown: str) -> None:
    assert refused("--self-test", *words).startswith(f"{shown}: not with --self-test")


@pytest.mark.parametrize(
    "words",
    [("--seeds", "3"), ("--first-seed", "3"), ("--limit-minutes", "2"), ("--write",)],
)
def test_what_is_of_the_self_test_alone_is_refused_without_it(words: tuple[str, ...]) -> None:
    assert refused(*words) == f"{words[0]}: is of the self-test; add --self-test"


@pytest.mark.parametrize("minutes", ["nan", "inf", "-inf", "-1", "0"])
def test_a_limit_is_a_number_of_minutes(minutes: str) -> None:
    said = refused("--self-test", "--limit-minutes", minutes)
    assert said == f"--limit-minutes {minutes}: give a number of minutes above 0"


@pytest.mark.parametrize("more", [(), ("--self-test",)])
@pytest.mark.parametrize("out", ["/proc/x", "/proc", "file/in"])
def test_a_place_that_cannot_be_written_is_refused_first(out: str, more: tuple[str, ...]) -> None:
    Path("file").write_text("x", encoding="utf-8")
    said = refused("--out", out, *more)
    assert said.startswith(f"--out {out}: ") and said.endswith("; choose another")
    assert [p.name for p in Path().iterdir()] == ["file"]


def test_the_check_leaves_nothing_behind() -> None:
    done = CliRunner().invoke(cli.app, ["diagnose", "--out", "made"])
    assert isinstance(done.exception, AssertionError)
    assert list(Path().iterdir()) == []


def test_help_lists_the_experiments_and_what_is_diagnosed() -> None:
    done = CliRunner().invoke(cli.app, ["diagnose", "--help"], env={"COLUMNS": "80"})
    listed = done.output.partition("Experiments:")[2].splitlines()
    assert [line.split()[0] for line in listed if line[2:3].isalpha()][:10] == list(EXPERIMENTS)
    told = " ".join(done.output.split())
    assert "Needs sampling.temperature above 0" in told
    assert "RUN: what it served" in told and "--set target.path=DIR --set drafter.path=DIR" in told
    assert "--debug" in told


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['harness', 'diagnose', '--help']\nfrom harness.cli import main\n"
    )
    code += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    code += "print(sorted({'torch', 'numpy', 'pyarrow', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_with_what_to_do(number: int) -> None:
    with pytest.raises(UsageError) as told, telling_how_to_go_on():
        raise OSError(number, os.strerror(number), "/out/x.json")
    said = str(told.value)
    assert said.startswith("/out/x.json: cannot be written: ")
    assert said.endswith("make room, then give the same command again: what was found is kept")


def test_the_page_is_told_what_was_mended_or_why_nothing_was() -> None:
    assert lines_of("--fix: the cause is in the engine") == [
        "not mended: the cause is in the engine"
    ]
    change = Change(cause="layers_shifted", changes=("aux_layers: 2 becomes 3",))
    done = Mended(changes=(change,), drafter="/d", before=0.2, expected=0.6, after=0.6, proven=True)
    lines = lines_of(done)
    assert lines[0].startswith("mended: ") and lines[0].endswith(": aux_layers: 2 becomes 3")
    assert lines[1:] == [
        "--set drafter.path=/d",
        "proven: 20.0% of the drafts were accepted, now 60.0%, where 60.0% is expected",
    ]


def test_a_full_disk_under_a_checkpoint_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As safetensors tells it: with an error of its own, that is no `OSError`."""
    from safetensors import SafetensorError

    full = SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )
    with pytest.raises(UsageError) as told, telling_how_to_go_on():
        raise full
    assert "No space left on device" in str(told.value)
    assert str(told.value).endswith(
        "make room, then give the same command again: what was found is kept"
    )
    with pytest.raises(SafetensorError, match="header"), telling_how_to_go_on():
        raise SafetensorError("Error while deserializing header")
