"""A stored run as the analysis takes it: plain records, no HTTP, no engine, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from harness.measure.series import Series
from harness.measure.steady import Level, Window, steady_window
from harness.measure.table import RequestTable
from harness.records import (
    Cell,
    EngineCounters,
    LaunchRecord,
    LoadPoint,
    Manifest,
    ParityRecord,
    Ties,
    Timeline,
    Variant,
)

T = TypeVar("T")
PairKey = tuple[str, LoadPoint, int, int]
"""Engine, load, repeat, block: what a baseline cell and its speculative partner share."""

SEARCH = "capacity"
"""The key of a manifest's plan that holds a capacity search."""
MOST_FAILED = 0.05
"""A larger share of failed requests withholds verdicts: what was answered is then another load."""


class CellData(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One saved cell."""

    cell: Cell
    records: RequestTable
    counters: EngineCounters
    timeline: Timeline
    telemetry: Series | None = None

    @property
    def pair_key(self) -> PairKey:
        """What this cell's partner of the other variant shares with it."""
        return (self.cell.engine, self.cell.load, self.cell.repeat, self.cell.block)

    @property
    def ok(self) -> RequestTable:
        """The requests answered whole."""
        return self.records.ok

    @cached_property
    def _windows(self) -> dict[Level, Window | None]:
        return {}

    def window(self, least: Level = "steady") -> Window | None:
        """The cell's steady window; see `measure.steady.steady_window`."""
        if least not in self._windows:
            self._windows[least] = steady_window(self.records, self.cell.load, least)
        return self._windows[least]

    @property
    def to_its_end(self) -> bool:
        """Whether nothing cut the cell short."""
        return self.timeline.interrupted is None

    @property
    def asked(self) -> int:
        """The requests that were sent, or should have been: all but those dropped as planned."""
        return len(self.records) - int(self.records.dropped.sum())

    @property
    def whole(self) -> bool:
        """Whether every request was answered whole, or dropped as planned."""
        return len(self.ok) == self.asked

    @property
    def failed_share(self) -> tuple[int, int]:
        """How many requests failed, of those that ended: cancelled and dropped ones are neither."""
        failed = int(self.records.names("status").where("failed").sum())
        return failed, failed + len(self.ok)

    @property
    def many_failed(self) -> bool:
        """Whether so many failed that figures of the rest cannot be set against another cell's."""
        failed, ended = self.failed_share
        return failed > MOST_FAILED * ended


class RunData(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run's folder holds for the analysis.

    `golden`: what an engine's servers are held to, where there is such a file. `floor`: what
    baselines answered when they were asked prompts again.
    """

    manifest: Manifest
    cells: list[CellData]
    launches: list[LaunchRecord]
    parity: list[ParityRecord] = []
    golden: dict[str, ParityRecord] = {}
    ties: list[Ties] = []
    floor: list[CellData] = []

    @property
    def attached(self) -> bool:
        """Whether the servers ran already: none was started, and no plan set what they serve."""
        return bool((self.manifest.plan.get("request") or {}).get("urls"))

    @property
    def searching(self) -> bool:
        """Whether the run is a capacity search."""
        return SEARCH in self.manifest.plan

    def plan(self, engine: str) -> dict[str, Any]:
        """The plan the engine was measured by."""
        plan: dict[str, Any] = self.manifest.plan["engines"][engine]
        return plan

    def greedy(self, engine: str) -> bool:
        """Whether the engine was asked for its best token each time."""
        return bool(self.plan(engine)["sampling"]["temperature"] == 0)

    def engines(self) -> list[str]:
        """The engines in the order they were run."""
        return list(self.manifest.plan["engines"])

    def loads(self, engine: str) -> list[LoadPoint]:
        """The engine's load points in the plan's order."""
        seen: list[LoadPoint] = []
        for cell in self.manifest.cells:
            if cell.engine == engine and cell.load not in seen:
                seen.append(cell.load)
        return seen

    def select(
        self, engine: str, variant: Variant | None = None, load: LoadPoint | None = None
    ) -> list[CellData]:
        """The saved cells that fit."""
        return [
            c
            for c in self.cells
            if c.cell.engine == engine
            and variant in (None, c.cell.variant)
            and load in (None, c.cell.load)
        ]


def by_repeat(items: Iterable[T], repeat: Callable[[T], int]) -> list[list[T]]:
    """The items of each repeat, by ascending repeat: those of one start of the engine."""
    found: dict[int, list[T]] = {}
    for item in items:
        found.setdefault(repeat(item), []).append(item)
    return [found[number] for number in sorted(found)]


def pairs(cells: Iterable[CellData]) -> list[tuple[CellData, CellData]]:
    """Baseline and speculative cells of equal engine, load, repeat and block, in order."""
    found: dict[PairKey, dict[str, CellData]] = {}
    for data in cells:
        found.setdefault(data.pair_key, {})[data.cell.variant] = data
    return [(both["baseline"], both["speculative"]) for both in found.values() if len(both) == 2]
