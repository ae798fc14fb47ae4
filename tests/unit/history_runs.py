"""Run folders for tests of the history: real records, written cheaply by the thousand."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from report_run import cell, comparison, estimates, manifest, summary

from harness.findings import Summary

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)
SPEED = 50.5


def plan(
    engine: str = "reference", *, profile: str = "demo", sets: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The plan of a manifest, as far as the history looks at it."""
    return {
        "request": {"engines": [engine], "profile": None, "sets": list(sets), "urls": {}},
        "models": {engine: {"target": "/m/small-target", "drafter": "/m/drafter-mla"}},
        "engines": {engine: {"name": profile}},
    }


def told(run_id: str, **changes: Any) -> Summary:
    """A run's summary: two starts of each variant at concurrency 1."""
    return summary(run_id=run_id, estimates=estimates(), **changes)


def write_one(root: Path, run_id: str, *, created: datetime = BEGUN, **changes: Any) -> Path:
    """One run's folder with a summary and a manifest; `changes` are of the manifest.

    `of` gives another summary, `place` another folder than the run's name.
    """
    of: Summary = changes.pop("of", None) or told(run_id)
    folder = root / changes.pop("place", run_id)
    folder.mkdir(parents=True)
    fields = {
        "created": created.isoformat(timespec="seconds"),
        "plan": plan(),
        "digests": {"reference": {"target": "aaaa1111-00", "drafter": "bbbb2222-00"}},
        "versions": {"spec-harness": "0.1.0"},
        **changes,
    }
    (folder / "summary.json").write_bytes(msgspec.json.encode(of))
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest(of, **fields)))
    return folder


def small(run_id: str = "RUN-ID") -> Summary:
    """A summary of two cells, for many runs."""
    return told(
        run_id,
        cells=(cell("baseline"), cell("speculative")),
        comparisons=(comparison(),),
        cautions=(),
    )


def write_many(root: Path, runs: int, of: Summary | None = None) -> None:
    """Runs an hour apart, of one template: names, times and one speed differ."""
    root.mkdir(parents=True, exist_ok=True)
    of = of or small()
    summary_json = msgspec.json.encode(of)
    manifest_json = msgspec.json.encode(manifest(of, created="CREATED", plan=plan()))
    speed = f"{SPEED}".encode()
    for i in range(runs):
        created = BEGUN + timedelta(hours=i)
        run_id = f"{created:%Y%m%d-%H%M%S}-reference-{i:05d}".encode()
        folder = root / run_id.decode()
        folder.mkdir()
        own = f"{SPEED * (1 + 0.01 * math.sin(i)):.6f}".encode()
        (folder / "summary.json").write_bytes(
            summary_json.replace(b"RUN-ID", run_id).replace(speed, own)
        )
        (folder / "manifest.json").write_bytes(
            manifest_json.replace(b"RUN-ID", run_id).replace(
                b"CREATED", created.isoformat().encode()
            )
        )
