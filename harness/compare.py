"""The story of a comparison: read each run, say what was not the same, judge every figure.

A side is a run's folder, or a selection of the history such as `engine=vllm,last=5`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.analyse.across.compare import compare_groups
from harness.analyse.across.metrics import check_name
from harness.analyse.across.records import Across, Group, Stored
from harness.analyse.across.rows import Wanted
from harness.errors import UsageError
from harness.measure.store import SUMMARY, RunFolder
from harness.stored import read_run
from harness.sweep import is_sweep

if TYPE_CHECKING:
    from harness.history.query import Query

LAST = "last"
KEYS = (
    *("engine", "profile", "drafter", "target", "workload", "load", "suite", "run"),
    *("commit", "since", "until"),
)
"""What a selection may choose by, as `history` does."""


def compare(operands: Sequence[str], wanted: Wanted, results: Path = Path("results")) -> Across:
    """The first side against each of the others. Raises `UsageError` or `VoidRun`.

    `results`: where the runs lie that a selection chooses from.
    """
    for name in wanted.tolerances:
        if name:  # else of all metrics
            check_name("--tolerance", name)
    for name in wanted.metrics:
        check_name("--metric", name)
    if len(operands) < 2:
        raise UsageError("compare: give two runs or more, the reference first")
    folders = [operand for operand in operands if not is_selection(operand)]
    called = dict(zip(folders, labels(folders), strict=True))
    groups = [
        Group(label=called[operand], runs=(read_stored(Path(operand), called[operand]),))
        if operand in called
        else selected(operand, results, without=folders)
        for operand in operands
    ]
    return compare_groups(groups, wanted)


def is_selection(operand: str) -> bool:
    """Whether an operand chooses runs by what they are, and does not name a folder."""
    return "=" in operand and not Path(operand).exists()


def selected(text: str, results: Path, *, without: Sequence[str]) -> Group:
    """The runs of the history that a selection fits, by time, but for the folders in `without`.

    Void runs are not among them, nor imported figures, which have no blocks. Raises `UsageError`.
    """
    from harness.history.store import open_history

    query, last = parse_selection(text)
    # Of so many, as the folders in `without` may be among the newest.
    most = None if last is None else last + len(without)
    found = open_history(results).runs(query, most=most)
    given = {os.path.realpath(folder) for folder in without}
    places = [place for place in found if os.path.realpath(results / place) not in given]
    places = places[-last:] if last is not None else places
    if not places:
        raise UsageError(
            f"{text}: no run in {results} fits; `python -m harness history --results {results}` "
            "lists them"
        )
    runs = tuple(read_stored(results / place, Path(place).name) for place in places)
    return Group(label=text, runs=runs)


def parse_selection(text: str) -> tuple[Query, int | None]:
    """`KEY=VALUE,…,last=N` as a query, and how many of the newest. Raises `UsageError`."""
    from harness.history.query import Query, moment

    told: dict[str, Any] = {}
    last = None
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value or (key != LAST and key not in KEYS):
            raise UsageError(
                f"{text}: {item.strip() or 'an empty item'} selects nothing; give KEY=VALUE with "
                f"{', '.join(KEYS)} or {LAST}=N"
            )
        if key == LAST:
            if not value.isdecimal() or int(value) < 1:
                raise UsageError(f"{text}: {LAST}={value}: give a number of runs from 1 on")
            last = int(value)
        elif key in ("since", "until"):
            told[key] = moment(key, value, datetime.now(UTC))
        else:
            told[key] = value if key == "commit" else (*told.get(key, ()), value)
    return Query(**told, source=("run",), void=False), last


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
    run = read_run(folder)
    argv: dict[str, tuple[str, ...]] = {}
    for launch in run.launches:
        argv.setdefault(f"{launch.engine} {launch.variant}", launch.argv)
    return Stored(
        label=label,
        summary=summary,
        run=run,
        plans=run.manifest.plan["engines"],
        argv=argv,
    )
