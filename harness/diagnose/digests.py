"""What a case of the self-test that is kept depends on, as digests of the code."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from harness.diagnose.planted import CHECKOUT, Case

PACKAGE, LIBRARY = Path(__file__).parent, "faults"


def code_digest(case: Case) -> str:
    """`evidence-rules`: what finds the evidence and plants this case, and what judges it."""
    evidence = {
        *PACKAGE.glob("experiments/*.py"),
        PACKAGE / "readings.py",
        PACKAGE / "records.py",
        *_reached(frozenset(_modules(case.plant))),
    }
    rules = {*PACKAGE.glob("rules/**/*.py"), PACKAGE / "verdict.py", PACKAGE / "causes.toml"}
    return "-".join(_digest(frozenset(files)) for files in (evidence, rules))


def mending_digest() -> str:
    """What mends a case, and holds it against what is expected then."""
    names = ("mend.py", "restored.py", "remedies.py")
    return _digest(frozenset(PACKAGE / name for name in names))


def _modules(plant: Any) -> Iterator[str]:
    """The modules of the functions that a planting is made of: its own, and what it closes over."""
    seen: set[int] = set()
    todo = [plant]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            yield one.__module__
            todo += [cell.cell_contents for cell in one.__closure__ or ()]
        elif hasattr(one, "plant"):  # a fault, of two at once
            todo.append(one.plant)


@functools.cache
def _reached(modules: frozenset[str]) -> frozenset[Path]:
    """The library's files of these modules, and of all that they import or name."""
    found: set[Path] = set()
    todo = [file for name in modules for file in _files(name)]
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            todo += _named(file)
    return frozenset(found)


@functools.cache
def _named(file: Path) -> tuple[Path, ...]:
    """The library's files that a file imports, or names in a string, as it does its hooks."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update((str(node.module), *(f"{node.module}.{a.name}" for a in node.names)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return tuple(sorted(found for name in names for found in _files(name)))


def _files(name: str) -> Iterator[Path]:
    """The file of a module of the library, all of them of a package; none of any other name."""
    parts = name.split(".")
    if parts[0] != LIBRARY or len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return
    place = CHECKOUT.joinpath("tests", *parts)
    yield from place.glob("*.py")
    if place.with_suffix(".py").is_file():
        yield place.with_suffix(".py")


@functools.cache
def _digest(files: frozenset[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:12]
