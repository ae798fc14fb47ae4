"""Plugins of the embedded engine that make its answers last, so that a test surely comes between.

Which folder of runs is looked at stands in the environment; without it nothing is slow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUNS = "SLOW_ENGINE_RUNS"
STEP_S = 0.5


def option(plugin: str) -> list[str]:
    """The words of `run` that plant it."""
    return ["--set", f'engine.extra_args=["--plugin", "{__file__}:{plugin}"]']


def from_the_first(engine: Any) -> None:
    """Every step takes half a second."""
    _slow(engine, lambda runs: True)


def once_a_cell_is_saved(engine: Any) -> None:
    """The first cell goes as fast as it can, the next takes minutes."""
    _slow(engine, lambda runs: any(runs.glob("*/cells/[!.]*/timeline.json")))


def _slow(engine: Any, when: Callable[[Path], bool]) -> None:
    runs, inner = os.environ.get(RUNS), engine.step

    def step() -> None:
        if runs and engine.running and when(Path(runs)):
            time.sleep(STEP_S)
        inner()

    engine.step = step
