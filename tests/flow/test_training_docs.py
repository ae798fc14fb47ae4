"""The commands of docs/training.md: they run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from training.plan import plan_names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def commands() -> list[str]:
    """The lines of the page's bash blocks, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_the_page_names_every_plan() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in plan_names():
        assert f"`{name}`" in text


@pytest.mark.full
def test_the_commands_run_as_they_stand(repo: Path, demo_pair: Path, tmp_path: Path) -> None:
    assert len(commands()) >= 8
    env = {**os.environ, "PYTHONPATH": str(repo)}
    for line in commands():
        words = [sys.executable, *shlex.split(line)[1:]]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        print(line, done.stdout, sep="\n")
