"""The command line against scripted servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
ENGINE = Path(__file__).with_name("scripted_engine.py")
Start = Callable[..., str]


def harness(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=REPO, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
