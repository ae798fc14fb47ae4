"""The command line against scripted servers."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
ENGINE = Path(__file__).with_name("scripted_engine.py")
Start = Callable[..., str]


def harness(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=REPO, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def measured(test: Callable[..., None]) -> Callable[..., None]:
    """Try it again, up to four times: a test of figures, which this machine's other work spoils.

    Each try has a folder of its own in `tmp_path`.
    """

    @functools.wraps(test)
    def tried(*, tmp_path: Path, **given: Any) -> None:
        for left in (3, 2, 1, 0):
            folder = tmp_path / f"tries-left-{left}"
            folder.mkdir()
            try:
                test(tmp_path=folder, **given)
                break
            except AssertionError:
                if not left:
                    raise

    return tried
