"""The command line's own manners: what it prints, and to where it can be printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engines.base import EngineFailed
from harness import cli
from harness.ending import tell_engine_failure

REPO = Path(__file__).resolve().parents[2]


def test_nothing_of_a_log_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tell_engine_failure(EngineFailed("died: \x1b[2J\x07boom\nx", tail=("a\x1b[31m\tb", "ü")))
    shown = capsys.readouterr().err
    assert shown == "harness: died: [2J boom x\n  | a [31m b\n  | ü\n"


def test_a_narrow_terminal_costs_no_run() -> None:
    code = "from harness import cli; import sys; sys.argv = ['h', 'engines', 'list']\n"
    code += "from harness.cli import main\n"
    code += "import engines.install; engines.install.state = lambda name: 'en \\u2013 dash'\nmain()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=REPO
    )
    assert done.returncode == 0, done.stderr
    assert "en ? dash" in done.stdout


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (15, "terminated")])
def test_a_signal_before_anything_is_measured_is_one_line(
    number: int, word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(name: str) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("harness.show.read_profile", stop)
    monkeypatch.setattr(sys, "argv", ["harness", "engines", "show"])
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as left:
            cli.main()
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert left.value.code == 128 + number
    assert capsys.readouterr().err == f"harness: {word}\n"


def help_of(*words: str) -> str:
    """The help of a subcommand, on one line."""
    from typer.testing import CliRunner

    done = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": "100"})
    assert done.exit_code == 0
    return " ".join(done.output.split())


COMMANDS = (
    ("run",), ("capacity",), ("resume",), ("analyse",), ("report",), ("calibrate",), ("doctor",),
    ("engines", "list"), ("engines", "show"), ("engines", "install"), ("compare",), ("diagnose",),
)  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS)
def test_help_is_in_the_words_of_the_documentation(words: tuple[str, ...]) -> None:
    text = help_of(*words)
    options = text.partition("Options:")[2]
    assert not re.search(r"<[a-z]", options.replace("<=x", "")), "a Python type"
    assert not re.search(r"[{}]", text)
    assert "--debug" in text


def test_help_tells_what_is_required_and_what_is_the_default() -> None:
    text = help_of("capacity")
    assert "--slo LEVELS Service levels, such as ttft=0.2,tpot=50ms. Required, here or in" in text
    assert "Default: as few as" in text and "capacity.json" in text
    assert " resume [OPTIONS] RUN " in help_of("resume")
    assert " report [OPTIONS] RUN… " in help_of("report")
    assert " diagnose [OPTIONS] [RUN] " in help_of("diagnose")
