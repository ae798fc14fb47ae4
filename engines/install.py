"""An engine's own virtual environment: made, checked, found."""

from __future__ import annotations

import os
from pathlib import Path

from engines.base import EngineUsageError


def environments_root() -> Path:
    """Where `.venvs/` lies: $SPEC_HARNESS_VENVS, else the checkout, else the cache folder."""
    chosen = os.environ.get("SPEC_HARNESS_VENVS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return checkout
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "spec-harness"


def engine_python(name: str) -> Path:
    """The Python of the environment `name`. Raises `EngineUsageError` where it is missing."""
    override = os.environ.get(f"SPEC_HARNESS_PYTHON_{name.upper().replace('-', '_')}")
    python = Path(override) if override else environments_root() / ".venvs" / name / "bin/python"
    if not python.exists():
        raise EngineUsageError(
            f"the engine environment {name} is not installed ({python} is missing): run "
            f"`python -m harness engines install {name}`"
        )
    return python
