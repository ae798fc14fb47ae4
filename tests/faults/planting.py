"""What every way of planting needs: the healthy case of a pair, and plugins written to a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.folders import Config, Tensors, edited
from faults.pair import PROMPTS, Pair
from faults.records import Plant, Planted

TESTS = Path(__file__).resolve().parents[1]


def healthy(pair: Pair, seed: int, *, count: int = PROMPTS, **more: Any) -> Planted:
    """The pair as it is, with `count` prompts of this seed."""
    return Planted(
        target=pair.target, drafter=pair.drafter, prompts=pair.prompts(seed, count)
    ).changed(**more)


def changed_drafter(
    change: Callable[[Config, Tensors, int, float], None],
    source: Callable[[Pair, Path, int], Path] | None = None,
) -> Plant:
    """Plants a drafter whose config and tensors `change(config, tensors, seed, severity)` spoils.

    `source`: which drafter it begins with; else the pair's own.
    """

    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        begin = source(pair, folder / "healthy", seed) if source else pair.drafter
        drafter = edited(
            begin,
            folder / "drafter",
            lambda config, tensors: change(config, tensors, seed, severity),
        )
        return healthy(pair, seed, drafter=begin).harmed(drafter=drafter)

    return plant


def write_plugin(folder: Path, module: str, function: str, **parameters: Any) -> str:
    """A file that calls `module.function(engine, **parameters)`; returns FILE.py:FUNCTION."""
    given = "".join(f", {name}={value!r}" for name, value in parameters.items())
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "plugin.py"
    file.write_text(
        "import sys\n\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n\n"
        "def plant(engine):\n"
        f"    from {module} import {function}\n\n"
        f"    {function}(engine{given})\n",
        encoding="utf-8",
    )
    return f"{file}:plant"
