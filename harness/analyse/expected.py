"""A run's acceptance length held against what is published of the profile's drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from harness.analyse.acceptance import pooled_acceptance
from harness.analyse.data import CellData, RunData
from harness.analyse.ratio import ratio
from harness.analyse.requests import columns, drafted_a_step
from harness.errors import one_line
from harness.findings import Caution
from harness.measure.table import RequestTable

FEWEST_DRAFTS = 100
"""Fewer verify steps say too little to hold them against anything."""
FEWEST_SETS = 3
"""Published figures of so many data sets give a range that prompts of no such set are held to."""


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected, from `low` to `high`, and the published figures that it is taken from."""

    low: float
    high: float
    said: str


def expected_caution(run: RunData, engine: str) -> Caution | None:
    """Whether an engine's acceptance length is far outside what is published of the drafter."""
    cells = [c for c in run.select(engine, "speculative") if c.ok]
    plan = run.plan(engine)
    if not applies(plan) or not cells:
        return None
    found = pooled_acceptance(cells)
    if found is None or found.length is None or found.drafts < FEWEST_DRAFTS:
        return None
    counts = found.sources[found.source]
    k = (drafted_a_step(counts) if counts is not None else None) or plan["speculative"]["k"]
    band = band_of(plan, k)
    if band is None:
        return None
    if band.low <= found.length <= band.high or _may_lie_in(band, cells, found.length):
        return None
    drafter = plan["drafter"].get("model") or "the profile's drafter"
    return Caution(
        code="acceptance_unexpected",
        text=(
            f"{engine}: {found.length:.2f} tokens a verify step on "
            f"{one_line(plan['workload']['dataset'], 60)} (k = {k}), where {band.low:.2f} to "
            f"{band.high:.2f} is expected of {drafter}: {band.said}"
        ),
        advice=_advice(found.length < band.low),
    )


def applies(plan: dict[str, Any]) -> bool:
    """Whether the plan's figures are of what was served, and drafts were really verified."""
    if not (plan.get("expect") or {}).get("acceptance"):
        return False
    if plan["speculative"].get("forced_length") is not None:
        return False
    # A target of the user's own in the demo's place is another model.
    return plan["target"].get("model") is not None or plan["target"]["path"] is None


def band_of(plan: dict[str, Any], k: int) -> Band | None:
    """What is expected on the plan's prompts with `k` drafts a step; None where nothing is known.

    Prompts of no published data set are held to the range of all of them, tolerance added.
    """
    figures = [f for f in plan["expect"]["acceptance"] if f["k"] == k]
    name = _plain(PurePath(plan["workload"]["dataset"]).stem)
    same = [f for f in figures if name.startswith(_plain(f["dataset"]))]
    if not same:
        if len({f["dataset"] for f in figures}) < FEWEST_SETS:
            return None
        same = figures
    tolerance = plan["expect"]["tolerance"]
    lengths = [f["length"] for f in same]
    return Band(
        low=max(1.0, min(lengths) * (1 - tolerance)),
        high=min(k + 1.0, max(lengths) * (1 + tolerance)),
        said=_said(same),
    )


def _plain(name: str) -> str:
    """A data set's name without what is written one way here and another there."""
    return "".join(c for c in name.casefold() if c.isalnum())


def _said(figures: Sequence[dict[str, Any]]) -> str:
    first = figures[0]
    if len(figures) == 1:
        return f"{first['length']:g} on {first['dataset']} ({first['source']})"
    lengths = [f["length"] for f in figures]
    sets = ", ".join(dict.fromkeys(f["dataset"] for f in figures))
    return f"{min(lengths):g} to {max(lengths):g} on {sets} ({first['source']})"


def _may_lie_in(band: Band, cells: Sequence[CellData], length: float) -> bool:
    """Whether the interval over requests reaches into the band; the figure itself does not."""
    c = columns(RequestTable.join([c.ok for c in cells]))
    if c is None or not c.drafts.sum():
        return False
    told = ratio(c.summed(c.accepted), c.summed(c.drafts), offset=1, most=c.longest)
    if told.low is None or told.high is None:
        return False
    return told.high >= band.low if length < band.low else told.low <= band.high


def _advice(low: bool) -> str:
    if low:
        return (
            "A drafter that trained well does not fall so low by itself: look at the aux layers, "
            "the chat template and the weights being served (`python -m drafters validate`); or it "
            "is another drafter than the profile's."
        )
    return (
        "Answers that repeat themselves are drafted too easily: look at the outputs, and whether "
        "the prompts are those of the figure."
    )
