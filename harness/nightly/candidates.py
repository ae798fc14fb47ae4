"""What a bisection chooses between: versions of an engine, or commits, each made ready to run.

A version is installed into an environment of its own, a commit of the harness is checked out into
a worktree, a commit of an engine's source is installed from one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from engines.catalog import adapter
from engines.install import environments_root, install_recipe
from engines.recipes import RECIPES, Recipe, Step
from harness.choose import choose_profile
from harness.errors import EngineFailure, UsageError, one_line
from harness.nightly.measuring import ROOT, Launch
from harness.nightly.suite import Entry, Loaded, hint, profile_of, sets_of
from harness.plan.load import build
from harness.prepare import Request, environment_of

VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,63}")
PIN = re.compile(r"([A-Za-z0-9._-]+)==([0-9A-Za-z.+!_-]+)")
COMMITS_MOST = 2000


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A list of candidates, the oldest first, and how one is made ready.

    `environment`: the engine environment that they go into; None: they are commits of the harness.
    `repo`: where the commits are; None: they are versions. `pins`: requirements, such as
    torch==2.11.0, that take the place of the recipe's own.
    """

    names: tuple[str, ...]
    environment: str | None = None
    repo: Path | None = None
    pins: tuple[str, ...] = ()


def versions(listed: str, environment: str, pins: Sequence[str]) -> Choice:
    """Engine versions with commas between them. Raises `UsageError`."""
    names = _listed("--versions", listed)
    for name in names:
        if not VERSION.fullmatch(name):
            raise UsageError(f"--versions: '{one_line(name, 40)}' is no version")
    if environment not in RECIPES:
        raise UsageError(
            f"--environment {environment}: no recipe of that name{hint(environment, list(RECIPES))}"
        )
    for pin in pins:
        if not PIN.fullmatch(pin):
            raise UsageError(f"--pin {one_line(pin, 60)}: write it as NAME==VERSION")
    return Choice(names=names, environment=environment, pins=tuple(pins))


def commits(listed: str, repo: Path, environment: str | None) -> Choice:
    """Commits: GOOD..BAD, or several with commas, as whole hashes. Raises `UsageError`."""
    if not (repo / ".git").exists():
        raise UsageError(f"--repo {repo}: no git repository")
    if ".." in listed:
        good, _, bad = listed.partition("..")
        first = _resolved(repo, good)
        told = _git(repo, "rev-list", "--reverse", "--first-parent", f"{first}..{bad.strip('.')}")
        names = (first, *told.split())
    else:
        names = tuple(_resolved(repo, name) for name in _listed("--commits", listed))
    if not 2 <= len(names) <= COMMITS_MOST:
        raise UsageError(
            f"--commits {one_line(listed, 80)}: {len(names)} commits; a good and a later bad one "
            f"are wanted, and at most {COMMITS_MOST}"
        )
    return Choice(names=names, environment=environment, repo=repo.resolve())


def environment_for(loaded: Loaded, entry: Entry) -> str:
    """The engine environment that an entry's engine is started in. Raises `UsageError`."""
    engine = entry.engine or "reference"
    request = Request(
        engines=(engine,), profile=profile_of(loaded, entry), sets=sets_of(loaded, entry)
    )
    source, _ = choose_profile(request, engine)
    plan = build(source, engine, list(request.sets))
    name = environment_of(adapter(engine), plan)
    if name is None:
        raise UsageError(
            f"{entry.name}: the engine {engine} has no environment of its own, and so no versions; "
            "give --commits"
        )
    return name


def ready(choice: Choice, name: str, trees: Path) -> Launch:
    """Make one candidate ready. Raises `EngineFailure`, `EngineFailed` or `EngineUsageError`."""
    if choice.environment is None:
        root = worktree(choice.repo or ROOT, name, trees)
        return Launch(root=root, environment={"SPEC_HARNESS_VENVS": str(environments_root())})
    if choice.repo is None:
        recipe = with_version(RECIPES[choice.environment], name, choice.pins)
        folder = environments_root() / ".venvs" / f"{choice.environment}@{name}"
    else:
        tree = worktree(choice.repo, name, trees)
        recipe = from_source(RECIPES[choice.environment], tree)
        folder = environments_root() / ".venvs" / f"{choice.environment}@{name[:12]}"
    python = install_recipe(recipe, folder) / "bin" / "python"
    variable = f"SPEC_HARNESS_PYTHON_{choice.environment.upper().replace('-', '_')}"
    return Launch(environment={variable: str(python)})


def with_version(recipe: Recipe, version: str, pins: Sequence[str] = ()) -> Recipe:
    """The recipe for another version of its engine, other requirements pinned as told."""
    package = recipe.report[0]
    wanted = dict(p.split("==", 1) for p in pins) | {package: version}
    old = next(
        (
            argument.partition("==")[2]
            for step in recipe.steps
            for argument in step.arguments
            if argument.startswith(f"{package}==")
        ),
        None,
    )

    def changed(step: Step) -> Step:
        if step.kind == "python":  # the check asks for the version by name
            told = (
                step.arguments if old is None else [a.replace(old, version) for a in step.arguments]
            )
            return replace(step, arguments=tuple(told))
        return replace(step, arguments=tuple(_pinned(a, wanted) for a in step.arguments))

    return replace(recipe, steps=tuple(changed(s) for s in recipe.steps))


def _pinned(argument: str, wanted: dict[str, str]) -> str:
    name, equals, _ = argument.partition("==")
    return f"{name}=={wanted[name]}" if equals and name in wanted else argument


def from_source(recipe: Recipe, tree: Path) -> Recipe:
    """The recipe with its engine installed from a source tree over the packaged one."""
    package = recipe.report[0]
    step = Step(
        title=f"install {package} from {tree.name}",
        kind="pip",
        arguments=("install", "--no-deps", "--force-reinstall", str(tree)),
    )
    module = package.partition("-")[0]
    check = replace(recipe.steps[-1], arguments=(f"import {module}",))
    return replace(recipe, steps=(*recipe.steps[:-1], step, check))


def worktree(repo: Path, commit: str, trees: Path) -> Path:
    """The commit's files in a folder of their own. Raises `EngineFailure`."""
    place = trees / commit[:12]
    if (place / ".git").exists():
        return place
    trees.mkdir(parents=True, exist_ok=True)
    try:
        _git(repo, "worktree", "prune")
        _git(repo, "worktree", "add", "--force", "--detach", str(place), commit)
    except UsageError as error:
        raise EngineFailure(str(error)) from None
    return place


def short(choice: Choice, name: str) -> str:
    """A candidate as it is told: a commit by its first letters and its subject."""
    if choice.repo is None:
        return name
    try:
        subject = _git(choice.repo, "log", "-1", "--format=%s", name)
    except UsageError:
        subject = ""
    return one_line(f"{name[:12]} {subject}", 100)


def _listed(option: str, listed: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(n.strip() for n in listed.split(",") if n.strip()))
    if len(names) < 2:
        raise UsageError(f"{option}: give two or more, the good one first and the bad one last")
    return names


def _resolved(repo: Path, name: str) -> str:
    return _git(repo, "rev-parse", "--verify", "--end-of-options", f"{name.strip()}^{{commit}}")


def _git(repo: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(repo), *arguments], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UsageError(f"git: {error.strerror}; install it") from None
    if done.returncode != 0:
        said = one_line(done.stderr or "it failed", 200)
        raise UsageError(f"{repo}: git {arguments[0]}: {said}")
    return done.stdout.strip()
