"""`python -m training evaluate` of a drafter from elsewhere, in the reference engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from training.__main__ import app
from training.ending import training_exit_code


def evaluate(repo: Path, pair: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training", "evaluate", "--plan", "demo"]
    command += ["--drafter", str(pair / "drafter-mla"), "--out", str(out)]
    command += ["--set", "evaluate.prompts=4", *more]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True)


def test_the_reference_engine_accepts_what_is_expected_to_the_draft(
    repo: Path, demo_pair: Path, tmp_path: Path
) -> None:
    out = tmp_path / "evaluation"
    done = evaluate(repo, demo_pair, out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(out)
    assert "as expected, to the draft" in done.stdout
    result = json.loads((out / "evaluation.json").read_text())
    offline, reference = result["rows"]
    for key in ("drafts", "rate", "length", "per_position"):
        assert offline[key] == reference[key]
    assert offline["length"] > 1.5
    assert reference["same_outputs"] == reference["answered"] == 4
    walked = {a["prompt_id"]: a for a in result["offline"]["answers"]}
    for answer in result["online"][0]["answers"]:
        expected = walked[answer["prompt_id"]]
        assert answer["token_ids"] == expected["token_ids"]
        for key in ("drafts", "accepted", "per_position"):
            assert answer["counts"][key] == expected["counts"][key]
    again = evaluate(repo, demo_pair, out, "--json")
    assert again.returncode == 0 and "finished already" in again.stderr
    assert json.loads(again.stdout)["passed"] is True
    other = evaluate(repo, demo_pair, out, "--set", "evaluate.k=2")
    assert other.returncode == 2
    assert other.stderr.splitlines()[-1].startswith("training: ")
    assert "evaluate.k 3 -> 2" in other.stderr


def test_an_engine_in_bfloat16_has_an_expectation_too(
    repo: Path, demo_pair: Path, tmp_path: Path
) -> None:
    out = tmp_path / "evaluation"
    # Few drafts: what is looked at is that both are counted, and lie near each other.
    sets = ("engine.dtype=bfloat16", "evaluate.largest_gap=0.2")
    done = evaluate(repo, demo_pair, out, *(word for one in sets for word in ("--set", one)))
    assert done.returncode == 0, done.stderr
    offline, reference = json.loads((out / "evaluation.json").read_text())["rows"]
    assert offline["length"] > 1.5 and reference["length"] > 1.5


@pytest.mark.full
@pytest.mark.parametrize(("length", "verdict"), [("4", "TOO HIGH"), ("1", "TOO LOW")])
def test_an_engine_that_accepts_what_it_should_not_fails_the_gate(
    repo: Path, demo_pair: Path, tmp_path: Path, length: str, verdict: str
) -> None:
    forced = f"engine.extra_args=--forced-length,{length}"
    done = evaluate(repo, demo_pair, tmp_path / "out", "--set", forced)
    assert done.returncode == 1, done.stderr
    assert verdict in done.stdout and "the gate did not pass" in done.stdout
    assert "|offline - online|" in done.stderr.splitlines()[-1]


def test_mistakes_are_one_line(
    demo_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command: Any = typer.main.get_command(app)
    out = tmp_path / "out"
    words = ["evaluate", "--plan", "demo", "--drafter", str(demo_pair / "drafter-mla")]
    for more, said in (
        (("--engine", "openai"), "give its --url"),
        (("--engine", "trtllm"), "evaluate.engines"),
        (("--drafter", str(tmp_path)), "config.json"),
    ):
        with pytest.raises(Exception) as error:
            command(args=[*words, "--out", str(out), *more], standalone_mode=False)
        capsys.readouterr()
        assert training_exit_code(error.value) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("training: ") and said in line
    assert not (out / "evaluation.json").exists()
