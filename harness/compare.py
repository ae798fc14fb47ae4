"""The story of a comparison: read each run, say what was not the same, judge every figure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.analyse.across.compare import compare_groups
from harness.analyse.across.metrics import check_name
from harness.analyse.across.records import Across, Group, Stored
from harness.analyse.across.rows import Wanted
from harness.errors import UsageError
from harness.measure.store import SUMMARY, RunFolder, check_version
from harness.plan.schema import Plan, as_dict
from harness.stored import read_run
from harness.sweep import is_sweep


def compare(operands: Sequence[str], wanted: Wanted) -> Across:
    """The first run against each of the others. Raises `UsageError`.

    An operand is a run's folder.
    """
    for option, names in (("--tolerance", wanted.tolerances), ("--metric", wanted.metrics)):
        for name in names:
            if name:
                check_name(option, name)
    if len(operands) < 2:
        raise UsageError("compare: give two runs or more, the reference first")
    groups = [
        Group(label=label, runs=(read_stored(Path(operand), label),))
        for operand, label in zip(operands, labels(operands), strict=True)
    ]
    return compare_groups(groups, wanted)


def exit_code(across: Across) -> int:
    """4 where a run is void, 1 where something is worse by more than was declared, else 0."""
    if across.void is not None:
        return 4
    return 1 if across.worse else 0


def labels(operands: Sequence[str]) -> list[str]:
    """The folders' own names; their whole paths where two of them are the same."""
    names = [Path(os.path.abspath(operand)).name for operand in operands]
    return [
        name if names.count(name) == 1 else operand
        for name, operand in zip(names, operands, strict=True)
    ]


def read_stored(path: Path, label: str) -> Stored:
    """A run's summary and records. Raises `UsageError` naming the file that is wrong."""
    folder = RunFolder(path)
    if is_sweep(path):
        raise UsageError(f"{path}: the folder of a sweep; give one of the runs in {path / 'runs'}")
    if (path / "cells").is_dir() and not (path / SUMMARY).exists():
        raise UsageError(
            f"{path}: it was not summed up; `python -m harness analyse {path}` does it, "
            f"`python -m harness resume {path}` measures the rest"
        )
    summary = folder.summary()
    check_version(path / SUMMARY, summary.schema_version)
    run = read_run(folder)
    plans = msgspec.convert(run.manifest.plan["engines"], dict[str, Plan])
    argv: dict[str, tuple[str, ...]] = {}
    for launch in run.launches:
        argv.setdefault(f"{launch.engine} {launch.variant}", launch.argv)
    return Stored(
        label=label,
        summary=summary,
        run=run,
        plans={engine: as_dict(plan) for engine, plan in plans.items()},
        argv=argv,
    )
