"""Generate killed at random moments, and stopped by signals: nothing is lost, nothing doubled."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness_scripted import Seen, Step
from training_samples import FORGETFUL, target
from training_server import by_ids, prompts, running, said

from training.folders import stage_folder
from training.generate.text import read_text
from training.samples import read_samples

REPO = Path(__file__).resolve().parents[2]
COUNT = 60
Command = Callable[[Path], list[str]]


class Held:
    """Answers from the twentieth on wait while it is closed; `asked` are those that do."""

    FIRST = 20

    def __init__(self) -> None:
        self.closed, self.asked = False, set[int]()

    def answer(self, number: int, steps: Sequence[Step]) -> Iterator[Step]:
        while self.closed and number >= self.FIRST:
            self.asked.add(number)
            yield 0.02
        yield from steps


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def scripted(tmp_path: Path, held: Held) -> Iterator[tuple[Command, Seen]]:
    """The command of a stage that asks a scripted server, and what that server sees."""
    folder = target(tmp_path / "target", FORGETFUL)
    text = read_text(folder)
    asked = prompts(tmp_path / "prompts.jsonl", COUNT)

    def answer(number: int, body: dict[str, Any]) -> Any:
        return held.answer(number, by_ids(text, said(body), gap_s=0.005))

    with running(answer) as (url, seen):

        def command(out: Path) -> list[str]:
            sets = [f"target.path={folder}", f"workload.dataset={asked}", f"generate.url={url}"]
            sets += ["generate.engine=vllm", "generate.concurrency=2", "generate.shard_samples=7"]
            parts = [part for item in sets for part in ("--set", item)]
            return [sys.executable, "-m", "training", "generate", "--out", str(out), *parts]

        yield command, seen


def lines(out: Path) -> int:
    """Whole lines of all shards."""
    shards = stage_folder(out, "generate").glob("samples-*.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in shards)


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True)


def until(process: subprocess.Popen[str], out: Path, count: int) -> None:
    """Wait until so many samples are there, or the process has ended."""
    deadline = time.monotonic() + 600
    while process.poll() is None and lines(out) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill_and_resume(
    command: Command, tmp_path: Path, kills: int, seed: int, count: int = COUNT
) -> None:
    """Kill -9 after random numbers of samples, then finish; the same as an uninterrupted run."""
    rng = random.Random(seed)
    out, whole = tmp_path / "killed", tmp_path / "whole"
    for _ in range(kills):
        process = start(command(out))
        until(process, out, lines(out) + rng.randint(0, max(1, count // kills)))
        time.sleep(rng.random() * 0.02)  # anywhere within a sample, a write, a judgement
        process.kill()
        process.communicate()
    for folder in (out, whole):
        done = subprocess.run(command(folder), cwd=REPO, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    killed, uninterrupted = (stage_folder(folder, "generate") for folder in (out, whole))
    assert list(read_samples(killed)) == list(read_samples(uninterrupted))
    gates = [json.loads((folder / "gate.json").read_text()) for folder in (killed, uninterrupted)]
    assert gates[0] == gates[1] and gates[0]["passed"]
    ids = [one.id for one in read_samples(killed, dropped=True)]
    assert len(ids) == len(set(ids)) == lines(out) == count


def test_five_kills(scripted: tuple[Command, Seen], tmp_path: Path) -> None:
    kill_and_resume(scripted[0], tmp_path, kills=5, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 5))
def test_thirty_kills(scripted: tuple[Command, Seen], tmp_path: Path, seed: int) -> None:
    kill_and_resume(scripted[0], tmp_path, kills=30, seed=seed)


@pytest.mark.full
def test_kills_with_an_engine_that_the_stage_started(
    demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"SPEC_HARNESS_TEST={tmp_path}"
    monkeypatch.setenv(*mark.split("="))

    def command(out: Path) -> list[str]:
        sets = ["workload.num_prompts=40", "engine.threads=1", "generate.concurrency=4"]
        parts = [part for item in sets for part in ("--set", item)]
        return [sys.executable, "-m", "training", "generate", "--out", str(out), *parts]

    kill_and_resume(command, tmp_path, kills=8, seed=7, count=40)
    deadline = time.monotonic() + 60  # an engine notices that its starter is gone
    while left := _marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def _marked(mark: str) -> list[str]:
    """The processes that have `mark` in their environment, by number."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_with_one_line_and_all_samples_kept(
    scripted: tuple[Command, Seen], held: Held, tmp_path: Path, number: int
) -> None:
    command, seen = scripted
    held.closed = True
    process = start(command(tmp_path / "out"))
    until(process, tmp_path / "out", held.FIRST)
    while len(held.asked) < 2:  # both of the stage's requests
        time.sleep(0.002)
    os.kill(process.pid, number)
    said = process.communicate(timeout=300)[1].splitlines()
    held.closed = False
    assert process.returncode == 128 + number
    assert said[-1] == "training: what was finished is kept; run the same command again to go on"
    folder = stage_folder(tmp_path / "out", "generate")
    there = [one.id for one in read_samples(folder)]
    assert len(there) == held.FIRST and not (folder / "gate.json").exists()
    asked = len(seen.bodies)
    done = subprocess.run(command(tmp_path / "out"), cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{COUNT - len(there)} samples to go of {COUNT}" in done.stderr
    assert len([body for body in seen.bodies[asked:] if body]) == COUNT - len(there)
