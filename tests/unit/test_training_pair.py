"""The pair's folder: keys, the lock, and that nothing half made is ever picked up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from training.demo import pair
from training.demo.config import DrafterConfig, TargetConfig

TARGET, MLA, LLAMA = TargetConfig(), DrafterConfig(kind="mla"), DrafterConfig(kind="llama")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for the trainings, minutes long in truth; returns the list of what was built."""
    from training.demo import build

    made: list[str] = []

    def target(config: TargetConfig, folder: Path) -> dict[str, Any]:
        made.append("target")
        (folder / "target").mkdir()
        (folder / "target" / "model.safetensors").write_text("weights")
        (folder / "prompts.jsonl").write_text("{}\n")
        return {"seconds": 1}

    def drafter(_t: TargetConfig, d: DrafterConfig, _p: Path, folder: Path) -> dict[str, Any]:
        made.append(d.kind)
        (folder / "model.safetensors").write_text(d.kind)
        return {"seconds": 1}

    monkeypatch.setattr(build, "build_target", target)
    monkeypatch.setattr(build, "build_drafter", drafter)
    return made


def test_a_missing_drafter_is_added_without_a_new_target(tmp_path: Path, builds: list[str]) -> None:
    assert pair.find(TARGET, MLA, tmp_path) is None
    folder = pair.make(TARGET, MLA, tmp_path)
    assert folder == pair.find(TARGET, MLA, tmp_path) == pair.pair_folder(TARGET, tmp_path)
    assert pair.find(TARGET, LLAMA, tmp_path) is None
    assert pair.make(TARGET, LLAMA, tmp_path) == pair.make(TARGET, MLA, tmp_path) == folder
    assert builds == ["target", "mla", "llama"]
    assert set(json.loads((folder / "pair.json").read_text())["drafters"]) == {"mla", "llama"}


def test_a_drafter_of_other_code_is_replaced(tmp_path: Path, builds: list[str]) -> None:
    folder = pair.make(TARGET, MLA, tmp_path)
    (folder / "drafter-mla" / "build.json").write_text('{"key": "another"}')
    assert pair.find(TARGET, MLA, tmp_path) is None
    pair.make(TARGET, MLA, tmp_path)
    assert builds == ["target", "mla", "mla"]
    assert pair.find(TARGET, MLA, tmp_path) == folder


def test_an_interrupted_training_leaves_nothing(
    tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from training.demo import build

    def stopped(_config: TargetConfig, folder: Path) -> dict[str, Any]:
        (folder / "target").mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "build_target", stopped)
        with pytest.raises(KeyboardInterrupt) as interruption:
            pair.make(TARGET, MLA, tmp_path)
    assert interruption.value.__notes__[0].startswith(
        "the demo's target was not finished and nothing of it is kept"
    )
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    pair.make(TARGET, MLA, tmp_path)
    assert pair.find(TARGET, MLA, tmp_path)


def test_an_interrupted_drafter_leaves_the_target_and_says_so(
    tmp_path: Path,
    builds: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from harness.ending import Stopped, Terminated
    from training.demo import build
    from training.ending import training_exit_code

    def stopped(*_given: object) -> dict[str, Any]:
        raise Terminated(signal.SIGTERM)

    monkeypatch.setattr(build, "build_drafter", stopped)
    with pytest.raises(Terminated) as interruption:
        pair.make(TARGET, MLA, tmp_path)
    assert pair.target_ready(pair.pair_folder(TARGET, tmp_path))
    assert training_exit_code(Stopped(interruption.value)) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.splitlines() == [
        "training: terminated",
        "training: the demo's target is kept, its drafter was not finished and is not; the same "
        "command makes the drafter from the beginning",
    ]


def test_leftovers_of_a_killed_training_are_cleared(tmp_path: Path, builds: list[str]) -> None:
    folder = pair.pair_folder(TARGET, tmp_path)
    left = tmp_path / f".{folder.name}.{folder.name}.partial" / "target"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    pair.make(TARGET, MLA, tmp_path)
    assert (folder / "target" / "model.safetensors").read_text() == "weights"
    assert not left.exists()


def test_two_callers_build_once(tmp_path: Path, builds: list[str]) -> None:
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(pair.make(TARGET, MLA, tmp_path)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert builds == ["target", "mla"]
    assert len(made) == 3
    assert len(set(made)) == 1


def test_keys_follow_what_makes_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair.target_key(TARGET), pair.drafter_key(TARGET, MLA)
    assert pair.target_key(msgspec.structs.replace(TARGET, steps=1)) != target
    other = msgspec.structs.replace(MLA, steps=1)
    assert pair.drafter_key(TARGET, other) != drafter
    monkeypatch.setattr(pair, "_DRAFTER_SOURCES", pair._DRAFTER_SOURCES[:-1])
    assert pair.target_key(TARGET) == target
    assert pair.drafter_key(TARGET, MLA) != drafter


def test_the_digest_sees_code_and_not_words(tmp_path: Path) -> None:
    files = [tmp_path / name / "x.py" for name in "abc"]
    texts = ('"""Doc."""\nx = 1  # one\n', '"""Other."""\n\nx = 1\n', '"""Doc."""\nx = 2\n')
    for file, text in zip(files, texts, strict=True):
        file.parent.mkdir()
        file.write_text(text)
    plain, reworded, changed = (pair.source_digest([file]) for file in files)
    assert plain == reworded != changed


def test_every_source_named_exists() -> None:
    for name in (*pair._TARGET_SOURCES, *pair._DRAFTER_SOURCES):
        assert (pair._ROOT / name).is_file(), name


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(pair.PairError, match="set XDG_CACHE_HOME"):
        pair.make(TARGET, MLA, tmp_path / "file")


def run(*args: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "training", *args],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def test_which_prints_the_path_and_fails_if_missing(tmp_path: Path, builds: list[str]) -> None:
    missing = run("demo", "--which", cache=tmp_path)
    assert missing.returncode == 1
    folder = pair.pair_folder(TARGET, tmp_path / "spec-harness")
    assert missing.stdout.strip() == str(folder)
    pair.make(TARGET, MLA, tmp_path / "spec-harness")
    found = run("demo", "--which", cache=tmp_path)
    assert (found.returncode, found.stdout.strip()) == (0, str(folder))
    assert run("demo", "--which", "--drafter", "llama", cache=tmp_path).returncode == 1
    again = run("demo", cache=tmp_path)
    assert again.stdout.strip().splitlines()[-1] == str(folder)


def test_an_unknown_kind_is_a_usage_error(tmp_path: Path) -> None:
    result = run("demo", "--target", "mamba", cache=tmp_path)
    assert result.returncode == 2
    assert "mamba" in result.stderr and "Traceback" not in result.stderr


def test_help_imports_no_torch() -> None:
    code = "import sys; import training.__main__; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_killed_while_training_leaves_no_pair(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "training", "demo"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "step" in line and "loss" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(300)
    process.stderr.close()
    time.sleep(0.1)
    assert pair.find(TARGET, MLA, tmp_path / "spec-harness") is None
    assert run("demo", "--which", cache=tmp_path).returncode == 1
