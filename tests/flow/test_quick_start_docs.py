"""The commands of docs/quick-start.md that need no GPU and no model: they run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quick-start.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.S | re.M)
SEEN = ("With this drafter, reference is", "draft tokens accepted; output", "Why: ", "Start-up, ")


@pytest.mark.full
def test_its_commands_run_and_print_what_the_page_tells(
    repo: Path, demo_pair: Path, tmp_path: Path
) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(repo), "PATH": path}
    told: list[str] = []
    for block in BLOCKS:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        told.append(done.stdout)
    runs = [p for p in (tmp_path / "results").iterdir() if (p / "summary.json").is_file()]
    assert len(runs) == 2
    for run in runs:
        assert run.name in told[1]
        assert (run / "report.html").is_file() and (run / "report.md").is_file()
    assert Path(told[0].splitlines()[-1]) in runs
    plain = " ".join(told[0].split())
    for words in SEEN:
        assert words in plain and words.strip() in TEXT
