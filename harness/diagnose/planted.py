"""The cases of the self-test: what of the checkout's tests is planted, and in which order."""

from __future__ import annotations

import fnmatch
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.diagnose.causes import NONE
from harness.errors import UsageError

CHECKOUT = Path(__file__).resolve().parents[2]
Kind = Literal["fault", "healthy", "compound"]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One planting to be diagnosed. `right`: the causes that are right answers.

    `parts`: of two faults at once the right answers of each. `mends`: `--fix` is tried of it, which
    takes as long as a diagnosis: the first seed's. `mendable`: it has to restore it.
    """

    name: str
    kind: Kind
    what: str
    pair: Literal["mla", "llama"]
    plant: Any
    seed: int
    severity: float
    right: tuple[str, ...]
    cause: str
    emulated: bool = False
    weight: float = 0.0
    parts: tuple[tuple[str, ...], ...] = ()
    mends: bool = False
    mendable: bool = False


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for. `write`: keep the matrix of all that is done in docs/.

    `seeds`: so many, from `first_seed` on; healthy variants and pairs of faults have the first.
    """

    engine: str = "reference"
    only: tuple[str, ...] = ("*",)
    seeds: int = 3
    first_seed: int = 0
    out: Path = Path("results") / "self-test"
    limit_minutes: float | None = None
    write: bool = False


def library() -> Any:
    """The module of faults in this checkout. Raises `UsageError` where there is none."""
    tests = CHECKOUT / "tests"
    if not (tests / "faults" / "library.py").is_file():
        raise UsageError(
            f"--self-test: there is no {tests / 'faults'}; it works in a checkout of the sources"
        )
    if str(tests) not in sys.path:
        sys.path.insert(0, str(tests))
    return importlib.import_module("faults.library")


def cases_of(wanted: Wanted) -> list[Case]:
    """The cases in the order that they are made: what is cheap, and the first seed of all, first.

    `only` are patterns of a case's name, or of its fault's.
    """
    found = library()
    cases = [
        *_fault_cases(found, wanted),
        *_healthy_cases(found, wanted),
        *(_compound_cases(found, wanted) if wanted.engine == "reference" else ()),
    ]
    chosen = [
        case
        for case in cases
        if any(fnmatch.fnmatch(n, p) for n in (case.name, case.what) for p in wanted.only)
    ]
    if not chosen:
        names = ", ".join(sorted({case.what for case in cases})[:8])
        raise UsageError(f"--only {' '.join(wanted.only)}: no such case; there are {names}, …")
    return sorted(chosen, key=lambda case: (case.seed, case.weight, case.kind == "compound"))


def _fault_cases(found: Any, wanted: Wanted) -> Iterator[Case]:
    for fault in found.FAULTS.values():
        if wanted.engine not in fault.engines:
            continue
        for severity in fault.severities:
            for seed in range(wanted.first_seed, wanted.first_seed + wanted.seeds):
                yield Case(
                    name=f"{fault.name}.{severity:g}.s{seed}",
                    kind="fault",
                    what=fault.name,
                    pair=fault.kind,
                    plant=fault.plant,
                    seed=seed,
                    severity=severity,
                    right=tuple(sorted(fault.right)),
                    cause=fault.cause,
                    emulated=fault.emulated,
                    weight=1.0 if fault.way == "training" else 0.0,
                    mends=seed == wanted.first_seed,
                    mendable=fault.mendable,
                )


def _healthy_cases(found: Any, wanted: Wanted) -> Iterator[Case]:
    for variant in found.HEALTHY.values():
        if wanted.engine in variant.engines:
            yield Case(
                name=f"healthy.{variant.name}.s{wanted.first_seed}",
                kind="healthy",
                what=variant.name,
                pair=variant.kind,
                plant=variant.plant,
                seed=wanted.first_seed,
                severity=1.0,
                right=(NONE,),
                cause=NONE,
                weight=variant.minutes,
            )


def _compound_cases(found: Any, wanted: Wanted) -> Iterator[Case]:
    for pair in found.COMPOUND.values():
        both = (found.FAULTS[pair.first], found.FAULTS[pair.second])
        yield Case(
            name=f"{pair.name}.s{wanted.first_seed}",
            kind="compound",
            what=pair.name,
            pair="mla",
            plant=pair.plant,
            seed=wanted.first_seed,
            severity=1.0,
            right=tuple(sorted(both[0].right | both[1].right)),
            cause=both[0].cause,
            weight=2.0,
            parts=tuple(tuple(sorted(fault.right)) for fault in both),
            mends=True,
        )
