"""An engine's own virtual environment: made step by step, checked by importing, found.

Engines pin their own builds of torch, so each lives in `<root>/.venvs/<name>`. A step that is
done leaves a stamp named after the recipe up to it, so that an interrupted install goes on where
it stopped and a changed recipe runs again; the last stamp is set only after the check, which
really imports the engine. An environment made by hand is adopted if it passes that check.
Where packages come from is the user's own pip configuration.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engines.base import EngineFailed, EngineUsageError
from engines.console import run_step
from engines.recipes import RECIPES, Recipe, Step

STAMPS = ".spec-harness"


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
    """The Python that runs the engine environment `name`.

    $SPEC_HARNESS_PYTHON_<NAME> (upper case, `_` for `-`) names one that was made otherwise.
    Raises `EngineUsageError` where it is missing or its install was not finished.
    """
    override = os.environ.get(f"SPEC_HARNESS_PYTHON_{name.upper().replace('-', '_')}")
    if override:
        if not os.access(override, os.X_OK):
            raise EngineUsageError(f"{override}, set as the Python of {name}, cannot be run")
        return Path(override)
    folder = environments_root() / ".venvs" / name
    python = folder / "bin" / "python"
    missing = "is not installed" if not python.exists() else None
    if missing is None and (folder / STAMPS).is_dir() and not _is_ready(RECIPES.get(name), folder):
        missing = "is only half installed"
    if missing is not None:
        how = (
            f"run `python -m harness engines install {name}`"
            if name in RECIPES
            else f"run `python3 -m venv {folder} && {python} -m pip install {name}`"
        )
        raise EngineUsageError(f"the engine environment {name} {missing} ({folder}): {how}")
    return python


def install(name: str, *, root: Path | None = None) -> Path:
    """Make or complete the environment `name` and return its folder; progress on stderr.

    Raises `EngineUsageError` for an unknown name or too small a disk, `EngineFailed` (with the
    log's path) where a step fails.
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise EngineUsageError(
            f"no recipe for the engine environment {name!r}: known are {', '.join(RECIPES)}"
        )
    return install_recipe(recipe, (root or environments_root()).absolute() / ".venvs" / name)


def install_recipe(recipe: Recipe, folder: Path) -> Path:
    """`install` for a recipe of one's own, such as another version's, in a folder of its own."""
    name = folder.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{name}-install.log"
    with _lock(folder.parent / f"{name}.lock"):
        if _is_ready(recipe, folder) and not _broken(folder):
            _say(f"{name} is installed already: {folder}")
        elif _adopt(recipe, folder, log):
            _say(f"{name}: found complete and adopted: {folder}")
        else:
            _check_disk(recipe, folder)
            _run_steps(recipe, folder, log)
        found = package_versions(folder / "bin" / "python", recipe.report)
        _say(f"{name}: " + ", ".join(f"{k} {v}" for k, v in found.items()))
    return folder


def versions(name: str, *, root: Path | None = None) -> dict[str, str]:
    """Versions of the packages that matter in the environment `name`; empty if it has none."""
    folder = (root or environments_root()).absolute() / ".venvs" / name
    wanted = RECIPES[name].report if name in RECIPES else ()
    return package_versions(folder / "bin" / "python", wanted)


def package_versions(python: Path, wanted: Sequence[str]) -> dict[str, str]:
    """Versions of those of the packages that a Python's environment holds; empty if it fails."""
    code = (
        "import contextlib, importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    with contextlib.suppress(m.PackageNotFoundError):\n"
        "        found[name] = m.version(name)\n"
        "print(json.dumps(found))"
    )
    try:
        told = subprocess.run(
            [python, "-I", "-c", code, *wanted],
            capture_output=True,
            text=True,
            timeout=120,
        )
        return dict(json.loads(told.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}


def state(name: str, *, root: Path | None = None) -> str:
    """`ready`, `incomplete` or `missing`; an environment not yet checked is `unchecked`."""
    folder = (root or environments_root()).absolute() / ".venvs" / name
    if not (folder / "bin" / "python").exists():
        return "missing"
    if _is_ready(RECIPES.get(name), folder):
        return "ready"
    return "incomplete" if (folder / STAMPS).is_dir() else "unchecked"


def _run_steps(recipe: Recipe, folder: Path, log: Path) -> None:
    number = len(recipe.steps)
    for index, step in enumerate(recipe.steps):
        stamp = _stamp(recipe, index, folder)
        # A stamped environment whose Python is gone (an upgraded system) starts anew.
        if stamp.is_file() and not (index == 0 and _broken(folder)):
            continue
        _say(f"{recipe.name}: step {index + 1} of {number}: {step.title}")
        run_step(recipe.name, step, _command(step, folder), _step_env(step), log)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    _say(f"{recipe.name}: installed in {folder}")


def _adopt(recipe: Recipe, folder: Path, log: Path) -> bool:
    """Whether an environment without stamps passes the check; if so it gets them all."""
    if (folder / STAMPS).is_dir() or not (folder / "bin" / "python").exists():
        return False
    check = recipe.steps[-1]
    _say(f"{recipe.name}: found without an install record, checking it")
    try:
        run_step(recipe.name, check, _command(check, folder), _step_env(check), log)
    except EngineFailed:
        _say(f"{recipe.name}: the check failed, installing over it")
        return False
    for index in range(len(recipe.steps)):
        stamp = _stamp(recipe, index, folder)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    return True


def _command(step: Step, folder: Path) -> list[str]:
    python = str(folder / "bin" / "python")
    if step.kind == "venv":
        # --clear: what is left of an interrupted attempt, or of another Python, must not stay.
        return [sys.executable, "-m", "venv", "--clear", str(folder)]
    if step.kind == "pip":
        return [python, "-m", "pip", *step.arguments]
    return [python, "-c", *step.arguments]


def _step_env(step: Step) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env.update(PYTHONUNBUFFERED="1", PIP_DISABLE_PIP_VERSION_CHECK="1", **dict(step.env))
    kernels = Path(__file__).with_name("sglang_cpu")
    if step.needs_cpu_kernels and kernels.is_dir():
        env["PYTHONPATH"] = str(kernels)
    return env


def _stamp(recipe: Recipe, index: int, folder: Path) -> Path:
    """The stamp of step `index`: its name changes with any step up to it."""
    told = repr(recipe.steps[: index + 1]).encode()
    return folder / STAMPS / f"{index + 1}-{hashlib.sha256(told).hexdigest()[:16]}"


def _is_ready(recipe: Recipe | None, folder: Path) -> bool:
    return recipe is not None and _stamp(recipe, len(recipe.steps) - 1, folder).is_file()


def _broken(folder: Path) -> bool:
    """Whether the environment's Python does not run (its base was removed, say)."""
    try:
        run = subprocess.run(
            [folder / "bin" / "python", "-I", "-c", "pass"], capture_output=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return run.returncode != 0


def _check_disk(recipe: Recipe, folder: Path) -> None:
    free_gib = shutil.disk_usage(folder.parent).free / 2**30
    if free_gib < recipe.disk_gib:
        raise EngineUsageError(
            f"{recipe.name} needs about {recipe.disk_gib:g} GiB and {folder.parent} has "
            f"{free_gib:.1f} GiB free: make room, or set SPEC_HARNESS_VENVS to another folder"
        )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One install of an environment at a time; the kernel drops the lock of a killed one."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another install of this environment is running: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
