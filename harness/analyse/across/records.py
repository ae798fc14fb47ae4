"""What a comparison of runs with each other says. Units and missing values: `harness.records`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from harness.analyse.data import RunData
from harness.findings import Summary, Verdict
from harness.measure.metrics import Better
from harness.records import LoadPoint, Record, Variant

SCHEMA_VERSION = "1.0"
"""Of a comparison as JSON."""

Area = Literal["speed", "acceptance", "start-up", "output", "memory"]
"""What a figure is about, and what a difference between two runs may move."""
Side = Variant | Literal["ratio"]
"""A variant's own figure, or speculative over baseline of the same run."""
Kind = Literal["question", "figure", "detail"]
"""The family that a row is corrected in: the plan's own question, what stands beside, the rest."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One stored run. `plans`: each engine's whole plan, with this harness's defaults.

    `label`: how the user named it. `argv`: what each engine's variants were started with, by
    "engine variant"; empty where servers ran already.
    """

    label: str
    summary: Summary
    run: RunData
    plans: dict[str, dict[str, Any]]
    argv: dict[str, tuple[str, ...]] = {}


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One side: a run, or several runs of the same kind that stand for one."""

    label: str
    runs: tuple[Stored, ...]

    @property
    def last(self) -> Stored:
        """The run whose plan and environment stand for the side."""
        return self.runs[-1]


class Difference(Record, frozen=True, kw_only=True):
    """Something that was not the same in both: a key of the plan, a version, a digest.

    `reference`, `candidate`: in words, None where absent. `affects`: what it may move; empty: no
    figure. `blocks`: the two cannot be compared because of it.
    """

    key: str
    reference: str | None
    candidate: str | None
    affects: tuple[Area, ...] = ()
    blocks: bool = False


class Row(Record, frozen=True, kw_only=True):
    """One metric of the candidate over the reference's, and what may be said of it.

    `load` None: of no load, such as a start. `category` None: of all prompts. `units`: over how
    many starts, blocks, prompts or runs of either side, as `method` says. `verdict` is drawn from
    the corrected interval at `tolerance`: `family` rows of its `kind` were judged at once.
    `unpaired`: why the units do not pair. `note`: why there is no interval, or no verdict.
    """

    metric: str
    unit: str
    better: Better
    area: Area
    kind: Kind
    engine: str
    side: Side
    load: LoadPoint | None
    category: str | None
    reference: float | None
    candidate: float | None
    ratio: float | None
    ci_low: float | None
    ci_high: float | None
    verdict: Verdict
    tolerance: float
    paired: bool
    units: tuple[int, int]
    method: str
    confidence: float | None = None
    p_value: float | None = None
    family: int = 1
    corrected_low: float | None = None
    corrected_high: float | None = None
    corrected_confidence: float | None = None
    unpaired: str | None = None
    note: str | None = None


class Versus(Record, frozen=True, kw_only=True):
    """One candidate against the reference. `differences` come first: they are the usual cause.

    `hindrances`: why the two cannot be compared; the rows are those that were asked for anyway.
    `void`: why no verdict is drawn. `left_out`: what only one of the two measured. `mixed`: in what
    the several runs of a side are not alike.
    """

    candidate: str
    run_ids: tuple[str, ...]
    differences: tuple[Difference, ...]
    hindrances: tuple[str, ...]
    left_out: tuple[str, ...]
    void: str | None
    rows: tuple[Row, ...]
    mixed: tuple[str, ...] = ()

    def causes(self, area: Area) -> tuple[Difference, ...]:
        """The differences that may have moved figures of an area."""
        return tuple(d for d in self.differences if area in d.affects)


class Across(Record, frozen=True, kw_only=True):
    """The answer of `compare`: every candidate against the same reference."""

    reference: str
    run_ids: tuple[str, ...]
    comparisons: tuple[Versus, ...]
    schema_version: str = SCHEMA_VERSION

    @property
    def void(self) -> str | None:
        """Why no verdict is drawn of one of them, or None."""
        return next((c.void for c in self.comparisons if c.void is not None), None)

    @property
    def worse(self) -> tuple[Row, ...]:
        """What got worse by more than was declared."""
        return tuple(r for c in self.comparisons for r in c.rows if r.verdict == "worse")
